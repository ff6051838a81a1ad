"""The mapping form of a layout (YAML): checked entry by entry, then printed as the config string it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from powertrain.errors import LayoutError
from powertrain.layout.text import AXIS, KEY, NAME, WORD, shorten
from powertrain.options import nearest

_SAFE: Final = re.compile(r"[A-Za-z0-9_./:,@-]+")
_SIZE: Final = re.compile("[0-9]{1,9}")
_ANY: Final = re.compile("(?s).*")
_FORM: Final[Mapping[str, tuple[re.Pattern[str], re.Pattern[str] | None, str]]] = {
    "backend": (WORD, None, "the name of a backend"),
    "name": (NAME, None, "a name"),
    "axes": (AXIS, _SIZE, "a mapping of axes to whole numbers of ranks"),
    "expert_axes": (AXIS, _SIZE, "a mapping of axes to whole numbers of ranks"),
    "options": (KEY, _ANY, "a mapping of names to values that a config string can hold"),
    "via": (WORD, None, "the name of a transfer"),
}
"""What each key of a part takes: the pattern of a word, that of the values of a mapping, and both in words."""


def part_text(part: Mapping[str, Any]) -> str:
    """Return the config string of one part's mapping."""
    text: str = part["backend"] + (f"[{part['name']}]" if part.get("name") else "")
    dims = _dims(part.get("axes"))
    text += f":(attn:{dims}|ffn:{_dims(part['expert_axes'])})" if part.get("expert_axes") is not None else f":{dims}"
    options = "&".join(f"{name}={value_text(value)}" for name, value in (part.get("options") or {}).items())
    return text + (f"?{options}" if options else "") + (f" via {part['via']}" if part.get("via") else "")


def _dims(axes: Mapping[str, int] | None) -> str:
    return "".join(f"{name}{size}" for name, size in (axes or {}).items())


def value_text(value: Any) -> str:
    """Return an option's value as written in a config string; TypeError or ValueError where it has no such form."""
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False, allow_nan=False)
    if _SAFE.fullmatch(text) and not (is_text and text.lower() in {"null", "none"}):
        return text
    return "'" + text.replace("'", "''") + "'"


def mapping_text(mapping: Mapping[str, Any]) -> str:
    """Return the config string that a mapping stands for; `LayoutError` with every entry that is not of the form."""
    problems = _unknown_keys("a layout", mapping, ("groups",))
    groups = mapping.get("groups")
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        problems.append(f"groups is {_brief(groups)}, not a list of lists of parts")
        groups = []
    for i, group in enumerate(groups):
        for j, part in enumerate(group):
            problems += _part_problems(f"groups[{i}][{j}]", part)
    if problems:
        raise LayoutError(problems, heading="layout mapping is not of the right form:")
    return "+".join("|".join(map(part_text, group)) for group in groups)


def _part_problems(where: str, part: Any) -> list[str]:
    if not isinstance(part, Mapping):
        return [f"{where} is {_brief(part)}, not a mapping"]
    return _unknown_keys(where, part, _FORM) + [
        f"{where}.{key} is {_brief(part.get(key))}, not {what}"
        for key, (word, entry, what) in _FORM.items()
        if not _fits(part.get(key), word, entry) and (key == "backend" or part.get(key) is not None)
    ]


def _unknown_keys(where: str, mapping: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [
        f"{where} has no key {_brief(key)}{nearest(str(key), known)}; it has: {', '.join(known)}"
        for key in mapping
        if key not in known
    ]


def _fits(value: Any, word: re.Pattern[str], entry: re.Pattern[str] | None) -> bool:
    """True for a word, or for a mapping of words where `entry` says what the text of its values looks like."""
    if entry is None:
        return isinstance(value, str) and word.fullmatch(value) is not None
    try:
        return all(word.fullmatch(key) and entry.fullmatch(value_text(item)) for key, item in value.items())
    except (AttributeError, TypeError, ValueError, RecursionError):
        return False  # not a mapping, not a word, or without a text


def _brief(value: Any) -> str:
    """Return a short form of anything for a message."""
    try:
        return shorten(repr(value), 60)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"

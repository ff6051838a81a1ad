"""The text of a config string: its grammar as patterns, the faults found in it, and how a mapping is printed as one.

Nothing here knows a backend. The mapping form of a layout (YAML) is checked entry by entry before it is printed.

`PART` and `SECTION` match any text, since each of their pieces may be absent: a fault never stops the reading, and
`powertrain.layout.check` says what is missing where.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any, Final

from powertrain.errors import LayoutError
from powertrain.options import nearest

MAX_LENGTH: Final = 10_000
_WINDOW: Final = 110
_WORD: Final = r"[^\s:\[\]()|+?&=']"
_QUOTED: Final = r"'(?:[^']|'')*'?"
_BARE: Final = r"[^&|+\s']*"
_OPTION: Final = rf"\s*[\w.-]*(?:=(?:{_QUOTED}|{_BARE}))?\s*"
_DIMS: Final = r"(?:[^\W\d]+[0-9]*)*"

WORD: Final = re.compile(f"{_WORD}+")
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
AXIS: Final = re.compile(r"[^\W\d]+")
KEY: Final = re.compile(r"[\w.-]+")
DIM: Final = re.compile(r"([^\W\d]+)([0-9]*)")
OPTION: Final = re.compile(rf"[?&]\s*(?P<key>[\w.-]*)(?:=(?P<value>{_QUOTED}|{_BARE}))?\s*")
SECTION: Final = re.compile(rf"[(|]\s*(?P<section>{_WORD}*)\s*(?P<colon>:?)\s*(?P<dims>{_DIMS})\s*(?P<stray>[^|)]*)")
PART: Final = re.compile(
    rf"""
    \s* (?P<backend> {_WORD}* )
    \s* (?: \[ (?P<name> [^\[\]|+:?()]* ) (?P<name_end> \]? ) )?
    \s* (?P<colon> :? )
    \s* (?P<sizes> (?P<sections> \( [^()+?]* \)? ) | (?P<dims> (?: (?!via\b) {_DIMS} )? ) )
    \s* (?P<stray> (?: (?!via\b) [^|+?]+ )? )
    (?P<options> \? {_OPTION} (?: & {_OPTION} )* )?
    (?: via\b \s* (?P<via> {_WORD}* ) )?
    \s* (?P<rest> [^|+]* )
    """,
    re.VERBOSE,
)

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


def read(text: str, faults: Faults) -> list[list[re.Match[str]]]:
    """Return a match of `PART` for every part, group by group; empty parts are faults and left out.

    Raises `LayoutError` for a text that cannot be read at all.
    """
    if len(text) > MAX_LENGTH:
        faults.add(MAX_LENGTH, f"the layout has {len(text)} characters; the most allowed is {MAX_LENGTH}")
    elif half := re.search("[\ud800-\udfff]", text):
        faults.add(half.start(), f"character {half.group()!a} is half of a surrogate pair and cannot be written")
    elif not text.strip():
        faults.add(len(text), "the layout is empty; write for example 'BACKEND:d1'")
    faults.check()
    groups: list[list[re.Match[str]]] = [[]]
    start = 0
    while start <= len(text) and (found := PART.match(text, start)):
        end = found.end()
        if found.group().strip():
            groups[-1].append(found)
        else:
            beside = end if end < len(text) else start - 1
            faults.add(beside, f"a part is missing beside {text[beside]!r}")
        if text[end : end + 1] == "+":
            groups.append([])
        start = end + 1
    return groups


class Faults:
    """Collects the faults of one config string, so that all are told at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: list[tuple[int, str]] = []

    def add(self, at: int, message: str, *, when: object = True) -> None:
        """Note a fault at offset `at` if `when` is true."""
        if when:
            self._found.append((at, message))

    def __len__(self) -> int:
        return len(self._found)

    def check(self) -> None:
        """Raise `LayoutError` with everything noted, in the order of the text; do nothing when there is nothing."""
        if self._found:
            heading = f"layout has {len(self)} fault{'s' * (len(self) != 1)}:"
            found = sorted(self._found, key=lambda fault: fault[0])
            raise LayoutError([message + self._quote(at) for at, message in found], heading=heading)

    def _quote(self, at: int) -> str:
        """Return the line and a caret under offset `at`; unprintable characters become blanks, long lines are cut.

        Of a blank text there is nothing to point at.
        """
        start = max(0, at - 2 * _WINDOW // 3) if len(self.text) > _WINDOW else 0
        piece = "".join(c if c.isprintable() else " " for c in self.text[start : start + _WINDOW])
        before = "".join("\u3000" if unicodedata.east_asian_width(c) in "WF" else " " for c in piece[: at - start])
        left, right = ("…" if start else ""), ("…" if start + _WINDOW < len(self.text) else "")
        return f"\n    {left}{piece}{right}\n    {' ' * len(left)}{before}^" if self.text.strip() else ""


def shorten(text: str, most: int) -> str:
    """Return `text`, cut to `most` characters for a message."""
    return text if len(text) <= most else text[:most] + "…"


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
        if "groups" in mapping or not problems:  # else a key that is not known was meant for it
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
        return "null" if value is None else shorten(repr(value), 60)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"

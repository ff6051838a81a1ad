"""The mapping form of a layout as users write it (YAML): checked entry by entry, then turned into its config string."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from powertrain.errors import LayoutError
from powertrain.layout.parts import layout_text, value_text
from powertrain.layout.text import AXIS, KEY, NAME, WORD
from powertrain.options import nearest

_KEYS: Final = ("backend", "name", "axes", "expert_axes", "options", "via")


def mapping_text(mapping: Mapping[str, Any]) -> str:
    """Return the config string that a mapping stands for; `LayoutError` with every entry that is not of the form."""
    problems: list[str] = []
    groups = mapping.get("groups")
    problems += [
        f"unknown key {_brief(key)}{nearest(_brief(key), ['groups'])}; a layout has: groups"
        for key in mapping
        if key != "groups"
    ]
    if not isinstance(groups, (list, tuple)):
        problems.append("'groups' is a list of lists of parts")
        groups = []
    for i, group in enumerate(groups):
        if not isinstance(group, (list, tuple)):
            problems.append(f"groups[{i}] is a list of parts, not {type(group).__name__}")
            continue
        for j, part in enumerate(group):
            problems += [f"groups[{i}][{j}]{message}" for message in _part_problems(part)]
    if problems:
        raise LayoutError(problems, heading="layout mapping is not of the right form:")
    return layout_text({"groups": groups})


def _part_problems(part: Any) -> list[str]:
    if not isinstance(part, Mapping):
        return [f" is a mapping, not {type(part).__name__}"]
    problems = [
        f": unknown key {_brief(key)}{nearest(_brief(key), _KEYS)}; a part has: {', '.join(_KEYS)}"
        for key in part
        if key not in _KEYS
    ]
    if not isinstance(part.get("backend"), str) or not WORD.fullmatch(part["backend"]):
        problems.append(".backend is missing or not a backend's name")
    for key, pattern in (("name", NAME), ("via", WORD)):
        value = part.get(key)
        if value not in (None, "") and not (isinstance(value, str) and pattern.fullmatch(value)):
            problems.append(f".{key} is {_brief(value)}, which is not a name")
    for key in ("axes", "expert_axes"):
        axes = part[key] if part.get(key) is not None else {}
        if not isinstance(axes, Mapping):
            problems.append(f".{key} maps axes to sizes")
            continue
        for axis, size in axes.items():
            good = isinstance(axis, str) and AXIS.fullmatch(axis)
            if not good or isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= 10**9:
                problems.append(f".{key} takes an axis and a whole number of ranks, not {_brief(axis)}: {_brief(size)}")
    options = part["options"] if part.get("options") is not None else {}
    if not isinstance(options, Mapping):
        return [*problems, ".options maps names to values"]
    for name, value in options.items():
        try:
            value_text(value)
            good = isinstance(name, str) and KEY.fullmatch(name)
        except (TypeError, ValueError, RecursionError):
            good = False
        if not good:
            problems.append(f".options: {_brief(name)} has a value that a config string cannot hold")
    return problems


def _brief(value: Any) -> str:
    """Return a short form of anything for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:40] + "…"

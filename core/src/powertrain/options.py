"""Typed options: one small description that config strings, recipes, help and errors all read.

An option lives with the plugin that reads it, as an `OptionSpec` in that plugin's spec. Core only converts text to
the declared type, checks bounds, fills defaults and explains what does not fit, all faults at once.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from powertrain.errors import ConfigError, Violations

TYPES: Final = ("int", "float", "bool", "str", "list", "mapping")
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSpec:
    """One option of a backend, transfer, launcher or recipe.

    name: as written in `?name=value` and in YAML. type: one of `TYPES`; `None` is accepted where `default` is None.
    default: used when the option is not given. choices: allowed values. minimum/maximum: inclusive bounds of numbers.
    help: one sentence, shown by the command line and in the docs.
    """

    name: str
    type: str = "str"
    default: Any = None
    help: str = ""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            message = f"option {self.name!r} has type {self.type!r}; the types are {', '.join(TYPES)}"
            raise ConfigError(message)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest known word, or an empty string."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def convert(spec: OptionSpec, value: Any) -> Any:
    """Convert `value` (text from a config string, or a YAML value) to the option's type; ConfigError when it cannot be.

    Text is read strictly: `int` takes `12` and not `1.5`, `bool` takes true/false/yes/no/on/off/1/0, `list` takes
    JSON or comma-separated text, `mapping` takes JSON.
    """
    if value is None or (isinstance(value, str) and value.lower() in {"null", "none"} and spec.default is None):
        if spec.default is None:
            return None
        message = f"option {spec.name!r} needs a value of type {spec.type}, got none"
        raise ConfigError(message)
    result = _typed(spec, value)
    if spec.choices and result not in spec.choices:
        hint = nearest(str(result), map(str, spec.choices))
        message = f"option {spec.name!r} is {result!r}; it takes {', '.join(map(str, spec.choices))}{hint}"
        raise ConfigError(message)
    if spec.type in {"int", "float"}:
        if spec.minimum is not None and result < spec.minimum:
            message = f"option {spec.name!r} is {result}; the least allowed is {spec.minimum:g}"
            raise ConfigError(message)
        if spec.maximum is not None and result > spec.maximum:
            message = f"option {spec.name!r} is {result}; the most allowed is {spec.maximum:g}"
            raise ConfigError(message)
    return result


def _typed(spec: OptionSpec, value: Any) -> Any:
    try:
        match spec.type:
            case "int":
                return _integer(value)
            case "float":
                if isinstance(value, bool):
                    raise ValueError
                return float(value)
            case "bool":
                return _boolean(value)
            case "str":
                return _text(value)
            case "list":
                return _sequence(value)
            case _:
                return _mapping(value)
    except (ValueError, TypeError) as exc:
        message = f"option {spec.name!r} needs a value of type {spec.type}, got {value!r}"
        raise ConfigError(message) from exc


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, float):
        if value.is_integer():
            return int(value)
        raise ValueError
    return int(value)


def _boolean(value: Any) -> bool:
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError


def _sequence(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, str):
        raise ValueError
    if value.lstrip().startswith("["):
        return list(json.loads(value))
    return [part.strip() for part in value.split(",") if part.strip()]


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


def resolve(specs: Iterable[OptionSpec], given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return every declared option with its given or default value, in the order of `specs`.

    where: what the options belong to, for the messages (`"backend fsdp"`). Raises `Violations` with every fault:
    unknown names with the nearest known one, and every value that does not convert.
    """
    table = {spec.name: spec for spec in specs}
    problems = [
        f"{where}: unknown option {name!r}{nearest(name, table)}; it has: {', '.join(sorted(table)) or 'no options'}"
        for name in given
        if name not in table
    ]
    values: dict[str, Any] = {}
    for name, spec in table.items():
        if name not in given:
            values[name] = spec.default
            continue
        try:
            values[name] = convert(spec, given[name])
        except ConfigError as exc:
            problems.append(f"{where}: {exc}")
    if problems:
        raise Violations(problems)
    return values

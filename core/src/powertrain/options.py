"""Typed options: one small description that config strings, recipes, help and errors all read.

An option lives with the plugin that reads it, as an `OptionSpec` in that plugin's spec. Core only converts text to
the declared type, checks bounds, fills defaults and explains what does not fit, all faults at once.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from powertrain.errors import ConfigError, Violations

_BOOLEANS: Final = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_USUAL: Final[Mapping[str, str]] = {
    "gpu": "cuda",
    "half": "float16",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "r": "rank",
} | {"learning_rate": "lr", "betas": "beta1", "lora_alpha": "alpha", "target_modules": "targets"}
"""Words that other programs use -> ours, which are not spelt alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSpec:
    """One option of a backend, transfer, launcher or recipe.

    name: as written in `?name=value` and in YAML. type: a key of `READERS`; `None` is accepted where `default` is None.
    default: used when the option is not given. choices: allowed values. minimum/maximum: inclusive bounds of numbers.
    help: one sentence, shown by the command line and in the docs. listed: False for one of very many that an engine
    takes as they are: lists and the resolved configuration leave it out until it is given.
    """

    name: str
    type: str = "str"
    default: Any = None
    help: str = ""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    listed: bool = True

    def __post_init__(self) -> None:
        if self.type not in READERS:
            message = f"option {self.name!r} has type {self.type!r}; the types are {', '.join(READERS)}"
            raise ConfigError(message)


def option(*, default: Any, help: str, **limits: Any) -> Any:
    """Declare a field of a record that is an option too; limits: `OptionSpec`'s choices, minimum and maximum."""
    return field(default=default, metadata={"help": help, **limits})


def options_of(record: type) -> tuple[OptionSpec, ...]:
    """Return an option for every field declared with `option`, typed by its annotation; a record in it is a mapping."""
    kinds = {"int": "int", "float": "float", "bool": "bool", "str": "str", "tuple": "list"}
    found = []
    for item in fields(record):
        if "help" in item.metadata:
            kind = kinds.get(str(item.type).removesuffix(" | None").partition("[")[0], "mapping")
            preset: Any = item.default
            default = {} if kind == "mapping" else list(preset) if kind == "list" else preset
            found.append(OptionSpec(name=item.name, type=kind, default=default, **item.metadata))
    return tuple(found)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest known word, or an empty string."""
    table = {name.lower(): name for name in known}
    word = word.lower()
    found = [name for name in table if name == _USUAL.get(word)] or difflib.get_close_matches(word, table)
    # Of equally near words the one of the same letters: `bet1a` is `beta1` and not `beta2`.
    best = max(found, key=lambda name: difflib.SequenceMatcher(None, sorted(name), sorted(word)).ratio(), default="")
    return f" (did you mean {table[best]!r}?)" if best else ""


def names(options: Mapping[str, OptionSpec]) -> str:
    """Return the sorted names of those that are listed, for a message, and how many there are beside them."""
    return ", ".join(sorted(name for name, spec in options.items() if spec.listed)) + (
        f" and {more} more" if (more := sum(not spec.listed for spec in options.values())) else ""
    )


def shown(value: Any) -> str:
    """Return a value as a message shows it: in YAML's word where there is none, cut where it is long."""
    try:
        text = "null" if value is None else repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} of endless depth"
    return text if len(text) <= 100 else f"{text[:100]}… ({len(text)} characters)"


def is_none(value: Any) -> bool:
    """Tell whether a value means none: no value, or the text `null` or `none` as a config string writes it."""
    return value is None or (isinstance(value, str) and value.lower() in {"null", "none"})


def convert(spec: OptionSpec, value: Any) -> Any:
    """Convert `value` (text from a config string, or a YAML value) to the option's type; ConfigError when it cannot be.

    Text is read strictly: `int` takes `12` and not `1.5`, `bool` takes true/false/yes/no/on/off/1/0, `list` takes
    JSON or comma-separated text, `mapping` takes JSON. A text may be empty where the default is.
    """
    if spec.default is None and is_none(value) and (value is None or value not in spec.choices):
        return None
    if isinstance(value, bool):  # what YAML makes of a bare yes or no, where that is a choice
        value = next((word for word in spec.choices if _BOOLEANS.get(str(word)) is value), value)
    try:
        result = READERS[spec.type](value)
        bounded = _bounded(result)
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        message = f"option {spec.name!r} needs a value of type {spec.type}, got {shown(value)}"
        raise ConfigError(message) from exc
    words = ["null" if word is None else str(word) for word in spec.choices]
    other = bool(words) and result not in spec.choices
    limits = {
        f"it takes {', '.join(words)}{nearest(str(result), words) if other else ''}": other,
        f"the least allowed is {spec.minimum}": spec.minimum is not None and result < spec.minimum,
        f"the most allowed is {spec.maximum}": spec.maximum is not None and result > spec.maximum,
        "whole numbers have at most 64 bits": not bounded,
        "leave it out, or give a text": result == "" and spec.default != "",
    }
    broken = [limit for limit, beyond in limits.items() if beyond]
    if broken:
        message = f"option {spec.name!r} is {shown(result)}; {broken[0]}"
        raise ConfigError(message)
    return result


def _bounded(value: Any) -> bool:
    """True where all whole numbers in a value have at most 64 bits, so that it can be sent to another process."""
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_bounded, [*value, *value.values()] if isinstance(value, Mapping) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
        raise ValueError
    return str(value)


def _sequence(value: Any) -> list[Any]:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (str, list, tuple)):
        return list(json.loads(value) if isinstance(value, str) else value)
    raise ValueError


def _mapping(value: Any) -> dict[str, Any]:
    return {**(json.loads(value) if isinstance(value, str) else value)}


READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int": _integer,
    "float": _number,
    "bool": lambda value: _BOOLEANS[str(value).lower()],
    "str": _text,
    "list": _sequence,
    "mapping": _mapping,
}
"""Type of an option -> what reads its value, raising ValueError, TypeError or KeyError where it is none."""


def resolve(specs: Iterable[OptionSpec], given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return every declared option with its given or default value, in the order of `specs`.

    where: what the options belong to, for the messages (`"backend fsdp"`). Raises `Violations` with every fault:
    unknown names with the nearest known one, and every value that does not convert.
    """
    problems: list[str] = []
    values = collect(specs, given, where=where, problems=problems)
    if problems:
        raise Violations(problems)
    return values


def collect(
    specs: Iterable[OptionSpec], given: Any, *, where: str, problems: list[str], hint: Callable[..., str] = nearest
) -> dict[str, Any]:
    """As `resolve`, but append the faults to `problems` and go on with the defaults; given: a mapping, or None.

    hint: what is added to an unknown name, from the name and those that there are.
    """
    table = {spec.name: spec for spec in specs}
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        problems.append(f"{where} is {shown(given)}; it must be a mapping of options")
        given = {}
    problems += [
        f"{where}: unknown option {shown(name)}{hint(str(name), table)}; it has: {names(table) or 'no options'}"
        for name in given
        if name not in table
    ]
    values: dict[str, Any] = {}
    for name, spec in table.items():
        values[name] = spec.default
        try:
            if name in given:
                values[name] = convert(spec, given[name])
        except ConfigError as exc:
            problems.append(f"{where}: {exc}" if where else str(exc))
    return copy.deepcopy(values)

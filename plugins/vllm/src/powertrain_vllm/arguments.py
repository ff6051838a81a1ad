"""vLLM's engine arguments as options: those of the version that is installed, read from its source and not imported.

Importing vLLM takes a quarter of a minute, and a config string is read many times. Where vLLM is not installed (an
engine's ranks may have an interpreter of their own) a list that is shipped stands in; the ranks then hold the options
to the version that they have.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, overload

from powertrain.options import OptionSpec

logger = logging.getLogger(__name__)
SHIPPED: Final = Path(__file__).with_name("arguments.json")
"""Made by `scripts/vllm_arguments.py` from the versions that were tested, the newest first."""
Kinds = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Argument -> its type as an option, and its choices if there are few that may be told."""
_PLAIN: Final = {"bool": "bool", "int": "int", "float": "float", "str": "str", "dict": "mapping"}
_MANY: Final = ("list", "set", "tuple", "Sequence")
_LONGEST: Final = 200
"""Lines of a statement that gives a type its name, at most."""


class Arguments(Sequence[OptionSpec]):
    """The options of the backend: first those that are described here, then vLLM's other arguments, not listed.

    described: with a help text and bounds of our own. own: names of those that are this plugin's and not vLLM's; the
    others are left out where the version has them no more. refused: arguments that are known, so that one who gives
    them can be told why they are not taken. Nothing is read before the first use.
    """

    def __init__(self, described: Iterable[OptionSpec], own: Iterable[str], refused: Iterable[str]) -> None:
        self._described, self._own, self._refused = tuple(described), frozenset(own), frozenset(refused)
        self._made: tuple[Kinds, tuple[OptionSpec, ...]] = {}, ()

    @overload
    def __getitem__(self, index: int) -> OptionSpec: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[OptionSpec, ...]: ...
    def __getitem__(self, index: int | slice) -> OptionSpec | tuple[OptionSpec, ...]:
        return self._now()[index]

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Iterator[OptionSpec]:
        return iter(self._now())

    def _now(self) -> tuple[OptionSpec, ...]:
        kinds = installed() or shipped()
        if self._made[0] is not kinds:
            self._made = kinds, tuple(self._each(kinds))
        return self._made[1]

    @property
    def shipped(self) -> tuple[OptionSpec, ...]:
        """The options that can be given by the shipped list; for pages that are the same whatever is installed."""
        return tuple(option for option in self._each(shipped()) if option.name not in self._refused)

    def _each(self, kinds: Kinds) -> Iterator[OptionSpec]:
        names = {option.name for option in self._described}
        for option in self._described:
            if option.name in self._own:
                yield option
            elif option.name in kinds:
                yield replace(option, choices=option.choices or kinds[option.name][1])
        for name, (kind, choices) in kinds.items():
            if name not in names:
                yield OptionSpec(name=name, type=kind, choices=choices, listed=False)


@cache
def shipped() -> Kinds:
    """Return the arguments of the newest tested version, and those that only earlier ones have."""
    found = json.loads(SHIPPED.read_text(encoding="utf-8"))["arguments"]
    return {name: (kind, tuple(choices[0]) if choices else ()) for name, (kind, *choices) in found.items()}


def installed() -> Kinds | None:
    """Return the arguments of the vLLM that this interpreter would import, or None where there is none."""
    try:
        spec = find_spec("vllm")
    except ValueError:  # a module of that name was put in place by hand
        return None
    places = spec.submodule_search_locations if spec else None
    return _read(places[0]) if places else None


@cache
def _read(folder: str) -> Kinds | None:
    try:
        return read(Path(folder))
    except (OSError, ValueError, SyntaxError) as exc:
        logger.warning("vLLM's arguments cannot be read in %s (%s); a shipped list stands in", folder, exc)
        return None


def read(folder: Path) -> Kinds:
    """Return the arguments of the vLLM whose package lies in `folder`; ValueError where it has no such class."""
    tree = ast.parse((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    made = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"), None)
    if made is None:
        message = "there is no class EngineArgs"
        raise ValueError(message)
    homes = {
        alias.asname or alias.name: folder.parent.joinpath(*node.module.split("."))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    fields = [node for node in made.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    named = {node.target.id: node.annotation for node in fields if isinstance(node.target, ast.Name)}
    return {name: _kind(_flat(said, homes)) for name, said in named.items() if not name.startswith("_")}


def _kind(said: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """Return type and choices of what an annotation allows: option types, and `ast.Constant`s of a `Literal`."""
    words = [word for word in said if isinstance(word, str)]
    choices = tuple(dict.fromkeys(word.value for word in said if not isinstance(word, str)))
    for kind in ("list", "str", "mapping", "bool", "float", "int"):
        if kind in words:
            return kind, ()
    kinds = {type(choice) for choice in choices}
    return "int" if kinds == {int} else "str", choices if kinds in ({int}, {str}) else ()


def _flat(node: ast.expr, homes: Mapping[str, Path]) -> list[Any]:
    """Return all that an annotation allows beside None; names of other types are looked up in the modules they are of.

    A class of a structured argument is a mapping, other classes are written as text and left to vLLM.
    """
    match node:
        case ast.Constant(value=str(text)):
            return _flat(ast.parse(text, mode="eval").body, homes)
        case ast.Constant(value=None):
            return []
        case ast.BinOp(left=left, right=right):
            return [*_flat(left, homes), *_flat(right, homes)]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [
                word
                for part in parts  # a name in it that cannot be looked up leaves the choices open
                for word in ([part] if isinstance(part, ast.Constant) else _flat(part, homes) or ["str"])
            ]
        case ast.Subscript(value=ast.Name(id="Union" | "Optional" | "Annotated" as how), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [word for part in parts[: 1 if how == "Annotated" else None] for word in _flat(part, homes)]
        case ast.Subscript(value=ast.Name(id=name)):
            return ["list"] if name in _MANY else [_PLAIN[name]] if name in _PLAIN else []
        case ast.Name(id=name):
            return _named(name, homes)
    return []


def _named(name: str, homes: Mapping[str, Path]) -> list[Any]:
    if name in _PLAIN:
        return [_PLAIN[name]]
    if name in _MANY:
        return ["list"]
    home = homes.get(name)
    for file in (home.with_suffix(".py"), home / "__init__.py") if home else ():
        if file.is_file() and (value := _assigned(name, file.read_text(encoding="utf-8"))):
            beside = {node.id: home for node in ast.walk(value) if isinstance(node, ast.Name)}
            return _flat(value, {**homes, **beside})
    return ["mapping"] if name.endswith(("Config", "Args")) else []


def _assigned(name: str, text: str) -> ast.expr | None:
    """Return what a module gives a name at its top, from the lines of that statement alone; None where it does not."""
    found = re.search(rf"^{re.escape(name)}\b(?:\s*:\s*[\w.]+)?\s*=(?!=)", text, re.M)
    lines = text[found.start() :].splitlines() if found else []
    for count in range(1, min(len(lines), _LONGEST) + 1):
        try:
            statement = ast.parse("\n".join(lines[:count])).body[0]
        except SyntaxError:
            continue
        return statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return None

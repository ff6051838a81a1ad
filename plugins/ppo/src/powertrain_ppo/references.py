"""Functions and files named in a recipe: `module:function`, `path/to/file.py:function`."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from powertrain.errors import ConfigError
from powertrain.options import nearest


def load_function(name: str, *, what: str, path: Callable[[str], Path]) -> Callable[..., Any]:
    """Return the function that `name` means.

    what: the option that it stands in, for messages ("ppo.reward"). path: turns a relative path of the recipe into a
    real one. ConfigError names the option, the file or module, and what stands in its way.
    """
    place, attribute = _split(name, what, "'module:function' or 'path/to/file.py:function'")
    try:
        module = _load_file(path(place), what) if place.endswith(".py") else import_module(place)
        found = getattr(module, attribute, None)
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:  # a user's module may raise anything at import
        hint = _way_out(place, attribute, exc, path)
        message = f"{what} {name!r} cannot be imported: {raised(exc)}{hint}"
        raise ConfigError(message) from exc
    if found is None:
        message = f"{what}: {place} has no {attribute!r}{nearest(attribute, _public(vars(module)))}"
        raise ConfigError(message)
    if not callable(found):
        message = f"{what} {name!r} is a {type(found).__name__}, not a function"
        raise ConfigError(message)
    return found  # type: ignore[no-any-return]


def check_call(function: Callable[..., Any], name: str, *words: str, what: str) -> None:
    """Refuse a function that cannot be called with these positional arguments; the message names its file and line."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a builtin may tell nothing of its arguments
        return
    try:
        signature.bind(*words)
    except TypeError as exc:
        takes = f"{place_of(function)} takes {_plain(signature)}"
        message = f"{what} {name!r} is called with ({', '.join(words)}); {takes}: {exc}"
        raise ConfigError(message) from exc


def check_keywords(
    function: Callable[..., Any], name: str, given: Mapping[str, Any], *, what: str, option: str
) -> None:
    """Refuse keyword arguments that a function does not take, or the lack of one that it needs; says what it takes."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(**given)
    except TypeError as exc:
        unknown = [key for key in given if key not in signature.parameters]
        hint = nearest(str(unknown[0]), signature.parameters) if unknown else ""
        takes = f"{place_of(function)} takes {_plain(signature)}"
        message = f"{what} {name!r} does not take {option} {dict(given)!r}: {exc}{hint}; {takes}"
        raise ConfigError(message) from exc


def check_named(name: str, *, what: str) -> None:
    """Refuse a `module:function` that is not there, without importing the module: it may need what only workers have.

    Reads the module's source. A module that cannot be found or read that way (an extension, say), or that makes its
    names while it runs, is left to the engine.
    """
    module, attribute = _split(name, what, "'module:function', the module importable where the engine runs")
    if module.endswith(".py"):
        message = f"{what} {name!r} names a file; the engines import it by 'module:function' from their PYTHONPATH"
        raise ConfigError(message)
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit) as exc:  # finding a submodule imports the packages above it
        message = f"{what} {name!r} cannot be imported: {raised(exc)}{_nearest_module(module)}"
        raise ConfigError(message) from exc
    if spec is None:
        message = f"{what} {name!r}: there is no module {module!r}{_nearest_module(module)}"
        raise ConfigError(message)
    names, functions = _names_in(spec.origin)
    first = attribute.partition(".")[0]
    if names is not None and first not in names:
        public = ", ".join(_public(functions)) or "none"
        message = f"{what} {name!r}: {module} has no {first!r}{nearest(first, names)}; its functions: {public}"
        raise ConfigError(message)


def _plain(signature: inspect.Signature) -> str:
    """Return names and defaults without annotations, which would only make the line long."""
    empty = inspect.Parameter.empty
    parameters = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(parameters))


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is written, `file:line in name`, as far as that can be known."""
    label = str(getattr(function, "__qualname__", type(function).__qualname__))
    try:
        plain = inspect.unwrap(function)
        code = getattr(plain, "__code__", None) or plain.__call__.__code__  # type: ignore[operator]
    except (AttributeError, ValueError):
        return label
    return f"{code.co_filename}:{code.co_firstlineno} in {label}"


def raised(exc: BaseException) -> str:
    """Say what was raised, and at which line if that is known."""
    cause = exc.__cause__ if isinstance(exc.__cause__, BaseException) and type(exc) is RuntimeError else exc
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not _machinery(frame.filename)]
    at = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""
    return f"{type(exc).__name__}: {exc}{at}"


def _machinery(file: str) -> bool:
    """True for frames of the import itself and of this module, which tell a user nothing."""
    return file in (__file__, import_module("importlib").__file__) or file.startswith("<frozen importlib")


def _split(name: str, what: str, form: str) -> tuple[str, str]:
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        hint = f"; name the function in it: '{name}:FUNCTION'" if name.endswith(".py") else ""
        message = f"{what} {name!r} is not of the form {form}{hint}"
        raise ConfigError(message)
    return place, attribute


def _public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def _way_out(place: str, attribute: str, exc: BaseException, path: Callable[[str], Path]) -> str:
    """Return what was likely meant by a module that is not there."""
    if not isinstance(exc, ModuleNotFoundError) or exc.name is None or not f"{place}.".startswith(f"{exc.name}."):
        return ""
    file = f"{place.replace('.', '/')}.py"
    if path(file).is_file():
        return f" (did you mean the file, {f'{file}:{attribute}'!r}?)"
    return _nearest_module(exc.name)


def _nearest_module(name: str) -> str:
    """Return the nearest module beside the last word of a dotted name, or the nearest package to its first word."""
    package, _, last = name.rpartition(".")
    places = None
    if package:
        try:
            places = import_module(package).__path__
        except (Exception, SystemExit):  # noqa: BLE001 - the package is the wrong word, or breaks at import
            return _nearest_module(package)
    hint = nearest(last, (info.name for info in pkgutil.iter_modules(places)))
    return hint.replace("mean '", f"mean '{package}.") if package else hint


def _names_in(file: str | None) -> tuple[set[str] | None, list[str]]:
    """Return the names that a Python file binds (None when reading cannot tell) and its top-level functions."""
    if file is None or not file.endswith(".py"):
        return None, []
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None, []
    names: set[str] = set()
    for node in ast.walk(tree):  # also what stands in functions: rather a name too many than a loss refused
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    made = {"*", "__getattr__", "globals", "setattr"}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return None if (names | called) & made else names, functions


def _load_file(file: Path, what: str) -> ModuleType:
    """Import a file under a name of its own; the same file is imported once."""
    if not file.is_file():
        message = f"{what}: {no_file(file)}"
        raise ConfigError(message)
    name = f"_powertrain_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def no_file(file: Path) -> str:
    """Return the sentence that a file is not there, with the nearest name beside where it should be."""
    try:
        hint = nearest(file.name, (path.name for path in file.parent.iterdir()))
    except (OSError, ValueError):
        hint = ""
    return f"there is no file {str(file)!r}{hint}; a relative path is read from the recipe file's folder"

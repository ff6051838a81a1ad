"""Functions and files named in a recipe: `module:function`, `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from powertrain.errors import ConfigError
from powertrain.options import nearest


def load_function(name: str, *, what: str, path: Callable[[str], Path]) -> Callable[..., Any]:
    """Return the function that `name` means.

    what: what it is for, for messages ("reward"). path: turns a relative path of the recipe into a real one.
    ConfigError names the option, the file or module, and what stands in its way.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        message = f"{what} {name!r} is not of the form 'module:function' or 'path/to/file.py:function'"
        raise ConfigError(message)
    try:
        module = _load_file(path(place), what) if place.endswith(".py") else import_module(place)
        found = getattr(module, attribute, None)
    except ConfigError:
        raise
    except Exception as exc:  # a user's module may raise anything at import
        message = f"{what} {name!r} cannot be imported: {type(exc).__name__}: {exc}"
        raise ConfigError(message) from exc
    if found is None:
        message = f"{what}: {place} has no {attribute!r}{nearest(attribute, vars(module))}"
        raise ConfigError(message)
    if not callable(found):
        message = f"{what} {name!r} is a {type(found).__name__}, not a function"
        raise ConfigError(message)
    return found  # type: ignore[no-any-return]


def _load_file(file: Path, what: str) -> ModuleType:
    """Import a file under a name of its own; the same file is imported once."""
    if not file.is_file():
        message = f"{what}: there is no file {str(file)!r}; a relative path is read from the recipe file's folder"
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

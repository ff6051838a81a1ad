"""Turning one plugin into its spec, and its texts into classes. This is the one place where plugin code is called
under a broad `except`: whatever a plugin does wrong becomes one `PluginError` of one line, with the cause chained.
"""

from __future__ import annotations

import sys
from importlib import import_module, util
from types import CoroutineType, ModuleType
from typing import Any, Final

from powertrain import specs
from powertrain.errors import ConfigError, EngineNotReadyError, MissingDependencyError, PluginError
from powertrain.registry.discovery import PluginInfo
from powertrain.specs import API_VERSION, Spec

SPECS: Final[dict[str, tuple[type[Spec], tuple[str, ...]]]] = {
    "backend": (specs.BackendSpec, ("engine", "environment", "manifest")),
    "transfer": (specs.TransferSpec, ("driver", "source", "sink")),
    "launcher": (specs.LauncherSpec, ("launcher",)),
    "recipe": (specs.RecipeSpec, ("recipe",)),
    "service": (specs.ServiceSpec, ("service",)),
    "device": (specs.DeviceSpec, ("probe",)),
}
"""Kind -> its spec, and the spec's fields that name something as "module:Attribute", the main one first."""


def fail(info: PluginInfo, kind: str, cause: str, error: type[PluginError] = PluginError) -> PluginError:
    """Return the error for one failure of a plugin: one line that names plugin, dist, version and cause."""
    return error(
        info.unusable(cause), plugin=info.name, group=info.group, dist=info.dist, version=info.version, kind=kind
    )


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


def load_spec(info: PluginInfo) -> Spec:
    """Import the plugin's hooks module, register it, call its hook and return the checked spec.

    Each plugin gets a plugin manager of its own, which is thrown away: nothing of a plugin that fails stays
    registered (pluggy up to 1.6 keeps one whose validation failed), and no plugin sees another's hooks.
    """
    plugin = resolve(info, info.module)
    if not isinstance(plugin, ModuleType):
        cause = f"its entry point {info.module!r} is a {type(plugin).__name__}; plugins are modules"
        raise fail(info, "not-a-module", cause)
    return _pick(info, _ask(info, plugin))


def _ask(info: PluginInfo, plugin: ModuleType) -> list[Any]:
    from pluggy import PluginManager, PluginValidationError

    from powertrain import hookspecs

    manager = PluginManager("powertrain")
    manager.add_hookspecs(hookspecs)
    kind, cause = "bad-signature", "hook arguments do not fit"
    try:
        manager.register(plugin)
        kind, cause = "hook-typo", "it implements a hook that does not exist"
        manager.check_pending()
    except PluginValidationError as exc:
        raise fail(info, kind, f"{cause}, {exc}") from exc
    except Exception as exc:
        raise fail(info, "broken-import", f"registering {info.module} raised {_told(exc)}") from exc
    hook = f"powertrain_{info.kind}"
    caller = getattr(manager.hook, hook)
    if not caller.get_hookimpls():
        cause = f"{info.module} has no hook {hook}; is `@powertrain.hookimpl` missing above it?"
        raise fail(info, "no-hook", cause)
    try:
        answers: list[Any] = caller()
    except (Exception, SystemExit) as exc:
        raise fail(info, "raising-hook", f"its hook {hook} raised {_told(exc)}") from exc
    return [spec for answer in answers for spec in (answer if isinstance(answer, (list, tuple)) else [answer])]


def _pick(info: PluginInfo, answers: list[Any]) -> Spec:
    hook, wanted = f"its hook powertrain_{info.kind}", SPECS[info.kind][0]
    for answer in answers:
        if isinstance(answer, CoroutineType):
            answer.close()  # an `async def` hook: say so below, without a second warning about it
        if not isinstance(answer, wanted):
            raise fail(info, "wrong-return", f"{hook} returned a {type(answer).__name__}, not a {wanted.__name__}")
    named: list[Spec] = [answer for answer in answers if answer.name == info.name]
    if len(named) != 1:
        names = ", ".join(repr(answer.name) for answer in answers) or "none"
        raise fail(info, "wrong-return", f"{hook} must return one spec named {info.name!r}, it returned {names}")
    _check_api(info, named[0].api)
    if isinstance(named[0], specs.BackendSpec):
        try:
            named[0].axis_table()
        except ConfigError as exc:
            raise fail(info, "wrong-return", f"its spec cannot be used, {exc}") from exc
    return named[0]


def _check_api(info: PluginInfo, api: Any) -> None:
    match api:
        case (int(major), int(minor)):
            theirs = (major, minor)
        case _:
            raise fail(info, "wrong-return", f"its spec's api is {api!r}, not a pair of numbers")
    if (API_VERSION[0], 0) <= theirs <= API_VERSION:
        return
    age, way = ("old", f"upgrade {info.dist}") if theirs < API_VERSION else ("new", "upgrade powertrain")
    made_for, ours = ("{}.{}".format(*version) for version in (theirs, API_VERSION))
    cause = f"it was made for API {made_for}, which is too {age} for this powertrain's {ours}; {way}"
    raise fail(info, f"api-too-{age}", cause)


def load_reference(info: PluginInfo, spec: Spec, field: str) -> Any:
    """Import what `spec`'s field names as "module:Attribute"; EngineNotReadyError for a planned one.

    A static manifest needs no engine.
    """
    if spec.status == "planned" and field != "manifest":
        lack = "has no engine for it" if info.kind == "backend" else "does not bring it"
        cause = f"it is described so that config strings can be explained, but this release {lack} yet"
        raise fail(info, "not-ready", cause, EngineNotReadyError)
    path = getattr(spec, field)
    if not isinstance(path, str) or ":" not in path:
        raise fail(info, "wrong-return", f"its spec's {field} is {path!r}, not of the form 'module:Attribute'")
    return resolve(info, path, spec)


def resolve(info: PluginInfo, path: str, spec: Spec | None = None) -> Any:
    """Import "module" or "module:Attribute" on behalf of a plugin; every failure is a `PluginError` of one line.

    spec: the plugin's, once it is known; its `requires` and `install` make the message fuller.
    """
    module, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module)
    except (Exception, SystemExit) as exc:
        raise _import_failure(info, module, exc, spec) from exc
    for step in filter(None, attribute.split(".")):
        try:
            found = getattr(found, step)
        except AttributeError as exc:
            raise fail(info, "removed", f"{module} has no {attribute!r}; is an old {info.dist} in front?") from exc
    return found


def _import_failure(info: PluginInfo, module: str, exc: BaseException, spec: Spec | None) -> PluginError:
    """Tell a plugin that is gone from a package that it needs and from everything else."""
    absent = (exc.name or "") if isinstance(exc, ModuleNotFoundError) else ""
    package = absent.partition(".")[0]
    if absent and f"{module}.".startswith(f"{absent}."):
        cause = f"its own module {module} is not there ({exc}); reinstall {info.dist}, or remove what is left of it"
        return fail(info, "removed", cause)
    if package in {"", module.partition(".")[0]}:
        return fail(info, "broken-import", f"importing {module} raised {_told(exc)}")
    others = [name for name in (missing(spec.requires) if spec else ()) if name != package]
    hint = (spec and spec.install) or f"pip install '{info.dist}[engine]', or the package that provides {absent!r}"
    cause = f"{module} needs {', '.join(map(repr, [absent, *others]))}, not installed here; way out: {hint}"
    return fail(info, "missing-dependency", cause, MissingDependencyError)


def lacking(info: PluginInfo, spec: Spec) -> str:
    """Return the line that tells what a plugin requires and is not installed here; "" for none, or a planned one."""
    absent = missing(spec.requires) if spec.status == "ready" else ()
    way = spec.install or "install what provides it"
    return info.unusable(f"it needs {', '.join(absent)}, not installed here; {way}") if absent else ""


def missing(requires: tuple[str, ...]) -> tuple[str, ...]:
    """Return those import names of `requires` that are not installed, without importing what is.

    Parents of a dotted name are imported, as Python demands; a parent that fails counts as missing.
    """
    return tuple(name for name in requires if not _present(name))


def _present(name: str) -> bool:
    try:
        return name in sys.modules or util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

"""Turning one plugin into its spec, and its texts into classes. This is the one place where plugin code is called
under a broad `except`: whatever a plugin does wrong becomes one `PluginError` of one line, with the cause chained.
"""

from __future__ import annotations

import sys
from importlib import import_module, util
from types import CoroutineType, ModuleType
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, EngineNotReadyError, MissingDependencyError, PluginError
from powertrain.registry.discovery import PluginInfo
from powertrain.specs import (
    API_VERSION,
    BackendSpec,
    DeviceSpec,
    LauncherSpec,
    RecipeSpec,
    ServiceSpec,
    Spec,
    TransferSpec,
)

if TYPE_CHECKING:
    import pluggy

SPEC_OF_KIND: dict[str, type[Spec]] = {
    "backend": BackendSpec,
    "transfer": TransferSpec,
    "launcher": LauncherSpec,
    "recipe": RecipeSpec,
    "service": ServiceSpec,
    "device": DeviceSpec,
}
REFERENCES: dict[str, tuple[str, ...]] = {
    "backend": ("engine", "environment"),
    "transfer": ("driver", "source", "sink"),
    "launcher": ("launcher",),
    "recipe": ("recipe",),
    "service": ("service",),
    "device": ("probe",),
}
"""Fields of a spec that name something as "module:Attribute"; the first one is what `load_class` loads."""


def fail(info: PluginInfo, kind: str, cause: str, error: type[PluginError] = PluginError) -> PluginError:
    """Return the error for one failure of a plugin: one line that names plugin, dist, version and cause."""
    message = " ".join(f"{info} cannot be used: {cause}".split())
    return error(message, plugin=info.name, group=info.group, dist=info.dist, version=info.version, kind=kind)


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


def load_spec(manager: pluggy.PluginManager, info: PluginInfo) -> Spec:
    """Import the plugin's hooks module, register it in `manager`, call its hook and return the checked spec.

    On any failure nothing of the plugin stays registered. A module that serves several entry points is registered
    once; asking again is harmless.
    """
    plugin = resolve(info, info.module)
    if not isinstance(plugin, ModuleType):
        cause = f"its entry point {info.module!r} is a {type(plugin).__name__}; plugins are modules"
        raise fail(info, "not-a-module", cause)
    fresh = not manager.is_registered(plugin)
    try:
        if fresh:
            _register(manager, info, plugin)
        return _pick(info, _ask(manager, info, plugin))
    except BaseException:
        # pluggy up to 1.6 leaves a plugin half registered when its validation fails.
        if fresh and manager.is_registered(plugin):
            manager.unregister(plugin)
        raise


def _register(manager: pluggy.PluginManager, info: PluginInfo, plugin: ModuleType) -> None:
    from pluggy import PluginValidationError

    try:
        manager.register(plugin)
    except PluginValidationError as exc:
        raise fail(info, "bad-signature", f"hook arguments do not fit, {exc}") from exc
    except Exception as exc:
        raise fail(info, "broken-import", f"registering {info.module} raised {_told(exc)}") from exc
    try:
        manager.check_pending()
    except PluginValidationError as exc:
        raise fail(info, "hook-typo", f"it implements a hook that does not exist, {exc}") from exc


def _ask(manager: pluggy.PluginManager, info: PluginInfo, plugin: ModuleType) -> list[Any]:
    hook = f"powertrain_{info.kind}"
    if hook not in {caller.name for caller in manager.get_hookcallers(plugin) or ()}:
        cause = f"{info.module} has no hook {hook}; is `@powertrain.hookimpl` missing above it?"
        raise fail(info, "no-hook", cause)
    caller = manager.subset_hook_caller(hook, [other for other in manager.get_plugins() if other is not plugin])
    try:
        answers: list[Any] = caller()
    except (Exception, SystemExit) as exc:
        raise fail(info, "raising-hook", f"its hook {hook} raised {_told(exc)}") from exc
    return [spec for answer in answers for spec in (answer if isinstance(answer, (list, tuple)) else [answer])]


def _pick(info: PluginInfo, answers: list[Any]) -> Spec:
    wanted = SPEC_OF_KIND[info.kind]
    for answer in answers:
        if isinstance(answer, CoroutineType):
            answer.close()  # an `async def` hook: say so below, without a second warning about it
        if not isinstance(answer, wanted):
            cause = f"its hook powertrain_{info.kind} returned a {type(answer).__name__}, not a {wanted.__name__}"
            raise fail(info, "wrong-return", cause)
    named: list[Spec] = [answer for answer in answers if answer.name == info.name]
    if len(named) != 1:
        names = ", ".join(repr(answer.name) for answer in answers) or "none"
        cause = f"its hook powertrain_{info.kind} must return one spec named {info.name!r}, it returned {names}"
        raise fail(info, "wrong-return", cause)
    spec = named[0]
    _check_api(info, spec.api)
    if isinstance(spec, BackendSpec):
        try:
            spec.axis_table()
        except ConfigError as exc:
            raise fail(info, "wrong-return", f"its spec cannot be used, {exc}") from exc
    return spec


def _check_api(info: PluginInfo, api: Any) -> None:
    match api:
        case (int(major), int(minor)):
            theirs, ours = f"{major}.{minor}", ".".join(map(str, API_VERSION))
        case _:
            raise fail(info, "wrong-return", f"its spec's api is {api!r}, not a pair of numbers")
    if major < API_VERSION[0]:
        cause = f"it was made for API {theirs}, which is too old for this powertrain's {ours}; upgrade {info.dist}"
        raise fail(info, "api-too-old", cause)
    if (major, minor) > API_VERSION:
        cause = f"it was made for API {theirs}, which is too new for this powertrain's {ours}; upgrade powertrain"
        raise fail(info, "api-too-new", cause)


def load_reference(info: PluginInfo, spec: Spec, field: str) -> Any:
    """Import what `spec`'s field names as "module:Attribute"; EngineNotReadyError for a planned backend."""
    if getattr(spec, "status", "ready") == "planned":
        cause = "it is described so that config strings can be explained, but this release has no engine for it yet"
        raise fail(info, "not-ready", cause, EngineNotReadyError)
    path = getattr(spec, field)
    if not isinstance(path, str) or ":" not in path:
        raise fail(info, "wrong-return", f"its spec's {field} is {path!r}, not of the form 'module:Attribute'")
    return resolve(info, path, requires=spec.requires, install=spec.install)


def resolve(info: PluginInfo, path: str, *, requires: tuple[str, ...] = (), install: str = "") -> Any:
    """Import "module" or "module:Attribute" on behalf of a plugin; every failure is a `PluginError` of one line."""
    module, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as exc:
        raise _not_found(info, module, exc, requires, install) from exc
    except (Exception, SystemExit) as exc:
        raise fail(info, "broken-import", f"importing {module} raised {_told(exc)}") from exc
    for step in filter(None, attribute.split(".")):
        try:
            found = getattr(found, step)
        except AttributeError as exc:
            raise fail(info, "removed", f"{module} has no {attribute!r}; is an old {info.dist} in front?") from exc
    return found


def _not_found(
    info: PluginInfo, module: str, exc: ModuleNotFoundError, requires: tuple[str, ...], install: str
) -> PluginError:
    absent = exc.name or ""
    if absent and f"{module}.".startswith(f"{absent}."):
        cause = f"its own module {module} is not there ({exc}); reinstall {info.dist}, or remove what is left of it"
        return fail(info, "removed", cause)
    if not absent or absent.partition(".")[0] == module.partition(".")[0]:
        return fail(info, "broken-import", f"importing {module} raised {_told(exc)}")
    absents = [name for name in missing(requires) if name != absent.partition(".")[0]]
    hint = install or _extra(info) or f"install the package that provides {absent!r}"
    cause = f"{module} needs {', '.join(map(repr, [absent, *absents]))}, not installed here; way out: {hint}"
    return fail(info, "missing-dependency", cause, MissingDependencyError)


def _extra(info: PluginInfo) -> str:
    from importlib import metadata

    try:
        extras = metadata.metadata(info.dist).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return ""
    return f"pip install '{info.dist}[engine]'" if "engine" in extras else ""


def missing(requires: tuple[str, ...]) -> tuple[str, ...]:
    """Return those import names of `requires` that are not installed, without importing what is.

    Parents of a dotted name are imported, as Python demands; a parent that fails counts as missing.
    """
    return tuple(name for name in requires if not _present(name))


def _present(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

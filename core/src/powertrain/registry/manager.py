"""The registry: an object that lists plugins from metadata and imports exactly those that are asked for."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from powertrain.errors import ConfigError, PluginError, UnknownPluginError
from powertrain.options import nearest
from powertrain.registry.discovery import KIND_OF_GROUP, PluginInfo, PluginWarning, judge, normalise, scan

if TYPE_CHECKING:
    import pluggy

    from powertrain.specs import BackendSpec, LauncherSpec, RecipeSpec, Spec, TransferSpec

ALLOW_VARIABLE = "POWERTRAIN_PLUGINS"


class Registry:
    """Finds plugins by name; any process makes its own, as many as it likes.

    groups: entry point groups or kinds to look at, all when none is given. allow: names of plugins or dists that may
    be used; None reads the variable `POWERTRAIN_PLUGINS` now, and all are allowed when that is not set either. An
    allow-list that names something not installed is an `UnknownPluginError` on first use.

    Making one reads nothing and imports nothing. Listing reads metadata. Getting imports one hooks module, the first
    time; failures are told again each time, so that a repaired plugin works without a new registry. Methods may be
    called from several threads. A forked process goes on with what was loaded; a pickled registry arrives empty in
    the other process and loads there again.
    """

    def __init__(self, *groups: str, allow: Iterable[str] | None = None) -> None:
        self._groups = tuple(_group(group) for group in groups) or tuple(KIND_OF_GROUP)
        given = os.environ.get(ALLOW_VARIABLE) if allow is None else allow
        words = given.split(",") if isinstance(given, str) else given
        self._allow = None if words is None else tuple(sorted({word.strip() for word in words} - {""}))
        self._infos: tuple[PluginInfo, ...] | None = None
        self._manager: pluggy.PluginManager | None = None
        self._specs: dict[tuple[str, str], Spec] = {}
        self._failures: dict[tuple[str, str], PluginError] = {}
        self._warned: set[tuple[str, str]] = set()
        self._guard = (os.getpid(), threading.RLock())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._groups, self._allow)

    def __repr__(self) -> str:
        return f"Registry({', '.join(map(repr, self._groups))}, allow={self._allow!r})"

    def list(self, group: str | None = None) -> list[PluginInfo]:
        """Return what is installed, sorted by name and then group and dist; imports no plugin.

        group: a group or kind, None for all of this registry's. Entries that this registry has tried before say
        `loaded` or `failed`, the latter with the failure's line as detail.
        """
        wanted = self._groups if group is None else (self._own(group),)
        infos = [self._as_tried(info) for info in self._found() if info.group in wanted]
        return sorted(infos, key=lambda info: (info.name, info.group, info.dist))

    def get(self, kind: str, name: str) -> Spec:
        """Return the spec of one plugin, importing its hooks module on first use and nothing else.

        kind: "backend", "transfer", "launcher", "recipe", "service", "device", or the group's full name. Raises
        `UnknownPluginError` for a name that nobody has, and `PluginError` for every other kind of failure (see
        `powertrain.registry`).
        """
        key = (self._own(kind), name)
        with self._locked():
            if key not in self._specs:
                try:
                    self._specs[key] = self._load(*key)
                except PluginError as exc:
                    self._failures[key] = exc
                    raise
                self._failures.pop(key, None)
            return self._specs[key]

    def backend(self, name: str) -> BackendSpec:
        """Return the spec of the backend that config strings call `name`; errors as `get`."""
        return cast("BackendSpec", self.get("backend", name))

    def transfer(self, name: str) -> TransferSpec:
        """Return the spec of a transfer; errors as `get`."""
        return cast("TransferSpec", self.get("transfer", name))

    def launcher(self, name: str) -> LauncherSpec:
        """Return the spec of a launcher; errors as `get`."""
        return cast("LauncherSpec", self.get("launcher", name))

    def recipe(self, name: str) -> RecipeSpec:
        """Return the spec of a recipe; errors as `get`."""
        return cast("RecipeSpec", self.get("recipe", name))

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the sorted names that `get` may be asked for, duplicates and earlier failures included."""
        group = self._own(kind)
        usable = (info.name for info in self._found() if info.group == group and info.status in {"found", "duplicate"})
        return tuple(sorted(set(usable)))

    def specs(self, kind: str) -> dict[str, Spec]:
        """Return the specs of all plugins of a kind by name, importing each plugin's hooks module.

        A plugin that fails is left out with one `PluginWarning` for this registry; the others are unaffected.
        """
        result: dict[str, Spec] = {}
        for name in self.names(kind):
            try:
                result[name] = self.get(kind, name)
            except PluginError as exc:
                key = (self._own(kind), name)
                if key not in self._warned:
                    self._warned.add(key)
                    warnings.warn(str(exc), PluginWarning, stacklevel=2)
        return result

    def load_class(self, spec: Spec, field: str = "") -> Any:
        """Import and return the class or function that a spec names as "module:Attribute".

        field: the spec's field; "" is the main one: `engine` of a backend, `driver` of a transfer, and `launcher`,
        `recipe`, `service`, `probe`. Raises `EngineNotReadyError` for a planned backend, `MissingDependencyError`
        with the install hint when a package the engine needs is absent, and `PluginError` otherwise.
        """
        from powertrain.registry.loading import REFERENCES, SPEC_OF_KIND, load_reference

        kind = next(kind for kind, made in SPEC_OF_KIND.items() if isinstance(spec, made))
        fields = REFERENCES[kind]
        if field and field not in fields:
            message = f"a {kind} has no class {field!r}{nearest(field, fields)}; it has: {', '.join(fields)}"
            raise ConfigError(message)
        known = (info for info in self._found() if info.name == spec.name and info.kind == kind)
        made_here = PluginInfo(spec.name, _group(kind), "", "no dist", "(made in code)", "")
        return load_reference(next(known, made_here), spec, field or fields[0])

    def _own(self, kind: str) -> str:
        group = _group(kind)
        if group not in self._groups:
            message = f"this registry looks at {', '.join(self._groups)} only, not at {group}"
            raise ConfigError(message)
        return group

    def _found(self) -> tuple[PluginInfo, ...]:
        if self._infos is None:
            found = scan()
            if self._allow is not None:
                _check_allowed(self._allow, found)
            allow = None if self._allow is None else frozenset(self._allow) | {normalise(word) for word in self._allow}
            self._infos = judge(found, allow)
        return self._infos

    def _as_tried(self, info: PluginInfo) -> PluginInfo:
        key = (info.group, info.name)
        if info.status != "found":
            return info
        if key in self._failures:
            return replace(info, status="failed", detail=str(self._failures[key]))
        return replace(info, status="loaded") if key in self._specs else info

    def _load(self, group: str, name: str) -> Spec:
        from powertrain.registry.loading import load_spec

        info = self._select(group, name)
        if self._manager is None:
            self._manager = _new_manager()
        return load_spec(self._manager, info)

    def _select(self, group: str, name: str) -> PluginInfo:
        from powertrain.registry.loading import fail

        same = [info for info in self._found() if info.group == group and info.name == name]
        for info in same:
            if info.status == "found":
                return info
        for info in same:
            if info.status == "duplicate":
                way = f"uninstall one, or name the wished dist, and all else you use, in {ALLOW_VARIABLE}"
                cause = f"more than one dist has this name, it is {info.detail}; {way}"
                raise fail(info, "duplicate", cause)
        for info in same:
            if info.status == "blocked":
                cause = f"the allow-list {ALLOW_VARIABLE}={','.join(self._allow or ())} names neither it nor its dist"
                raise fail(info, "blocked", cause)
        kind, names = KIND_OF_GROUP[group], self.names(group)
        there = ", ".join(names) if names else "none"
        message = f"no {kind} {name!r} is installed{nearest(name, names)}; there are: {there}"
        if same:
            message += f" ({same[0]} is {same[0].detail})"
        raise UnknownPluginError(message, plugin=name, group=group, kind="unknown")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._guard[0] != os.getpid():
            # In a forked child another thread's lock would never be given back.
            self._guard = (os.getpid(), threading.RLock())
        with self._guard[1]:
            yield


def _group(kind: str) -> str:
    for group, word in KIND_OF_GROUP.items():
        if kind in {group, word}:
            return group
    words = list(KIND_OF_GROUP.values())
    message = f"there is no kind of plugin {kind!r}{nearest(kind, words)}; the kinds are: {', '.join(words)}"
    raise ConfigError(message)


def _rebuild(groups: tuple[str, ...], allow: tuple[str, ...] | None) -> Registry:
    registry = Registry(*groups, allow=allow or ())
    registry._allow = allow
    return registry


def _new_manager() -> pluggy.PluginManager:
    import pluggy

    from powertrain import hookspecs

    manager = pluggy.PluginManager("powertrain")
    manager.add_hookspecs(hookspecs)
    return manager


def _check_allowed(allow: tuple[str, ...], found: tuple[PluginInfo, ...]) -> None:
    words = {info.name for info in found} | {normalise(info.dist) for info in found}
    absent = [word for word in allow if word not in words and normalise(word) not in words]
    if absent:
        told = ", ".join(f"{word!r}{nearest(word, words)}" for word in absent)
        message = (
            f"{ALLOW_VARIABLE} names {told}, neither a plugin nor a dist of one; there are: {', '.join(sorted(words))}"
        )
        raise UnknownPluginError(message, plugin=absent[0], kind="allow-list")

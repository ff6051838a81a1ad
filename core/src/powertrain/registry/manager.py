"""The registry: an object that lists plugins from metadata and imports exactly those that are asked for."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from powertrain.errors import ConfigError, PluginError, UnknownPluginError, Violations
from powertrain.options import nearest
from powertrain.registry.discovery import ALLOW_VARIABLE, KIND_OF_GROUP, PluginInfo, PluginWarning, judge, scan
from powertrain.registry.loading import SPECS, lacking, load_reference, load_spec

if TYPE_CHECKING:
    from powertrain.specs import BackendSpec, LauncherSpec, RecipeSpec, Spec, TransferSpec

_ORDER = ("found", "duplicate", "blocked", "hidden")
"""Which of several entries with one name answers for it."""


class Registry:
    """Finds plugins by name; any process makes its own, as many as it likes.

    allow: names of plugins or dists that may be used; None reads the variable `POWERTRAIN_PLUGINS` now, and all are
    allowed when that is not set either. An allow-list that names something not installed is an `UnknownPluginError`
    on first use.

    Making one reads nothing and imports nothing. Listing reads metadata. Getting imports one hooks module, the first
    time; failures are told again each time, so that a repaired plugin works without a new registry. Methods may be
    called from several threads. A forked process goes on with what was loaded; a pickled registry arrives empty in
    the other process and loads there again.
    """

    def __init__(self, *, allow: Iterable[str] | None = None) -> None:
        given = os.environ.get(ALLOW_VARIABLE) if allow is None else allow
        words = given.split(",") if isinstance(given, str) else given
        self._allow = None if words is None else tuple(sorted({word.strip() for word in words} - {""}))
        self._infos: tuple[PluginInfo, ...] | None = None
        self._specs: dict[tuple[str, str], Spec] = {}
        self._failures: dict[tuple[str, str], PluginError] = {}
        self._locks: dict[int, AbstractContextManager[object]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What was loaded stays here; the other process has only the allow-list and loads again.
        return {**vars(Registry(allow=())), "_allow": self._allow}

    def __repr__(self) -> str:
        return f"Registry(allow={self._allow!r})"

    def list(self, group: str | None = None) -> list[PluginInfo]:
        """Return what is installed, sorted by name and then group and dist; imports no plugin.

        group: a group or kind, None for all. Entries that this registry has tried before say `loaded` or `failed`, the
        latter with the failure's line as detail.
        """
        wanted = KIND_OF_GROUP if group is None else (_group(group),)
        infos = [self._as_tried(info) for info in self._found() if info.group in wanted]
        return sorted(infos, key=lambda info: (info.name, info.group, info.dist))

    def get(self, kind: str, name: str) -> Spec:
        """Return the spec of one plugin, importing its hooks module on first use and nothing else.

        kind: "backend", "transfer", "launcher", "recipe", "service", "device", or the group's full name. Raises
        `UnknownPluginError` for a name that nobody has, and `PluginError` for every other kind of failure (see
        `powertrain.registry`).
        """
        key = (_group(kind), name)
        with self._locked():
            if key not in self._specs:
                try:
                    self._specs[key] = load_spec(self._select(*key))
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
        group, there = _group(kind), ("found", "duplicate")
        return tuple(sorted({info.name for info in self._found() if info.group == group and info.status in there}))

    def specs(self, kind: str) -> dict[str, Spec]:
        """Return the specs of all plugins of a kind by name, importing each plugin's hooks module.

        A plugin that fails is left out; a `PluginWarning` tells it, unless this registry has told it before.
        """
        result: dict[str, Spec] = {}
        told = set(self._failures)
        for name in self.names(kind):
            try:
                result[name] = self.get(kind, name)
            except PluginError as exc:
                if (exc.group, name) not in told:
                    warnings.warn(str(exc), PluginWarning, stacklevel=2)
        return result

    def load_class(self, spec: Spec, field: str = "") -> Any:
        """Import and return the class or function that a spec names as "module:Attribute".

        field: the spec's field; "" is the main one: `engine` of a backend, `driver` of a transfer, and `launcher`,
        `recipe`, `service`, `probe`. Raises `EngineNotReadyError` for a planned backend, `MissingDependencyError`
        with the install hint when a package the engine needs is absent, and `PluginError` otherwise.
        """
        kind, fields = next((kind, fields) for kind, (made, fields) in SPECS.items() if isinstance(spec, made))
        if field and field not in fields:
            message = f"a {kind} has no class {field!r}{nearest(field, fields)}; it has: {', '.join(fields)}"
            raise ConfigError(message)
        return load_reference(self._info(spec), spec, field or fields[0])

    def require(self, *specs: Spec) -> None:
        """Refuse specs whose `requires` are not all installed in this interpreter: `Violations`, a line for each."""
        lines = dict.fromkeys(lacking(self._info(spec), spec) for spec in specs)
        if problems := list(filter(None, lines)):
            raise Violations(problems)

    def _info(self, spec: Spec) -> PluginInfo:
        kind = next(kind for kind, (made, _) in SPECS.items() if isinstance(spec, made))
        known = (info for info in self._found() if info.name == spec.name and info.kind == kind)
        return next(known, PluginInfo(spec.name, _group(kind), "", "no dist", "(made in code)", ""))

    def _found(self) -> tuple[PluginInfo, ...]:
        if self._infos is None:
            self._infos = judge(scan(), self._allow)
        return self._infos

    def _as_tried(self, info: PluginInfo) -> PluginInfo:
        key = (info.group, info.name)
        if info.status != "found":
            return info
        if key in self._failures:
            return replace(info, status="failed", detail=str(self._failures[key]))
        return replace(info, status="loaded") if key in self._specs else info

    def _select(self, group: str, name: str) -> PluginInfo:
        same = [info for info in self._found() if (info.group, info.name) == (group, name)]
        best = min(same, key=lambda info: _ORDER.index(info.status), default=None)
        if best and best.status == "found":
            return best
        if best and best.status != "hidden":
            dist = {"dist": best.dist, "version": best.version}
            raise PluginError(best.detail, plugin=name, group=group, kind=best.status, **dist)
        kind, names = KIND_OF_GROUP[group], self.names(group)
        there = ", ".join(names) or "none"
        hidden = f" ({best.detail})" if best else ""
        message = f"no {kind} {name!r} is installed{nearest(name, names)}; there are: {there}{hidden}"
        raise UnknownPluginError(message, plugin=name, group=group, kind="unknown")

    def _locked(self) -> AbstractContextManager[object]:
        # One lock for each process: in a forked child another thread's would never be given back.
        return self._locks.setdefault(os.getpid(), threading.RLock())


def _group(kind: str) -> str:
    for group, word in KIND_OF_GROUP.items():
        if kind in {group, word}:
            return group
    kinds = KIND_OF_GROUP.values()
    message = f"there is no kind of plugin {kind!r}{nearest(kind, kinds)}; the kinds are: {', '.join(kinds)}"
    raise ConfigError(message)

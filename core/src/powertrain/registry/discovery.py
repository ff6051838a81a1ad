"""What is installed, read from metadata alone: no plugin is imported here, and neither is pluggy.

Only the standard library's view of `sys.path` counts, and of that only dists whose entry points mention powertrain.
The scan is done once for each `sys.path` of a process; a scan that met an unreadable dist is not kept.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Final

from powertrain.errors import UnknownPluginError
from powertrain.options import nearest

_KINDS: Final = ("backend", "transfer", "launcher", "recipe", "service", "device")
KIND_OF_GROUP: Final = {f"powertrain.{kind}s": kind for kind in _KINDS}
"""Entry point group -> the word for one plugin of it; the hook that answers is `powertrain_` and that word."""
ALLOW_VARIABLE: Final = "POWERTRAIN_PLUGINS"


class PluginWarning(UserWarning):
    """A plugin or a dist was passed over; the message is one line that says which and why."""


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One entry point as the metadata tells it.

    name: the name in config strings. group: its entry point group. module: the hooks module. dist, version: who
    brings it. path: the folder that holds the dist's metadata. status: `found`; `duplicate` (another dist has the
    same name), `blocked` (not on the allow-list), `hidden` (another copy of the dist comes first on `sys.path`);
    after this registry has tried it, `loaded` or `failed`. detail: where the
    status needs a reason, one line that names the plugin.
    """

    name: str
    group: str
    module: str
    dist: str
    version: str
    path: str
    status: str = "found"
    detail: str = ""

    @property
    def kind(self) -> str:
        """The word for one plugin of the group: backend, transfer, launcher, recipe, service or device."""
        return KIND_OF_GROUP[self.group]

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.dist} {self.version}"

    def unusable(self, cause: str) -> str:
        """Return the one line that tells why this plugin cannot be used."""
        return " ".join(f"{self} cannot be used: {cause}".split())

    def refused(self, status: str, cause: str) -> PluginInfo:
        """Return this entry with a status that keeps it from being used, unless it has one already."""
        return replace(self, status=status, detail=self.unusable(cause)) if self.status == "found" else self


def normalise(project: str) -> str:
    """Return a dist's name as packaging compares it: lower case, runs of `-_.` are one dash."""
    return re.sub(r"[-_.]+", "-", project).lower()


_Copy = tuple[metadata.Distribution, list[PluginInfo]]
_scans: dict[tuple[str, ...], tuple[PluginInfo, ...]] = {}


def scan(*, refresh: bool = False) -> tuple[PluginInfo, ...]:
    """Return every powertrain plugin that the metadata on `sys.path` names, sorted by group, name and dist.

    refresh: look again, for a program that installs a plugin while it runs. A dist whose metadata cannot be read
    gives one `PluginWarning`, and the scan is repeated next time.
    """
    key = tuple(sys.path)
    if key in _scans and not refresh:
        return _scans[key]
    projects: dict[str, list[_Copy]] = {}
    unreadable: set[str] = set()
    for dist in metadata.distributions():
        try:
            plugins = _plugins(dist)
        except Exception as exc:  # noqa: BLE001 - one dist's bad metadata must not hide the others; it is told
            unreadable.add(f"{_location(dist)}: {type(exc).__name__}: {exc}")
            continue
        if plugins:
            projects.setdefault(normalise(plugins[0].dist), []).append((dist, plugins))
    found = [info for copies in projects.values() for info in _effective(copies)]
    result = tuple(sorted(found, key=lambda info: (info.group, info.name, info.dist, info.status)))
    _scans[key] = result
    for line in sorted(unreadable):
        _scans.pop(key, None)  # it may be readable next time
        warnings.warn(f"a dist's metadata cannot be read: {line}", PluginWarning, stacklevel=3)
    return result


def _location(dist: metadata.Distribution) -> str:
    return os.path.realpath(str(dist.locate_file("")))


def _plugins(dist: metadata.Distribution) -> list[PluginInfo]:
    if "powertrain." not in (dist.read_text("entry_points.txt") or ""):
        return []
    name, version, path = dist.metadata["Name"], dist.metadata["Version"], _location(dist)
    if not name or not version:
        message = "no Name or no Version"
        raise ValueError(message)
    ours = (entry for entry in dist.entry_points if entry.group in KIND_OF_GROUP)
    return list(dict.fromkeys(PluginInfo(one.name, one.group, one.value, name, version, path) for one in ours))


def _effective(copies: list[_Copy]) -> list[PluginInfo]:
    """Choose among several sightings of one project as the import system does: the first folder on `sys.path`.

    In one folder dist-info goes before a left-over egg-info, and the newer version before an older. A plugin that
    only a later copy names is told as hidden, since the modules that would be imported are the first copy's.
    """
    try:
        first = metadata.distribution(copies[0][1][0].dist)  # with or without plugins of ours
    except metadata.PackageNotFoundError:  # the folder is not called after the project
        first = copies[0][0]
    path = _location(first)
    here = [copy for copy in copies if _location(copy[0]) == path]
    chosen, plugins = max(here, key=lambda copy: _age(copy[0]), default=(first, []))
    result = {(info.group, info.name, info.module): info for info in plugins}
    names = {(info.group, info.name) for info in plugins}
    for info in (info for _, others in copies for info in others):
        if info.path != path and (info.group, info.name) not in names:
            cause = f"{info.dist} {chosen.version} at {path} comes first on sys.path and does not have it"
            hidden = replace(info, status="hidden", detail=f"{info} is hidden: {cause}")
            result.setdefault((info.group, info.name, info.module), hidden)
    return list(result.values())


def _age(dist: metadata.Distribution) -> tuple[bool, list[int], str]:
    return (
        dist.read_text("METADATA") is not None,
        [int(part) for part in re.findall(r"\d+", dist.version)],
        dist.version,
    )


def judge(found: Sequence[PluginInfo], allow: tuple[str, ...] | None) -> tuple[PluginInfo, ...]:
    """Mark what the allow-list blocks, and then names that more than one remaining dist offers.

    allow: names of plugins and dists; None allows all. Plugins of the dist `powertrain` itself are always allowed.
    `UnknownPluginError` when it names something that is not there.
    """
    if allow is not None:
        _check_allowed(allow, found)
        named = {"powertrain", *map(normalise, allow)}
        cause = f"the allow-list {ALLOW_VARIABLE}={','.join(allow)} names neither it nor its dist"
        found = [
            info if info.name in allow or normalise(info.dist) in named else info.refused("blocked", cause)
            for info in found
        ]
    rivals: dict[tuple[str, str], list[PluginInfo]] = {}
    for info in found:
        if info.status == "found":
            rivals.setdefault((info.group, info.name), []).append(info)
    return tuple(_clash(info, rivals.get((info.group, info.name), [])) for info in found)


def _check_allowed(allow: tuple[str, ...], found: Sequence[PluginInfo]) -> None:
    words = {info.name for info in found} | {normalise(info.dist) for info in found}
    absent = [word for word in allow if not {word, normalise(word)} & words]
    if absent:
        told = ", ".join(f"{word!r}{nearest(word, words)}" for word in absent)
        there = ", ".join(sorted(words))
        message = f"{ALLOW_VARIABLE} names {told}, neither a plugin nor a dist of one; there are: {there}"
        raise UnknownPluginError(message, plugin=absent[0], kind="allow-list")


def _clash(info: PluginInfo, rivals: list[PluginInfo]) -> PluginInfo:
    if len(rivals) < 2:
        return info
    offers = " and ".join(f"{rival.dist} {rival.version} ({rival.module}, {rival.path})" for rival in rivals)
    way = f"uninstall one, or name the wished dist, and all else you use, in {ALLOW_VARIABLE}"
    cause = f"more than one dist has this name, it is offered by {offers}; {way}"
    return info.refused("duplicate", cause)

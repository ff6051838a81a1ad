"""What is installed, read from metadata alone: no plugin is imported here, and neither is pluggy.

Only the standard library's view of `sys.path` counts, and of that only dists whose entry points mention powertrain.
The scan is done once for each `sys.path` of a process; a scan that met an unreadable dist is not kept.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Final

KIND_OF_GROUP: Final = {
    "powertrain.backends": "backend",
    "powertrain.transfers": "transfer",
    "powertrain.launchers": "launcher",
    "powertrain.recipes": "recipe",
    "powertrain.services": "service",
    "powertrain.devices": "device",
}
"""Entry point group -> the word for one plugin of it; the hook that answers is `powertrain_` and that word."""

_PREFIX: Final = "powertrain."


class PluginWarning(UserWarning):
    """A plugin or a dist was passed over; the message is one line that says which and why."""


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One entry point as the metadata tells it.

    name: the name in config strings. group: its entry point group. module: the hooks module. dist, version: who
    brings it. path: the folder that holds the dist's metadata. status: `found`; `duplicate` (another dist has the
    same name), `blocked` (not on the allow-list), `hidden` (another copy of the dist comes first on `sys.path`);
    after this registry has tried it, `loaded` or `failed`. detail: one line where the status needs a reason.
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

    @property
    def source(self) -> str:
        """The dist and its version, as every message names them."""
        return f"{self.dist} {self.version}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.source}"


@dataclass(frozen=True, slots=True)
class _Dist:
    name: str
    version: str
    path: str
    modern: bool
    plugins: tuple[PluginInfo, ...]


def normalise(project: str) -> str:
    """Return a dist's name as packaging compares it: lower case, runs of `-_.` are one dash."""
    return re.sub(r"[-_.]+", "-", project).lower()


_scans: dict[tuple[str, ...], tuple[PluginInfo, ...]] = {}


def scan(*, refresh: bool = False) -> tuple[PluginInfo, ...]:
    """Return every powertrain plugin that the metadata on `sys.path` names, sorted by group, name and dist.

    refresh: look again, for a program that installs a plugin while it runs. A dist whose metadata cannot be read
    gives one `PluginWarning`, and the scan is repeated next time.
    """
    key = tuple(sys.path)
    if refresh or key not in _scans:
        _scans.pop(key, None)
        found, complete = _scan()
        if not complete:
            return found
        _scans[key] = found
    return _scans[key]


def _scan() -> tuple[tuple[PluginInfo, ...], bool]:
    projects: dict[str, list[_Dist]] = {}
    unreadable: list[str] = []
    for dist in metadata.distributions():
        try:
            record = _read(dist)
        except Exception as exc:  # noqa: BLE001 - one dist's bad metadata must not hide the others; it is told
            unreadable.append(f"{_location(dist)}: {type(exc).__name__}: {exc}")
            continue
        if record is not None:
            projects.setdefault(normalise(record.name), []).append(record)
    for line in sorted(set(unreadable)):
        warnings.warn(f"a dist's metadata cannot be read: {line}", PluginWarning, stacklevel=4)
    found = [info for copies in projects.values() for info in _effective(copies)]
    return tuple(sorted(found, key=lambda info: (info.group, info.name, info.dist, info.status))), not unreadable


def _location(dist: metadata.Distribution) -> str:
    return os.path.realpath(str(dist.locate_file("")))


def _read(dist: metadata.Distribution) -> _Dist | None:
    text = dist.read_text("entry_points.txt")
    if not text or _PREFIX not in text:
        return None
    name, version, path = dist.metadata["Name"], dist.metadata["Version"], _location(dist)
    if not name or not version:
        message = "no Name or no Version"
        raise ValueError(message)
    plugins = {
        (entry.group, entry.name, entry.value): PluginInfo(entry.name, entry.group, entry.value, name, version, path)
        for entry in dist.entry_points
        if entry.group in KIND_OF_GROUP
    }
    return _Dist(name, version, path, dist.read_text("METADATA") is not None, tuple(plugins.values()))


def _effective(copies: list[_Dist]) -> Iterable[PluginInfo]:
    """Choose among several sightings of one project as the import system does: the first folder on `sys.path`.

    In one folder dist-info goes before a left-over egg-info, and the newer version before an older. A plugin that
    only a later copy names is told as hidden, since the modules that would be imported are the first copy's.
    """
    version, path = _front(copies)
    here = [copy for copy in copies if copy.path == path]
    chosen = max(here, key=_age) if here else None
    version = chosen.version if chosen else version
    result = {(info.group, info.name, info.module): info for info in (chosen.plugins if chosen else ())}
    names = {(info.group, info.name) for info in result.values()}
    for copy in copies:
        for info in copy.plugins:
            if copy.path != path and (info.group, info.name) not in names:
                detail = f"hidden: {info.dist} {version} at {path} comes first on sys.path and does not have it"
                result.setdefault((info.group, info.name, info.module), replace(info, status="hidden", detail=detail))
    return result.values()


def _front(copies: list[_Dist]) -> tuple[str, str]:
    """Return version and folder of the project's first sighting on `sys.path`, with or without plugins of ours."""
    try:
        front = metadata.distribution(copies[0].name)
    except metadata.PackageNotFoundError:  # the folder is not called after the project
        return copies[0].version, copies[0].path
    return front.version, _location(front)


def _age(copy: _Dist) -> tuple[bool, list[int], str]:
    return copy.modern, [int(part) for part in re.findall(r"\d+", copy.version)], copy.version


def judge(found: Iterable[PluginInfo], allow: frozenset[str] | None) -> tuple[PluginInfo, ...]:
    """Mark what the allow-list blocks, and then names that more than one remaining dist offers.

    allow: entry point names and normalised dist names; None allows all. Plugins of the dist `powertrain` itself are
    always allowed.
    """
    result = []
    rivals: dict[tuple[str, str], list[PluginInfo]] = {}
    for info in found:
        dist = normalise(info.dist)
        if info.status == "found" and allow is not None and dist != "powertrain" and not {info.name, dist} & allow:
            info = replace(info, status="blocked", detail="blocked: neither it nor its dist is on the allow-list")
        if info.status == "found":
            rivals.setdefault((info.group, info.name), []).append(info)
        result.append(info)
    clashes = {key: infos for key, infos in rivals.items() if len(infos) > 1}
    return tuple(
        replace(info, status="duplicate", detail=_clash(clashes[info.group, info.name]))
        if info.status == "found" and (info.group, info.name) in clashes
        else info
        for info in result
    )


def _clash(infos: list[PluginInfo]) -> str:
    offers = " and ".join(f"{info.source} ({info.module}, {info.path})" for info in infos)
    return f"offered by {offers}"

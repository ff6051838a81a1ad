"""Trying plugins for real, each in a child process, so that one that crashes, hangs or prints harms nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final

from powertrain.errors import PluginError
from powertrain.registry.discovery import PluginInfo
from powertrain.registry.loading import SPECS, fail, lacking, missing
from powertrain.registry.manager import Registry
from powertrain.specs import BackendSpec, Spec

DEADLINE: Final = 120.0
"""Seconds that one plugin's child process may take; a first import of a large engine takes tens of them."""
PARALLEL: Final = 2
"""Child processes at a time: importing engines takes memory and disk, not only time."""
NOT_TRIED: Final = {"duplicate": "duplicate", "blocked": "blocked", "hidden": "unknown"}
"""Status of an entry that no engine can be taken from -> the kind of failure that selecting it gives."""

_CHILD: Final = (
    "import json, sys; job = json.load(sys.stdin); sys.path[:] = job['path']; "
    "from powertrain.registry.check import child; child(job)"
)


def check(infos: Sequence[PluginInfo], *, deadline: float = DEADLINE) -> list[dict[str, Any]]:
    """Import each plugin's hooks and classes in a child process of its own and return what it told, in order.

    A result has `status` and `detail` and the keys of the spec. status: `ready`, `planned` (engine not there yet),
    `missing` (a required package is absent, `install` says how to get it), `failed` (`failure` is a kind of
    `powertrain.registry`, `detail` the line); `duplicate`, `blocked` and `hidden` entries are not tried.
    deadline: seconds for each child.
    """
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(lambda info: _check_one(info, deadline), infos))


def _check_one(info: PluginInfo, deadline: float) -> dict[str, Any]:
    if info.status in NOT_TRIED:
        return _told(None, info.status, info.detail, NOT_TRIED[info.status])
    job = json.dumps({"path": sys.path, "info": asdict(info)})
    command = [sys.executable, "-P", "-c", _CHILD]
    # Files and not pipes: a helper process that a library leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            done = subprocess.run(command, input=job, stdout=out, stderr=err, text=True, timeout=deadline, check=False)
            kind, cause = "crash", f"the process that checked it ended with {done.returncode} and no answer; last line:"
        except subprocess.TimeoutExpired:
            kind, cause = "deadline", f"checking it took more than {deadline:g} s; give --deadline more, or look at:"
        out.seek(0)
        err.seek(0)
        try:
            answer: dict[str, Any] = json.loads(out.read())
        except ValueError:
            last = (err.read().strip().splitlines() or ["nothing on stderr"])[-1]
            answer = _told(None, "failed", str(fail(info, kind, f"{cause} {last}")), kind)
        return answer


def child(job: dict[str, Any]) -> None:
    """Check one plugin in this process and print the result; what the plugin itself prints goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answer, "w") as stream:
        json.dump(examine(PluginInfo(**job["info"])), stream)
        stream.flush()
        # Engines leave threads and helpers behind; none may keep the process from ending.
        os._exit(0)


def examine(info: PluginInfo) -> dict[str, Any]:
    """Load one plugin and all that its spec names; return a result as `check` does."""
    registry = Registry(allow=(info.dist,))
    spec = None
    try:
        spec = registry.get(info.group, info.name)
        if line := lacking(info, spec):
            return _told(spec, "missing", line)
        for field in SPECS[info.kind][1]:
            if getattr(spec, field):
                found = registry.load_class(spec, field)
                if undone := ", ".join(sorted(getattr(found, "__abstractmethods__", ()))):
                    raise fail(info, "unfinished", f"its {field} {getattr(spec, field)!r} lacks the methods {undone}")
    except PluginError as exc:
        status = {"not-ready": "planned", "missing-dependency": "missing"}.get(exc.kind, "failed")
        return _told(spec, status, str(exc), exc.kind if status == "failed" else "")
    return _told(spec, "ready")


def _told(spec: Spec | None, status: str, detail: str = "", failure: str = "") -> dict[str, Any]:
    """Return a result in JSON's types; what the spec's kind does not have is empty, and all of it without a spec."""
    axes = spec.axis_table().values() if isinstance(spec, BackendSpec) else ()
    return {
        "status": status,
        "detail": detail,
        "failure": failure,
        "role": getattr(spec, "role", ""),
        "summary": getattr(spec, "summary", ""),
        "axes": [asdict(axis) for axis in axes],
        "options": [asdict(option) for option in getattr(spec, "options", ())],
        "capabilities": {name: level.value for name, level in sorted(getattr(spec, "capabilities", {}).items())},
        "missing": list(missing(getattr(spec, "requires", ()))),
        "install": getattr(spec, "install", ""),
        "api": list(getattr(spec, "api", ())),
    }

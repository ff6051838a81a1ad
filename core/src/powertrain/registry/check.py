"""Trying plugins for real, each in a child process, so that one that crashes, hangs or prints harms nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any, Final

from powertrain.registry.discovery import KIND_OF_GROUP, PluginInfo

DEADLINE: Final = 120.0
"""Seconds that one plugin's child process may take; a first import of a large engine takes tens of them."""
PARALLEL: Final = 2
"""Child processes at a time: importing engines takes memory and disk, not only time."""

_CHILD: Final = (
    "import json, sys; job = json.load(sys.stdin); sys.path[:] = job['path']; "
    "from powertrain.registry.check import child; child(job)"
)
_EMPTY: Final[dict[str, Any]] = {
    "failure": "",
    "role": "",
    "summary": "",
    "axes": [],
    "options": [],
    "capabilities": {},
    "missing": [],
    "install": "",
    "api": [],
}


def check(infos: Sequence[PluginInfo], *, deadline: float = DEADLINE) -> list[dict[str, Any]]:
    """Import each plugin's hooks and classes in a child process of its own and return what it told, in order.

    A result has `status` and `detail` and the keys of the spec. status: `ready`, `planned` (engine not there yet),
    `missing` (a required package is absent, `install` says how to get it), `failed` (`failure` is one of
    `powertrain.registry.KINDS`, `detail` the line); `duplicate`, `blocked` and `hidden` entries are not tried.
    deadline: seconds for each child.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(lambda info: _check_one(info, deadline), infos))


def _check_one(info: PluginInfo, deadline: float) -> dict[str, Any]:
    from powertrain.registry.loading import fail

    told: dict[str, Any] = {**_EMPTY, "status": info.status, "detail": info.detail}
    if info.status in {"duplicate", "blocked", "hidden"}:
        return told | {"failure": info.status if info.status != "hidden" else "unknown"}
    job = {"path": sys.path, "group": info.group, "name": info.name, "dist": info.dist}
    # Files and not pipes: a helper process that a library leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = _run(json.dumps(job), out, err, deadline)
        out.seek(0)
        err.seek(0)
        try:
            answer: dict[str, Any] = json.loads(out.read())
            return told | answer
        except ValueError:
            last = (err.read().strip().splitlines() or ["nothing on stderr"])[-1]
    if code is None:
        kind, cause = "deadline", f"checking it took more than {deadline:g} s; give --deadline more, or look at: {last}"
    else:
        kind, cause = "crash", f"the process that checked it ended with {code} and no answer; last line: {last}"
    return told | {"status": "failed", "failure": kind, "detail": str(fail(info, kind, cause))}


def _run(job: str, out: IO[str], err: IO[str], deadline: float) -> int | None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE, stdout=out, stderr=err, text=True
    )
    try:
        process.communicate(job, timeout=deadline)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode


def child(job: dict[str, Any]) -> None:
    """Check one plugin in this process and print the result; what the plugin itself prints goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    result = examine(job["group"], job["name"], job["dist"])
    with os.fdopen(answer, "w") as stream:
        json.dump(result, stream)
        stream.flush()
        # Engines leave threads and helpers behind; none may keep the process from ending.
        os._exit(0)


def examine(group: str, name: str, dist: str) -> dict[str, Any]:
    """Load one plugin and all that its spec names; return the parts of the result that are known then."""
    from powertrain.errors import PluginError
    from powertrain.registry.loading import REFERENCES, fail, missing
    from powertrain.registry.manager import Registry

    registry = Registry(group, allow=(dist,))
    result: dict[str, Any] = {}
    try:
        spec = registry.get(group, name)
        result = _described(spec)
        result["missing"] = list(missing(spec.requires))
        if result["missing"] and getattr(spec, "status", "ready") == "ready":
            info = next(info for info in registry.list(group) if info.name == name)
            cause = f"it needs {', '.join(result['missing'])}, not installed here; {spec.install}"
            return result | {"status": "missing", "detail": str(fail(info, "missing-dependency", cause))}
        for field in REFERENCES[KIND_OF_GROUP[group]]:
            if getattr(spec, field):
                registry.load_class(spec, field)
    except PluginError as exc:
        status = {"not-ready": "planned", "missing-dependency": "missing"}.get(exc.kind, "failed")
        return result | {"status": status, "detail": str(exc), "failure": exc.kind if status == "failed" else ""}
    return result | {"status": "ready", "detail": ""}


def _described(spec: Any) -> dict[str, Any]:
    """Return what a spec says, in JSON's types; a key that its kind does not have keeps its empty value."""
    from dataclasses import asdict

    from powertrain.specs import BackendSpec

    result = {"summary": spec.summary, "install": spec.install, "api": list(spec.api)}
    result["options"] = [asdict(option) for option in getattr(spec, "options", ())]
    if isinstance(spec, BackendSpec):
        result["role"] = spec.role
        result["axes"] = [asdict(axis) for axis in spec.axis_table().values()]
        result["capabilities"] = {name: level.value for name, level in sorted(spec.capabilities.items())}
    return result

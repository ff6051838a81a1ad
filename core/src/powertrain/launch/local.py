"""The launcher `local`: workers and servers as processes on this host, with one log each and nothing left behind.

Every process has a small parent of its own (`powertrain.launch.child`) that ends its whole tree when it is told to,
when the process has ended, or when the driver is gone. So no orphan is left by Ctrl-C, SIGTERM or SIGKILL of the
driver, nor by a server whose main process died before its helpers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Final, cast
from urllib.request import ProxyHandler, build_opener

from powertrain.errors import ConfigError, DeadlineError, StateError, WorkerError
from powertrain.interfaces.launcher import Launcher, ProcessSpec, ProcessStatus
from powertrain.launch import child
from powertrain.options import nearest

_SPAWN_SECONDS: Final = 60.0
_MARGIN_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.25
_TAIL_BYTES: Final = 8192
_TAIL_LINES: Final = 20


@dataclass(slots=True)
class _Process:
    """One started process: `watcher` is its small parent, `pid` the target's own."""

    spec: ProcessSpec
    log: Path
    watcher: subprocess.Popen[bytes]
    pid: int = 0

    @property
    def log_end(self) -> str:
        """The end of the log, as messages show it."""
        return f"; the end of {self.log}:\n{_tail(self.log)}"


def line_buffered(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with `stdbuf -oL` in front where that is of use and does no harm.

    Not for Python programs, which PYTHONUNBUFFERED serves. Never where `env`, the whole environment that the target
    gets, has a non-empty LD_PRELOAD: stdbuf works through that variable and breaks what else is loaded by it.
    """
    program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    tool = shutil.which("stdbuf")
    if env.get("LD_PRELOAD") or tool is None or program is None or _runs_python(program):
        return tuple(argv)
    return (tool, "-oL", *argv)


def _runs_python(program: str) -> bool:
    with Path(program).open("rb") as stream:
        head = stream.read(256)
    return Path(program).name.startswith(("python", "pypy")) or (head.startswith(b"#!") and b"python" in head)


class LocalLauncher(Launcher):
    """Starts processes on the driver's host. Options: see `powertrain.launch.hooks`.

    `status`, `stop` and `close` may be called from any thread; `close` also runs at exit of the interpreter.
    """

    def __init__(self, options: Mapping[str, Any], *, logs: str) -> None:
        super().__init__(options, logs=logs)
        self._grace = float(options.get("grace", 10.0))
        self._table: dict[str, _Process] = {}
        self._closed = False
        self._owner = os.getpid()
        atexit.register(self.close)

    def start(self, processes: Sequence[ProcessSpec]) -> None:
        """Start all of them, or none. The name of a process that has ended may be used again; its log goes on.

        ConfigError for a name in use, another node or no command; WorkerError when one cannot be started; StateError
        after `close`.
        """
        self._check(processes)
        started: list[_Process] = []
        try:
            for spec in processes:
                started.append(self._spawn(spec))
            for process in started:
                process.pid = self._await_pid(process)
            if self._closed:
                message = "the launcher was closed while it started processes"
                raise StateError(message)
        except BaseException:
            self._end(started, grace=0.0)
            raise
        for process in started:
            self._table.pop(process.spec.name, None)
            self._table[process.spec.name] = process

    def wait_ready(self, names: Sequence[str], *, deadline: float) -> None:
        """Return when each server answers its `ready` URL with 200; a worker (no URL) only has to be alive.

        deadline: seconds from now for all of them together. WorkerError when one has ended, DeadlineError when time
        is up; both name the process and show the end of its log.
        """
        pending = self._named(names)
        end = time.monotonic() + deadline
        while True:
            for process in pending:
                code = process.watcher.poll()
                if code is not None:
                    how = f"signal {-code}" if code < 0 else f"status {code}"
                    message = f"{process.spec.name} ended with {how} before it was ready{process.log_end}"
                    raise WorkerError(message, worker=process.spec.name, log=str(process.log))
            pending = [process for process in pending if process.spec.ready and not _answers(process.spec.ready)]
            if not pending:
                return
            if time.monotonic() >= end:
                late, url = pending[0], pending[0].spec.ready
                message = f"{late.spec.name} was not ready at {url} after {deadline:g} s{late.log_end}"
                raise DeadlineError(message, who=late.spec.name, what=url, seconds=deadline)
            time.sleep(_PAUSE_SECONDS)

    def status(self) -> list[ProcessStatus]:
        """Return the state of every process started, in start order. A negative code is the signal that ended it."""
        return [
            ProcessStatus(name=name, pid=one.pid, code=one.watcher.poll(), log=str(one.log), tail=_tail(one.log))
            for name, one in list(self._table.items())
        ]

    def stop(self, names: Sequence[str], *, grace: float = 10.0) -> None:
        """End the named processes and all their descendants: SIGTERM, then SIGKILL after `grace` seconds."""
        self._end(self._named(names), grace=grace)

    def close(self) -> None:
        """End everything; may be called twice. In a forked copy of the driver it does nothing."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        self._end(list(self._table.values()), grace=self._grace)
        atexit.unregister(self.close)

    def _check(self, processes: Sequence[ProcessSpec]) -> None:
        if self._closed:
            message = "this launcher is closed; make a new one"
            raise StateError(message)
        seen = {name for name, found in self._table.items() if found.watcher.poll() is None}
        for spec in processes:
            path, url = Path(spec.name), spec.ready or "http"
            faults = {
                "cannot be the name of a log file": not spec.name or path.is_absolute() or ".." in path.parts,
                "is the name of a process that runs already; names are unique in a run": spec.name in seen,
                f"belongs on node {spec.node}, and the local launcher has node 0 alone": spec.node != 0,
                "has no command": not spec.argv,
                f"has the ready URL {spec.ready!r}; it begins with http": not url.startswith("http"),
            }
            problem = next((fault for fault, found in faults.items() if found), "")
            if problem:
                message = f"process {spec.name!r} {problem}"
                raise ConfigError(message)
            seen.add(spec.name)

    def _spawn(self, spec: ProcessSpec) -> _Process:
        log = Path(self.logs) / f"{spec.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        order = {"argv": line_buffered(spec.argv, spec.env), "env": dict(spec.env), "cwd": spec.cwd}
        # The watcher is ours: it gets this interpreter's environment, without what is preloaded for the target.
        own_env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with tempfile.TemporaryFile() as stdin, log.open("ab") as output:
            stdin.write(json.dumps(order).encode())
            stdin.seek(0)
            watcher = subprocess.Popen(
                [sys.executable, "-I", child.__file__, str(os.getpid())],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=output,
                env=own_env,
                start_new_session=True,
            )
        return _Process(spec, log, watcher)

    def _await_pid(self, process: _Process) -> int:
        reply = cast("IO[bytes]", process.watcher.stdout)
        with reply:
            ready = wait([reply.fileno()], _SPAWN_SECONDS)  # select takes no descriptor above 1023
            answer = reply.read().decode(errors="replace") if ready else ""
        if answer.isdecimal():
            return int(answer)
        reason = answer or f"no answer within {_SPAWN_SECONDS:g} s{process.log_end}"
        message = f"{process.spec.name} could not be started: {reason}"
        raise WorkerError(message, worker=process.spec.name, log=str(process.log))

    def _named(self, names: Sequence[str]) -> list[_Process]:
        for name in names:
            if name not in self._table:
                message = f"no process {name!r} was started{nearest(name, self._table)}"
                raise ConfigError(message)
        return [self._table[name] for name in names]

    def _end(self, processes: Sequence[_Process], *, grace: float) -> None:
        for number, seconds in ((child.ASK, grace), (child.KILL, _MARGIN_SECONDS), (signal.SIGKILL, _MARGIN_SECONDS)):
            for process in processes:
                process.watcher.send_signal(number)  # does nothing once the watcher has ended
            end = time.monotonic() + seconds
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.watcher.wait(max(0.0, end - time.monotonic()))


def _answers(url: str) -> bool:
    direct = build_opener(ProxyHandler({}))
    with contextlib.suppress(OSError, HTTPException), direct.open(url, timeout=5.0) as answer:
        return bool(answer.status == 200)
    return False


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return "\n".join(stream.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
    return ""

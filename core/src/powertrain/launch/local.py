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
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powertrain.errors import ConfigError, DeadlineError, StateError, WorkerError
from powertrain.interfaces.launcher import Launcher, ProcessSpec, ProcessStatus
from powertrain.launch.ports import free_port
from powertrain.options import nearest

__all__ = ["LocalLauncher", "free_port", "line_buffered"]

_CHILD: Final = str(Path(__file__).with_name("child.py"))
_SPAWN_SECONDS: Final = 60.0
_MARGIN_SECONDS: Final = 10.0
_TAIL_BYTES: Final = 8192
_TAIL_LINES: Final = 20


@dataclass(slots=True)
class _Process:
    """One started process: `watcher` is its small parent, `pid` the target's own, `control` the pipe that ends it."""

    spec: ProcessSpec
    log: Path
    watcher: subprocess.Popen[bytes]
    control: int
    reply: int
    pid: int = 0


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
    if Path(program).name.startswith(("python", "pypy")):
        return True
    with Path(program).open("rb") as stream:
        head = stream.read(256)
    return head.startswith(b"#!") and b"python" in head


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
            if process.spec.name in self._table:
                self._end([self._table.pop(process.spec.name)], grace=0.0)
            self._table[process.spec.name] = process

    def wait_ready(self, names: Sequence[str], *, deadline: float) -> None:
        """Return when each server answers its `ready` URL with 200; a worker (no URL) only has to be alive.

        deadline: seconds from now for all of them together. WorkerError when one has ended, DeadlineError when time
        is up; both name the process and show the end of its log.
        """
        pending = self._named(names)
        end = time.monotonic() + deadline
        pause = 0.05
        while True:
            for process in pending:
                self._check_alive(process)
            pending = [process for process in pending if process.spec.ready and not _answers(process.spec.ready)]
            left = end - time.monotonic()
            if not pending:
                return
            if left <= 0:
                late = pending[0]
                message = (
                    f"{late.spec.name} was not ready at {late.spec.ready} after {deadline:g} s{_log_end(late.log)}"
                )
                raise DeadlineError(message, who=late.spec.name, what=late.spec.ready, seconds=deadline)
            time.sleep(min(pause, left))
            pause = min(1.0, pause * 1.5)

    def status(self) -> list[ProcessStatus]:
        """Return the state of every process started, in start order. A negative code is the signal that ended it."""
        return [
            ProcessStatus(
                name=name, pid=found.pid, code=found.watcher.poll(), log=str(found.log), tail=_tail(found.log)
            )
            for name, found in self._table.items()
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
            problem = ""
            if not spec.name or Path(spec.name).is_absolute() or ".." in Path(spec.name).parts:
                problem = "cannot be the name of a log file"
            elif spec.name in seen:
                problem = "is the name of a process that runs already; names are unique in a run"
            elif spec.node != 0:
                problem = f"belongs on node {spec.node}, and the local launcher has node 0 alone"
            elif not spec.argv:
                problem = "has no command"
            elif spec.ready and not spec.ready.startswith("http"):
                problem = f"has the ready URL {spec.ready!r}; it begins with http"
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
        with contextlib.ExitStack() as on_failure, tempfile.TemporaryFile() as stdin, log.open("ab") as output:
            stdin.write(json.dumps(order).encode())
            stdin.seek(0)
            control_read, control = os.pipe()
            on_failure.callback(os.close, control)
            reply, reply_write = os.pipe()
            on_failure.callback(os.close, reply)
            try:
                watcher = subprocess.Popen(
                    [sys.executable, "-I", _CHILD, str(control_read), str(reply_write), str(os.getpid())],
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    env=own_env,
                    pass_fds=(control_read, reply_write),
                    start_new_session=True,
                )
            finally:
                os.close(control_read)
                os.close(reply_write)
            on_failure.pop_all()
        return _Process(spec, log, watcher, control, reply)

    def _await_pid(self, process: _Process) -> int:
        ready, _, _ = select.select([process.reply], [], [], _SPAWN_SECONDS)
        answer = os.read(process.reply, 4096).decode(errors="replace") if ready else ""
        os.close(process.reply)
        process.reply = -1
        if answer.isdecimal():
            return int(answer)
        reason = answer[1:] or f"no answer within {_SPAWN_SECONDS:g} s{_log_end(process.log)}"
        message = f"{process.spec.name} could not be started: {reason}"
        raise WorkerError(message, worker=process.spec.name, log=str(process.log))

    def _named(self, names: Sequence[str]) -> list[_Process]:
        for name in names:
            if name not in self._table:
                message = f"no process {name!r} was started{nearest(name, self._table)}"
                raise ConfigError(message)
        return [self._table[name] for name in names]

    def _check_alive(self, process: _Process) -> None:
        code = process.watcher.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"status {code}"
            message = f"{process.spec.name} ended with {how} before it was ready{_log_end(process.log)}"
            raise WorkerError(message, worker=process.spec.name, log=str(process.log))

    def _end(self, processes: Sequence[_Process], *, grace: float) -> None:
        for process in processes:
            if process.control >= 0 and process.watcher.poll() is None:
                with contextlib.suppress(OSError):
                    os.write(process.control, f"{grace}\n".encode())
        end = time.monotonic() + grace + _MARGIN_SECONDS
        for process in processes:
            try:
                process.watcher.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.watcher.kill()  # the target is bound to die with its watcher
                process.watcher.wait(_MARGIN_SECONDS)
            pipes, process.control, process.reply = (process.control, process.reply), -1, -1
            for pipe in pipes:
                if pipe >= 0:
                    os.close(pipe)


def _answers(url: str) -> bool:
    from http.client import HTTPException
    from urllib.request import ProxyHandler, build_opener

    try:
        with build_opener(ProxyHandler({})).open(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def _log_end(log: Path) -> str:
    return f"; the end of {log}:\n{_tail(log)}"

"""The small parent that every process of the local launcher gets: `python child.py CONTROL_FD REPLY_FD PARENT_PID`.

It starts the target, waits, ends with the target's own status, and takes everything that the target left behind with
it: as a *subreaper* it inherits even grandchildren that made sessions of their own. It lives on a pipe from the
launcher, so when the driver is gone, however it went, the pipe closes and the whole tree is ended.
(A parent-death signal set by the driver would not do: it fires when the driver's *thread* ends, and it spares
grandchildren.)

Standard input: JSON with `argv`, `env`, `cwd`. Control pipe: a line with the seconds of grace for each stop. Reply
pipe: the target's process id, or `!` and why it could not be started. Standard library only, beside psutil on the way
out; run with `-I` and without the target's environment, so nothing of it reaches this interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import Any

ORPHAN_GRACE = 3.0
"""Seconds that a tree gets to end by itself once its driver is gone."""
_TICK = 1.0
_SWEEP = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FOREVER = float("inf")


def main() -> int:
    """Run one target to its end; returns its exit status, or dies of the signal that the target died of."""
    control, reply, parent = (int(text) for text in sys.argv[1:4])
    stops: list[int] = []
    wake = _watch_signals(stops)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        target = _start(json.load(sys.stdin), libc)
    except OSError as exc:
        os.write(reply, f"!{exc}".encode())
        return 127
    with contextlib.suppress(BrokenPipeError):
        os.write(reply, str(target).encode())
    os.close(reply)
    status, end = _supervise(target, control, wake, parent, stops)
    return _leave(_sweep(target, status, end))


def _watch_signals(stops: list[int]) -> int:
    """Make signals wake the wait and note the asking ones; handlers, unlike SIG_IGN, do not pass to the target."""
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: stops.append(got))
    signal.signal(signal.SIGCHLD, lambda _got, _frame: None)
    return wake_read


def _start(spec: dict[str, Any], libc: Any) -> int:
    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    # This interpreter has one thread, so preexec_fn is safe; it is for the case that somebody kills this parent.
    target = subprocess.Popen(
        spec["argv"],
        env=spec["env"],
        cwd=spec["cwd"] or None,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    target.returncode = 0  # its status is collected by `_reap`, together with those of inherited grandchildren
    return target.pid


def _supervise(target: int, control: int, wake: int, parent: int, stops: list[int]) -> tuple[int | None, float]:
    """Wait until the target has ended or its grace is over; returns its wait status and when its tree must be gone."""
    end = _FOREVER
    watched = [control, wake]
    while True:
        status, _ = _reap(target)
        left = end - time.monotonic()
        if status is not None or left <= 0:
            return status, end
        ready, _, _ = select.select(watched, [], [], min(_TICK, left))
        if wake in ready:
            os.read(wake, 4096)
        grace = _FOREVER
        if control in ready:
            text = os.read(control, 4096).split()
            grace = float(text[-1]) if text else ORPHAN_GRACE
            if not text:
                watched.remove(control)
        elif stops or (end == _FOREVER and os.getppid() != parent):
            # Asked directly, or the driver died while a forked copy of it holds the pipe open.
            grace = ORPHAN_GRACE
            stops.clear()
        if grace != _FOREVER:
            _signal_tree(signal.SIGTERM)
            end = min(end, time.monotonic() + grace)


def _reap(target: int) -> tuple[int | None, bool]:
    """Collect everything that has ended; returns the target's wait status (None: not yet) and if children are left."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == target:
                found = ended[1]
    except ChildProcessError:
        return found, False
    return found, True


def _signal_tree(number: int) -> None:
    import psutil  # type: ignore[import-untyped]

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _sweep(target: int, status: int | None, end: float) -> int | None:
    """End what is left of the tree: after a stop it has until `end`, otherwise it is leftovers and goes at once."""
    kill_at = 0.0 if end == _FOREVER else end
    give_up = max(kill_at, time.monotonic()) + _SWEEP
    while time.monotonic() < give_up:
        found, left = _reap(target)
        status = found if found is not None else status
        if not left:
            break
        if time.monotonic() >= kill_at:
            _signal_tree(signal.SIGKILL)
        time.sleep(0.02)
    return status


def _leave(status: int | None) -> int:
    """Return the target's exit status; when a signal ended it, die of the same one, so that the launcher sees it."""
    if status is not None and os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())

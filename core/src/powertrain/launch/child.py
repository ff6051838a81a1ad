"""The small parent that every process of the local launcher gets: `python child.py DRIVER_PID`.

It starts the target, waits, ends with the target's own status, and takes everything that the target left behind with
it: as a *subreaper* it inherits even grandchildren that made sessions of their own. It looks for its own parent, the
driver, twice a second; when the driver is gone, however it went, the whole tree is ended.
(A parent-death signal set by the driver would not do: it fires when the driver's *thread* ends, and it spares
grandchildren. Nor would a pipe: a forked copy of the driver holds it open.)

Standard input: JSON with `argv`, `env`, `cwd`. Standard output: the target's process id, or why it could not
be started. Standard error: the log, which the target gets for both of its outputs. Signals: see `GRACE`. Standard
library only, beside psutil on the way out; run with `-I` and without the target's environment, so nothing of it
reaches this interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

FOREVER = float("inf")
ORPHAN_GRACE = 3.0
"""Seconds that a tree gets to end by itself once its driver is gone."""
ASK, KILL = signal.SIGUSR1, signal.SIGUSR2
"""How the driver ends a tree: it asks, keeps the time itself, and then has the rest killed."""
GRACE: dict[int, float] = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), ORPHAN_GRACE)
GRACE |= {ASK: FOREVER, KILL: 0.0}
"""Signal to this process -> seconds that the tree has from then on; each makes it ask the tree to end."""
_WAKING = {*GRACE, signal.SIGCHLD, signal.SIGALRM}
_TICK = 0.5
_SWEEP = 5.0
"""Seconds after which processes that even SIGKILL does not end are left alone."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    """Run one target to its end; returns its exit status, or dies of the signal that the target died of."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    _process_control(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        target = _start(json.load(sys.stdin))
    except OSError as exc:
        os.write(1, str(exc).encode())
        return 127
    os.write(1, str(target).encode())
    os.close(1)
    return _leave(_supervise(target, int(sys.argv[1])))


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(order: dict[str, Any]) -> int:
    def before_target() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _process_control(_PR_SET_PDEATHSIG, signal.SIGKILL)  # for the case that somebody kills this parent

    # This interpreter has one thread, so preexec_fn is safe.
    target = subprocess.Popen(
        order["argv"],
        env=order["env"],
        cwd=order["cwd"] or None,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=before_target,
    )
    target.returncode = 0  # its status is collected by `_reap`, together with those of inherited grandchildren
    return target.pid


def _supervise(target: int, driver: int) -> int | None:
    """Wait until the whole tree has ended, or cannot be ended; returns the target's wait status (None: not known).

    What a target that ended by itself leaves behind goes at once; once the tree was asked to end, all of it has
    until the grace is over.
    """
    status, end = None, None
    signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
    while True:
        found, anything_left = _reap(target)
        status = found if status is None else status
        now = time.monotonic()
        if status is not None and end is None:
            end = now
        if not anything_left or (end is not None and now > end + _SWEEP):
            return status
        if end is not None and now >= end:
            _signal_tree(signal.SIGKILL)
        grace = GRACE.get(signal.sigwait(_WAKING))
        if grace is None and os.getppid() != driver:
            grace, driver = ORPHAN_GRACE, os.getppid()
        if grace is not None:
            _signal_tree(signal.SIGTERM)
            end = min(FOREVER if end is None else end, time.monotonic() + grace)


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


def _leave(status: int | None) -> int:
    """Return the target's exit status; when a signal ended it, die of the same one, so that the launcher sees it."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())

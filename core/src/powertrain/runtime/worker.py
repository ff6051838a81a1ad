"""`python -m powertrain.runtime.worker`: one rank of an engine, commanded over the control channel.

The variable POWERTRAIN_WORKER holds where the driver is and who this worker is to be (JSON). It registers and serves
commands until "exit", SIGTERM, or the driver's silence; then it closes the engine and ends. The exit status is 0 after
"exit", 78 when the driver refused this worker, 70 when the driver was gone, 143 after SIGTERM.
"""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Final

from powertrain import __version__
from powertrain.registry import Registry
from powertrain.runtime import wire
from powertrain.runtime.channel import WorkerChannel
from powertrain.runtime.host import CLOSE_SECONDS, EngineHost
from powertrain.specs import API_VERSION

VARIABLE: Final = "POWERTRAIN_WORKER"
LEAVE_SECONDS: Final = 25.0
"""Seconds from the end of serving to the end of the process, whatever hangs."""
DONE, GONE, REFUSED, TERMINATED = 0, 70, 78, 143
_LOG: Final = logging.getLogger("powertrain.worker")


class Worker:
    """Serves one host. The channel's thread takes commands in; the main thread waits for the end."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._host = EngineHost(config["name"], Registry())
        self._channel = WorkerChannel(config, self._received)
        self._calls: dict[int, Future[Any]] = {}
        self._end: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def serve(self) -> int:
        """Return the exit status once there is nothing more to serve."""
        signal.signal(signal.SIGTERM, lambda *_: self._end.put((TERMINATED, "")))
        about = {"name": self._config["name"], "pid": os.getpid(), "python": sys.executable}
        self._channel.begin({**about, "powertrain": __version__, "api": list(API_VERSION)})
        code, why = self._end.get()
        if why:
            _LOG.error("%s", why)
        timer = threading.Timer(LEAVE_SECONDS, partial(os._exit, code))
        timer.daemon = True
        timer.start()
        if code != DONE:
            wire.sweep_dead()  # if that is why, the driver's segments have no owner any more
        for call in list(self._calls.values()):
            call.cancel()
        try:
            self._host.submit("close", [], wire.copied).result(CLOSE_SECONDS)
        except (wire.RankFault, TimeoutError) as exc:
            _LOG.warning("closing the engine: %s", exc)
        self._channel.close()
        return code

    def _received(self, kind: str, number: int, value: Any) -> None:
        ends = {
            "refuse": (REFUSED, f"the driver refused this worker: {value}"),
            "gone": (GONE, "the driver has been silent for too long"),
            "exit": (DONE, ""),
        }
        if kind in ends:
            self._end.put(ends[kind])
        elif kind == "cancel" and number in self._calls:
            self._calls[number].cancel()
        elif kind == "call" and isinstance(value, Exception):
            self._channel.send("fault", number, wire.pack(wire.told(value)))
        elif kind == "call":
            method, args = value
            seal = partial(wire.pack, prefix=self._channel.prefix)
            future = self._calls[number] = self._host.submit(method, args, seal)
            future.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, future: Future[Any]) -> None:
        del self._calls[number]
        try:
            self._channel.send("answer", number, future.result())
        except (wire.RankFault, CancelledError) as exc:
            self._channel.send(
                "fault", number, wire.pack(exc.fault if isinstance(exc, wire.RankFault) else wire.told(exc))
            )


def main() -> int:
    """Run one worker to its end; returns the exit status."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        sys.stderr.write(f"{VARIABLE} is not set; workers are started by a powertrain driver\n")
        return 2
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle; it ends its workers in order
    return Worker(json.loads(text)).serve()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m powertrain.runtime.worker`: one rank of an engine, commanded over the control channel.

The variable POWERTRAIN_WORKER holds where the driver is and who this worker is to be (JSON). Order: register, wait to
be welcomed, serve commands until "exit", SIGTERM, or the driver's silence; then close the engine and end. The exit
status is 0 after "exit", 78 when the driver refused this worker, 70 when the driver was gone, 143 after SIGTERM.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from powertrain import __version__
from powertrain.errors import PowertrainError
from powertrain.registry import Registry
from powertrain.runtime import faults, wire
from powertrain.runtime.host import EngineHost
from powertrain.runtime.socket import WorkerChannel
from powertrain.specs import API_VERSION

VARIABLE: Final = "POWERTRAIN_WORKER"
REGISTER_SECONDS: Final = 120.0
LEAVE_SECONDS: Final = 25.0
"""Seconds from the end of serving to the end of the process, whatever hangs."""
DONE, GONE, REFUSED, TERMINATED = 0, 70, 78, 143
_LOG: Final = logging.getLogger("powertrain.worker")


class Worker:
    """Serves one host. Lives on one event loop; the channel's thread hands messages over."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._registry = Registry()
        self._host = EngineHost(self._registry)
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> int:
        """Return the exit status once there is nothing more to serve."""
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = loop.create_future()
        self._welcomed = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._finish, TERMINATED)
        self._channel = WorkerChannel(
            self._config,
            self._hello(),
            lambda *message: loop.call_soon_threadsafe(self._received, *message),
            lambda: loop.call_soon_threadsafe(self._finish, GONE, "the driver has been silent for too long"),
        )
        late = loop.call_later(REGISTER_SECONDS, self._late)
        code = await self._end
        late.cancel()
        _leave_in_time(code)
        if code != DONE:
            wire.sweep_dead()  # if that is why, the driver's segments have no owner any more
        for task in self._calls.values():
            task.cancel()
        try:
            await self._host.close()
        except (PowertrainError, OSError, RuntimeError) as exc:
            _LOG.warning("closing the engine: %s", exc)
        self._channel.close()
        return code

    def _hello(self) -> dict[str, Any]:
        backend = self._config["backend"]
        found = [info for info in self._registry.list("backend") if info.name == backend]
        return {
            "name": self._config["name"],
            "rank": self._config["rank"],
            "pid": os.getpid(),
            "python": sys.executable,
            "powertrain": __version__,
            "api": list(API_VERSION),
            "plugin": " and ".join(f"{info.dist} {info.version}" for info in found) or f"none for {backend!r}",
        }

    def _received(self, kind: str, number: int, value: Any) -> None:
        if kind == "welcome":
            self._welcomed.set()
        elif kind == "refuse":
            self._finish(REFUSED, f"the driver refused this worker: {value}")
        elif kind == "exit":
            self._finish(DONE)
        elif kind == "call":
            task = asyncio.ensure_future(self._answer(number, value))
            self._calls[number] = task
            task.add_done_callback(lambda _: self._calls.pop(number, None))
        elif kind == "cancel" and self._config["role"] == "infer" and number in self._calls:
            self._calls[number].cancel()  # a training engine's ranks finish together what they began together

    async def _answer(self, number: int, call: Any) -> None:
        try:
            if isinstance(call, Exception):
                raise call
            method, args = call
            answer = await self._host.dispatch(method, args)
            self._channel.answer(number, wire.pack(answer, prefix=self._channel.prefix))
        except (Exception, SystemExit, asyncio.CancelledError) as exc:  # noqa: BLE001 - the driver raises it
            self._channel.answer(number, wire.pack(faults.told(exc), prefix=None), kind="fault")

    def _late(self) -> None:
        if not self._welcomed.is_set():
            self._finish(GONE, f"no answer from the driver within {REGISTER_SECONDS:g} s")

    def _finish(self, code: int, why: str = "") -> None:
        if why:
            _LOG.error("%s", why)
        if not self._end.done():
            self._end.set_result(code)


def _leave_in_time(code: int) -> None:
    """End this process in a while even if a thread of the engine never comes back."""
    timer = threading.Timer(LEAVE_SECONDS, partial(os._exit, code))
    timer.daemon = True
    timer.start()


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
    return asyncio.run(Worker(json.loads(text)).serve())


if __name__ == "__main__":
    sys.exit(main())

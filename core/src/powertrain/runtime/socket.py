"""The control channel's sockets: zmq over loopback, a token in every message, one thread that alone touches a socket.

A message has six frames: token, kind, number of the call, and the three frames of `powertrain.runtime.wire`. Kinds,
worker to driver: `hello`, `answer`, `fault`, `beat`; driver to worker: `welcome`, `refuse`, `call`, `cancel`, `taken`
(its segment was copied), `exit`, `beat`. The driver's end is in `powertrain.runtime.channel`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import zmq

from powertrain.errors import PowertrainError
from powertrain.runtime import wire

TICK: Final = 0.2
"""Seconds between two looks at the workers' processes."""
BEAT: Final = 3.0
"""Seconds between two signs of life, both ways."""
GONE: Final = 15.0
"""Seconds of silence after which a worker takes its driver for gone."""
_LOG: Final = logging.getLogger("powertrain.channel")
_EMPTY: Final = wire.pack(None, prefix=None)


def _socket(kind: int) -> Any:
    made = zmq.Context.instance().socket(kind)
    for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, wire.MAX_PLAIN)):
        made.setsockopt(option, value)
    return made


def router(host: str) -> tuple[Any, str]:
    """Return the driver's socket, bound to a free port of `host`, and its address."""
    made = _socket(zmq.ROUTER)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    made.bind(f"tcp://{host}:*")
    return made, made.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


class Pump:
    """A thread that owns a socket: sends what it is given, receives, ticks, and gives signs of life."""

    def __init__(self, zmq_socket: Any, token: str) -> None:
        self._socket = zmq_socket
        self._token = token.encode()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="powertrain-channel", daemon=True)

    def do(self, work: Callable[[], None]) -> None:
        """Have `work` run on the pump's thread, in order; from any thread."""
        self._work.put(work)
        self._nudge()

    def stop(self, seconds: float = 5.0) -> None:
        """Send what is waiting and end the thread. May be called twice."""
        self._stopping = True
        self._nudge()
        self._thread.join(seconds)

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: it has ended
            self._wake.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        ticked = beaten = float("-inf")
        while not self._stopping:
            if self._woken.fileno() in dict(poller.poll(TICK * 1000)):
                self._woken.recv(65536)
            self._drain()
            now = time.monotonic()
            if now - ticked >= TICK:
                ticked = now
                self._tick()
            if now - beaten >= BEAT:
                beaten = now
                self._beat()
        self._drain()
        self._socket.close(linger=500)
        self._wake.close()
        self._woken.close()

    def _drain(self) -> None:
        self._do_work()
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._do_work()  # what was asked before the message was sent comes before it
                self._take(frames)

    def _do_work(self) -> None:
        while not self._work.empty():
            self._work.get()()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) < 6 or not hmac.compare_digest(frames[-6], self._token):
            _LOG.warning("a message with a wrong token came in on the control channel; it was ignored")
            return
        sender = frames[0] if len(frames) > 6 else b""
        try:
            self._received(sender, frames[-5].decode(), int(frames[-4]), frames[-3:])
        except (PowertrainError, OSError, ValueError, LookupError, TypeError) as exc:
            _LOG.warning("a message of kind %s could not be understood: %s", frames[-5], exc)

    def _post(self, kind: str, number: int = 0, packet: wire.Packet | None = None, to: bytes = b"") -> None:
        frames = [self._token, kind.encode(), b"%d" % number, *(packet or _EMPTY).frames()]
        try:
            self._socket.send_multipart([to, *frames] if to else frames)
        except zmq.ZMQError as exc:  # the other end has left; whoever watches its process tells why
            _LOG.info("a message of kind %s could not be sent: %s", kind, exc)

    def _received(self, sender: bytes, kind: str, number: int, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        raise NotImplementedError

    def _beat(self) -> None:
        raise NotImplementedError


class WorkerChannel(Pump):
    """A worker's end. received(kind, number, value) and, once the driver is silent, gone() run on the channel's thread.

    kinds handed on: welcome, refuse, call (value: `[method, args]`, or the error in decoding it), cancel, exit.
    """

    def __init__(
        self,
        invitation: Mapping[str, str],
        hello: Mapping[str, Any],
        received: Callable[[str, int, Any], object],
        gone: Callable[[], object],
    ) -> None:
        dealer = _socket(zmq.DEALER)
        dealer.connect(invitation["address"])
        super().__init__(dealer, invitation["token"])
        self.prefix = invitation["prefix"]
        self._on_message, self._on_gone = received, gone
        self._driver_heard = time.monotonic()
        self._kept: dict[int, wire.Packet] = {}
        self._post("hello", 0, wire.pack(dict(hello), prefix=None))
        self._thread.start()

    def answer(self, number: int, packet: wire.Packet, *, kind: str = "answer") -> None:
        """Answer a call; a segment is kept until the driver has taken it."""
        if packet.segment is not None:
            self._kept[number] = packet
        self.do(partial(self._post, kind, number, packet))

    def close(self) -> None:
        """Send what is waiting, end the thread and remove segments that were not taken."""
        self.stop()
        for packet in self._kept.values():
            packet.release()

    def _received(self, sender: bytes, kind: str, number: int, frames: list[bytes]) -> None:
        self._driver_heard = time.monotonic()
        if kind == "taken":
            self._kept.pop(number).release()
        elif kind != "beat":
            try:
                value = wire.unpack(frames, prefix=self.prefix)
            except (PowertrainError, OSError) as exc:
                value = exc
            self._on_message(kind, number, value)

    def _beat(self) -> None:
        self._post("beat")

    def _tick(self) -> None:
        if time.monotonic() - self._driver_heard > GONE:
            self._driver_heard = time.monotonic()
            self._on_gone()

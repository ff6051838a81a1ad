"""The control channel between the driver and its workers: zmq over loopback, a token in every message, no pickle.

Each side has one thread that alone touches its socket; others hand it work. A message has six frames: token, kind,
number of the call, and the three frames of `powertrain.runtime.wire`. Kinds, worker to driver: `hello`, `answer`,
`fault`, `beat`; driver to worker: `welcome`, `refuse`, `call`, `cancel`, `taken` (its segment was copied), `exit`,
`beat`.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import zmq

from powertrain.errors import HandshakeError, PowertrainError, WorkerError
from powertrain.interfaces.launcher import ProcessStatus
from powertrain.runtime import wire
from powertrain.runtime.handles import RankFault
from powertrain.specs import API_VERSION

TICK: Final = 0.2
"""Seconds between two looks at the workers' processes."""
BEAT: Final = 3.0
"""Seconds between two signs of life, both ways."""
GONE: Final = 15.0
"""Seconds of silence after which a worker takes its driver for gone."""
_LOG: Final = logging.getLogger("powertrain.channel")


class _Pump:
    """A thread that owns a socket: sends what it is given, receives, and ticks."""

    def __init__(self, zmq_socket: Any, token: str, name: str) -> None:
        self._socket = zmq_socket
        self._token = token.encode()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

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
        ticked = 0.0
        while not self._stopping:
            if self._woken.fileno() in dict(poller.poll(TICK * 1000)):
                self._woken.recv(65536)
            self._drain()
            now = time.monotonic()
            if now - ticked >= TICK:
                ticked = now
                self._tick(now)
        self._drain()
        self._socket.close(linger=500)
        self._wake.close()
        self._woken.close()

    def _drain(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._received(frames)
        while not self._work.empty():
            self._work.get()()

    def _frames(self, kind: str, number: int, packet: wire.Packet | None) -> list[bytes]:
        return [self._token, kind.encode(), b"%d" % number, *(packet or _EMPTY).frames()]

    def _received(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _tick(self, now: float) -> None:
        raise NotImplementedError


_EMPTY: Final = wire.pack(None, prefix=None)


def _socket(kind: int) -> Any:
    made = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_PLAIN)
    return made


@dataclass(slots=True)
class _Call:
    future: Future[Any]
    packet: wire.Packet


@dataclass(slots=True)
class _Peer:
    """One worker as the driver sees it. gone: why it cannot be called any more. suspect: its process was seen ended."""

    name: str
    engine: str
    rank: int
    greeting: Future[dict[str, Any]]
    identity: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    calls: dict[int, _Call] = field(default_factory=dict)
    gone: WorkerError | None = None
    suspect: bool = False


class DriverChannel(_Pump):
    """The driver's end. watch: returns the state of every process, as `Launcher.status`; called five times a second.

    Methods may be called from any thread. invitation: what a worker must know to get in touch.
    """

    def __init__(self, watch: Callable[[], Sequence[ProcessStatus]], *, host: str = "127.0.0.1") -> None:
        router = _socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(f"tcp://{host}:*")
        token = secrets.token_hex(16)
        super().__init__(router, token, "powertrain-channel")
        wire.sweep_dead()
        self.prefix = f"{wire.RUN_PREFIX}{secrets.token_hex(6)}-"
        self._claim = wire.claim(self.prefix)
        address = router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.invitation = {"address": address, "token": token, "prefix": self.prefix}
        self._watch = watch
        self._peers: dict[str, _Peer] = {}
        self._names: dict[bytes, str] = {}
        self._numbers = itertools.count(1)
        self._beaten = 0.0
        self._closed = False
        self._thread.start()

    def expect(self, name: str, *, engine: str, rank: int) -> Future[dict[str, Any]]:
        """Let a worker of that name register. The future ends with its hello, or with why it will not come."""
        peer = _Peer(name, engine, rank, Future())
        self._peers[name] = peer
        return peer.greeting

    def call(self, names: Sequence[str], packets: Sequence[wire.Packet]) -> list[Future[Any]]:
        """Send each worker its `[method, args]`; one packet may serve several. See `Handle._send` for the futures.

        A future that is cancelled sends `cancel`; the segment is kept until the worker has answered.
        """
        number = next(self._numbers)
        futures: list[Future[Any]] = []
        for packet in packets:
            packet.users += 1
        for name, packet in zip(names, packets, strict=True):
            future: Future[Any] = Future()
            future.add_done_callback(partial(self._dropped, name, number))
            begin = partial(self._begin, self._peers[name], number, _Call(future, packet))
            if self._stopping:
                begin()
            else:
                self.do(begin)
            futures.append(future)
        return futures

    def silence(self, name: str) -> float:
        """Return the seconds since the last sign of life of a worker."""
        return time.monotonic() - self._peers[name].heard

    def dismiss(self) -> None:
        """Tell every worker to close its engine and exit; calls are not answered any more, and their ends no errors."""
        self._closed = True
        for peer in self._peers.values():
            self.do(partial(self._dismiss, peer))

    def close(self) -> None:
        """End the thread, fail what is outstanding, and sweep the run's segments. May be called twice."""
        self.stop()
        for peer in self._peers.values():
            self._lose(peer, _closed(peer))
        wire.sweep(self.prefix)
        self._claim.close()

    def _dismiss(self, peer: _Peer) -> None:
        for call in peer.calls.values():
            _settle(call.future, error=_closed(peer))
        self._send(peer, "exit")

    def _dropped(self, name: str, number: int, future: Future[Any]) -> None:
        if future.cancelled():
            self.do(lambda: self._send(self._peers[name], "cancel", number))

    def _begin(self, peer: _Peer, number: int, call: _Call) -> None:
        if peer.gone is not None or not peer.identity:
            reason = peer.gone or WorkerError(f"{_who(peer)} has not registered", worker=peer.name, rank=peer.rank)
            call.packet.release()
            _settle(call.future, error=reason)
            return
        peer.calls[number] = call
        self._send(peer, "call", number, call.packet)

    def _send(self, peer: _Peer, kind: str, number: int = 0, packet: wire.Packet | None = None) -> None:
        if not peer.identity or peer.gone is not None:
            return
        try:
            self._socket.send_multipart([peer.identity, *self._frames(kind, number, packet)])
        except zmq.ZMQError as exc:  # its connection is gone; the look at its process tells why, if it is still ours
            _LOG.info("%s cannot be reached: %s", _who(peer), exc)

    def _received(self, frames: list[bytes]) -> None:
        identity, token, *rest = frames if len(frames) == 7 else [b"", b"", b"", b"", b"", b"", b""]
        if not hmac.compare_digest(token, self._token):
            _LOG.warning("a message with a wrong token came in on the control channel; it was ignored")
            return
        kind = rest[0].decode(errors="replace")
        try:
            number = int(rest[1])
            if kind == "hello":
                self._greet(identity, wire.unpack(rest[2:], prefix=self.prefix))
            elif identity in self._names:
                self._heard(self._peers[self._names[identity]], kind, number, rest[2:])
        except (PowertrainError, OSError, ValueError, KeyError, TypeError) as exc:
            _LOG.warning("a message of kind %s could not be understood: %s", kind, exc)

    def _greet(self, identity: bytes, hello: dict[str, Any]) -> None:
        name = str(hello["name"])
        peer = self._peers.get(name)
        reason = refusal(hello, API_VERSION)
        if peer is None:
            reason = f"no worker {name!r} is expected"
        elif peer.identity and peer.identity != identity:
            reason = f"worker {name!r} has registered already, from process {peer.greeting.result()['pid']}"
        elif reason:
            _settle(peer.greeting, error=HandshakeError(reason, worker=name, rank=peer.rank))
        if reason or peer is None:
            _LOG.warning("worker %r was refused: %s", name, reason)
            answer = self._frames("refuse", 0, wire.pack(reason, prefix=None))
            self._socket.send_multipart([identity, *answer])
            return
        peer.identity = identity
        self._names[identity] = name
        peer.heard = time.monotonic()
        self._send(peer, "welcome")
        _settle(peer.greeting, hello)

    def _heard(self, peer: _Peer, kind: str, number: int, frames: list[bytes]) -> None:
        peer.heard = time.monotonic()
        call = peer.calls.pop(number, None) if kind in {"answer", "fault"} else None
        if call is None:
            return
        call.packet.release()
        try:
            value = wire.unpack(frames, prefix=self.prefix)
        except (PowertrainError, OSError) as exc:
            message = f"{_who(peer)} sent an answer that cannot be read: {exc}"
            _settle(call.future, error=WorkerError(message, worker=peer.name, rank=peer.rank))
        else:
            error = RankFault(value) if kind == "fault" else None
            _settle(call.future, value, error)
        if frames[2]:
            self._send(peer, "taken", number)

    def _tick(self, now: float) -> None:
        if now - self._beaten >= BEAT:
            self._beaten = now
            for peer in self._peers.values():
                self._send(peer, "beat")
        if self._closed:
            return
        for status in self._watch():
            found = self._peers.get(status.name)
            if found is None or found.gone is not None or status.code is None:
                continue
            if not found.suspect:
                found.suspect = True  # what it said last may still be on its way: one tick more
                continue
            how = f"signal {-status.code}" if status.code < 0 else f"exit code {status.code}"
            message = (
                f"{_who(found)} (process {status.pid}) ended with {how}; its log {status.log} ends:\n{status.tail}"
            )
            self._lose(found, WorkerError(message, worker=found.name, rank=found.rank, log=status.tail))

    def _lose(self, peer: _Peer, error: WorkerError) -> None:
        peer.gone = peer.gone or error
        _settle(peer.greeting, error=error)
        for call in peer.calls.values():
            call.packet.release()
            _settle(call.future, error=error)
        peer.calls.clear()


def _who(peer: _Peer) -> str:
    return f"{peer.engine} rank {peer.rank}"


def _closed(peer: _Peer) -> WorkerError:
    return WorkerError(f"{_who(peer)}: the driver has been closed", worker=peer.name, rank=peer.rank)


def _settle(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set a future's end unless it has one already (it was cancelled, or its worker was lost)."""
    if future.done():
        return
    try:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass  # cancelled in this very moment


def refusal(hello: Mapping[str, Any], mine: tuple[int, int]) -> str:
    """Return why a worker may not join ("" if it may): another major API version, or a newer minor one."""
    theirs = tuple(hello["api"])
    if theirs[0] == mine[0] and theirs[1] <= mine[1]:
        return ""
    return (
        f"worker {hello['name']!r} speaks core API {'.'.join(map(str, theirs))} (powertrain {hello['powertrain']}, "
        f"{hello['python']}), this driver {'.'.join(map(str, mine))}; install the driver's powertrain there"
    )


class WorkerChannel(_Pump):
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
        super().__init__(dealer, invitation["token"], "powertrain-channel")
        self.prefix = invitation["prefix"]
        self._on_message, self._on_gone = received, gone
        self._driver_heard = time.monotonic()
        self._beaten = 0.0
        self._kept: dict[int, wire.Packet] = {}
        self._post("hello", 0, wire.pack(dict(hello), prefix=None))
        self._thread.start()

    def answer(self, number: int, packet: wire.Packet, *, kind: str = "answer") -> None:
        """Answer a call; a segment is kept until the driver has taken it."""
        packet.users += 1
        self.do(partial(self._post, kind, number, packet))

    def close(self) -> None:
        """Send what is waiting, end the thread and remove segments that were not taken."""
        self.stop()
        for packet in self._kept.values():
            packet.release()

    def _post(self, kind: str, number: int, packet: wire.Packet | None) -> None:
        if packet is not None and packet.segment is not None:
            self._kept[number] = packet
        self._socket.send_multipart(self._frames(kind, number, packet))

    def _received(self, frames: list[bytes]) -> None:
        if len(frames) != 6 or not hmac.compare_digest(frames[0], self._token):
            _LOG.warning("a message with a wrong token came in on the control channel; it was ignored")
            return
        self._driver_heard = time.monotonic()
        kind, number = frames[1].decode(), int(frames[2])
        if kind == "taken":
            kept = self._kept.pop(number, None)
            if kept is not None:
                kept.release()
        elif kind != "beat":
            try:
                value = wire.unpack(frames[3:], prefix=self.prefix)
            except (PowertrainError, OSError) as exc:
                value = exc
            self._on_message(kind, number, value)

    def _tick(self, now: float) -> None:
        if now - self._beaten >= BEAT:
            self._beaten = now
            self._post("beat", 0, None)
        if now - self._driver_heard > GONE:
            self._driver_heard = now
            self._on_gone()

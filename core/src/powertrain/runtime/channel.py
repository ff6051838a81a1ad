"""The driver's end of the control channel: handshake, calls, and what becomes of a worker that dies."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from powertrain.errors import HandshakeError, PowertrainError, WorkerError
from powertrain.interfaces.launcher import ProcessStatus
from powertrain.runtime import wire
from powertrain.runtime.handles import RankFault
from powertrain.runtime.socket import Pump, router
from powertrain.specs import API_VERSION

_LOG: Final = logging.getLogger("powertrain.channel")


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

    def error(self, what: str, log: str = "") -> WorkerError:
        """Return an error that begins with the engine's name and the rank."""
        return WorkerError(f"{self.engine} rank {self.rank} {what}", worker=self.name, rank=self.rank, log=log)


class DriverChannel(Pump):
    """The driver's end. watch: returns the state of every process, as `Launcher.status`; called five times a second.

    Methods may be called from any thread. invitation: what a worker must know to get in touch. prefix: of the run's
    segments.
    """

    def __init__(self, watch: Callable[[], Sequence[ProcessStatus]], *, host: str = "127.0.0.1") -> None:
        zmq_socket, address = router(host)
        token = secrets.token_hex(16)
        super().__init__(zmq_socket, token)
        wire.sweep_dead()
        self.prefix = f"{wire.RUN_PREFIX}{secrets.token_hex(6)}-"
        self._claim = wire.claim(self.prefix)
        self.invitation = {"address": address, "token": token, "prefix": self.prefix}
        self._watch = watch
        self._peers: dict[str, _Peer] = {}
        self._names: dict[bytes, str] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        self._thread.start()

    def expect(self, name: str, *, engine: str, rank: int) -> Future[dict[str, Any]]:
        """Let a worker of that name register. The future ends with its hello, or with why it will not come."""
        peer = _Peer(name, engine, rank, Future())
        self.do(partial(self._peers.__setitem__, name, peer))
        return peer.greeting

    def call(self, names: Sequence[str], packets: Sequence[wire.Packet]) -> list[Future[Any]]:
        """Send each registered worker its `[method, args]`; one packet may serve several. Futures: see `Handle._send`.

        A future that is cancelled sends `cancel`; the segment is kept until the worker has answered.
        """
        number = next(self._numbers)
        futures: list[Future[Any]] = [Future() for _ in names]
        for packet in packets:
            packet.users += 1
        for name, packet, future in zip(names, packets, futures, strict=True):
            future.add_done_callback(partial(self._dropped, name, number))
            begin = partial(self._begin, self._peers[name], number, _Call(future, packet))
            if self._stopping:
                begin()
            else:
                self.do(begin)
        return futures

    def silence(self, name: str) -> float:
        """Return the seconds since the last sign of life of a worker."""
        return time.monotonic() - self._peers[name].heard

    def dismiss(self) -> None:
        """Tell every worker to close its engine and exit; calls are not answered any more, and their ends no errors."""
        self._closed = True
        self.do(self._dismiss)

    def close(self) -> None:
        """End the thread, fail what is outstanding, and sweep the run's segments. May be called twice."""
        self.stop()
        for peer in self._peers.values():
            self._lose(peer, peer.error("cannot answer: the driver has been closed"))
        wire.sweep(self.prefix)
        self._claim.close()

    def _dismiss(self) -> None:
        for peer in self._peers.values():
            for call in peer.calls.values():
                _settle(call.future, error=peer.error("cannot answer: the driver has been closed"))
            self._send(peer, "exit")

    def _dropped(self, name: str, number: int, future: Future[Any]) -> None:
        if future.cancelled():
            self.do(lambda: self._send(self._peers[name], "cancel", number))

    def _begin(self, peer: _Peer, number: int, call: _Call) -> None:
        if peer.gone is not None:
            call.packet.release()
            _settle(call.future, error=peer.gone)
            return
        peer.calls[number] = call
        self._send(peer, "call", number, call.packet)

    def _send(self, peer: _Peer, kind: str, number: int = 0, packet: wire.Packet | None = None) -> None:
        if peer.identity and peer.gone is None:
            self._post(kind, number, packet, to=peer.identity)

    def _received(self, sender: bytes, kind: str, number: int, frames: list[bytes]) -> None:
        if kind == "hello":
            self._greet(sender, wire.unpack(frames))
            return
        if sender not in self._names:
            return  # it was refused and has not left yet
        peer = self._peers[self._names[sender]]
        peer.heard = time.monotonic()
        call = peer.calls.pop(number, None)
        if call is None:
            return
        call.packet.release()
        try:
            value = wire.unpack(frames, prefix=self.prefix)
        except (PowertrainError, OSError) as exc:
            _settle(call.future, error=peer.error(f"sent an answer that cannot be read: {exc}"))
        else:
            _settle(call.future, value, RankFault(value) if kind == "fault" else None)
        if frames[2]:
            self._send(peer, "taken", number)

    def _greet(self, sender: bytes, hello: dict[str, Any]) -> None:
        name = str(hello["name"])
        peer = self._peers.get(name)
        reason = refusal(hello, API_VERSION)
        if peer is None:
            reason = f"no worker {name!r} is expected"
        elif peer.identity:
            reason = f"worker {name!r} has registered already, from process {peer.greeting.result()['pid']}"
        elif reason:
            _settle(peer.greeting, error=HandshakeError(reason, worker=name, rank=peer.rank))
        if reason or peer is None:
            _LOG.warning("worker %r was refused: %s", name, reason)
            self._post("refuse", 0, wire.pack(reason, prefix=None), to=sender)
            return
        peer.identity = sender
        self._names[sender] = name
        peer.heard = time.monotonic()
        self._send(peer, "welcome")
        _settle(peer.greeting, hello)

    def _beat(self) -> None:
        for peer in self._peers.values():
            self._send(peer, "beat")

    def _tick(self) -> None:
        for status in [] if self._closed else self._watch():
            peer, code = self._peers.get(status.name), status.code
            if code is None or peer is None or peer.gone is not None:
                continue
            if not peer.suspect:
                peer.suspect = True  # what it said last may still be on its way: one tick more
                continue
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            what = f"(process {status.pid}) ended with {how}; its log {status.log} ends:\n{status.tail}"
            self._lose(peer, peer.error(what, status.tail))

    def _lose(self, peer: _Peer, error: WorkerError) -> None:
        peer.gone = peer.gone or error
        _settle(peer.greeting, error=error)
        for call in peer.calls.values():
            call.packet.release()
            _settle(call.future, error=error)
        peer.calls.clear()


def _settle(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set a future's end unless it has one already (it was cancelled, or its worker was lost)."""
    try:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return


def refusal(hello: Mapping[str, Any], mine: tuple[int, int]) -> str:
    """Return why a worker may not join ("" if it may): another major API version, or a newer minor one."""
    theirs = tuple(hello["api"])
    if theirs[0] == mine[0] and theirs[1] <= mine[1]:
        return ""
    return (
        f"worker {hello['name']!r} speaks core API {'.'.join(map(str, theirs))} (powertrain {hello['powertrain']}, "
        f"{hello['python']}), this driver {'.'.join(map(str, mine))}; install the driver's powertrain there"
    )

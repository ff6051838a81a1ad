"""The control channel: zmq over loopback, a token in every message, one thread at each end that alone touches a socket.

A message has six frames: token, kind, number of the call, and the three frames of `powertrain.runtime.wire`. Kinds,
worker to driver: `hello`, `answer`, `fault`, `beat`; driver to worker: `refuse`, `call`, `cancel`, `exit`, `beat`.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import zmq.asyncio

from powertrain.errors import HandshakeError, PowertrainError, WorkerError
from powertrain.interfaces.launcher import ProcessStatus
from powertrain.runtime import wire
from powertrain.runtime.host import LoopThread
from powertrain.specs import API_VERSION

TICK: Final = 0.2
"""Seconds between two looks at the workers' processes."""
BEAT: Final = 15
"""Ticks between two signs of life, both ways."""
GONE: Final = 75
"""Ticks of a worker without a message after which it takes its driver for gone."""
_LOG: Final = logging.getLogger("powertrain.channel")
_NOTHING: Final = wire.pack(None)


class Channel:
    """What both ends share: a thread that sends, receives, and ticks. Other threads go through `_do`."""

    def __init__(self, kind: int, token: str) -> None:
        self._token = token.encode()
        self._thread = LoopThread("powertrain-channel")
        self._socket = zmq.asyncio.Context.instance().socket(kind)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, wire.MAX_PLAIN)):
            self._socket.setsockopt(option, value)

    def close(self) -> None:
        """Send what is waiting and end the thread. May be called twice."""
        self._thread.stop(5.0)
        self._socket.close(linger=500)

    def _begin(self) -> None:
        """Start to work; called once the socket is bound or connected."""
        for work in (self._receive(), self._tick_on()):
            self._thread.submit(work).add_done_callback(_tell_break)

    def _do(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work` on the channel's thread, in order; here, once that has ended."""
        if self._thread.alive:
            self._thread.loop.call_soon_threadsafe(work, *args)
        else:
            work(*args)

    def _post(self, kind: str, number: int = 0, frames: Sequence[bytes] = _NOTHING, to: bytes = b"") -> None:
        """Send a message. What is for a worker that has left is dropped; whoever watches its process tells why."""
        if not self._socket.closed:
            message = [self._token, kind.encode(), b"%d" % number, *frames]
            self._socket.send_multipart([to, *message] if to else message)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) < 6 or not hmac.compare_digest(frames[-6], self._token):
                _LOG.warning("a message with a wrong token came in on the control channel; it was ignored")
                continue
            try:
                self._received(frames[0], frames[-5].decode(), int(frames[-4]), frames[-3:])
            except (PowertrainError, OSError, ValueError, LookupError, TypeError) as exc:
                _LOG.warning("a message of kind %s could not be understood: %s", frames[-5], exc)

    async def _tick_on(self) -> None:
        for number in itertools.count():
            self._tick(beat=number % BEAT == 0)
            await asyncio.sleep(TICK)

    def _received(self, sender: bytes, kind: str, number: int, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _tick(self, *, beat: bool) -> None:
        raise NotImplementedError


class WorkerChannel(Channel):
    """A worker's end. received(kind, number, value) runs on the channel's thread.

    Kinds handed on: refuse, call (value: `[method, args]`, or the error in decoding it), cancel, exit, and "gone" once
    the driver has been silent for too long.
    """

    def __init__(self, invitation: Mapping[str, str], received: Callable[[str, int, Any], object]) -> None:
        super().__init__(zmq.DEALER, invitation["token"])
        self._socket.connect(invitation["address"])
        self.prefix = invitation["prefix"]
        self._hand_on = received
        self._silent = 0

    def begin(self, hello: Mapping[str, Any]) -> None:
        """Register with the driver, and listen to it from now on."""
        self.send("hello", 0, wire.pack(hello))
        self._begin()

    def send(self, kind: str, number: int, frames: Sequence[bytes]) -> None:
        """Send a `hello`, the `answer` to a call, or its `fault`."""
        self._do(self._post, kind, number, frames)

    def _received(self, sender: bytes, kind: str, number: int, frames: list[bytes]) -> None:
        self._silent = 0
        if kind != "beat":
            try:
                value = wire.unpack(frames, prefix=self.prefix)
            except (PowertrainError, OSError) as exc:
                value = exc
            self._hand_on(kind, number, value)

    def _tick(self, *, beat: bool) -> None:
        if beat:
            self._post("beat")
        self._silent += 1
        if self._silent > GONE:
            self._hand_on("gone", 0, None)


@dataclass(slots=True)
class _Peer:
    """One worker as the driver sees it. gone: why it cannot be called any more. suspect: its process was seen ended."""

    name: str
    engine: str
    rank: int
    greeting: Future[dict[str, Any]] = field(default_factory=Future)
    identity: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    gone: WorkerError | None = None
    suspect: bool = False

    def error(self, what: str, log: str = "") -> WorkerError:
        """Return an error that begins with the engine's name and the rank."""
        return WorkerError(f"{self.engine} rank {self.rank} {what}", worker=self.name, rank=self.rank, log=log)


@dataclass(slots=True)
class _Call:
    """One call of an engine: what went out, kept for workers that have not read it, and the answers still to come."""

    messages: Sequence[list[bytes]]
    waiting: dict[str, Future[Any]]


class DriverChannel(Channel):
    """The driver's end. watch: returns the state of every process, as `Launcher.status`; called at every tick.

    Methods may be called from any thread. invitation: what a worker must know to get in touch. prefix: of the run's
    segments.
    """

    def __init__(self, watch: Callable[[], Sequence[ProcessStatus]], *, host: str = "127.0.0.1") -> None:
        token = secrets.token_hex(16)
        super().__init__(zmq.ROUTER, token)
        self._socket.bind(f"tcp://{host}:*")
        address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        wire.sweep_dead()
        self.prefix = f"{wire.RUN_PREFIX}{secrets.token_hex(6)}-"
        self._claim = wire.claim(self.prefix)
        self.invitation = {"address": address, "token": token, "prefix": self.prefix}
        self._watch = watch
        self._peers: dict[str, _Peer] = {}
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._begin()

    def expect(self, name: str, *, engine: str, rank: int) -> Future[dict[str, Any]]:
        """Let a worker of that name register. The future ends with its hello, or with why it will not come."""
        peer = _Peer(name, engine, rank)
        self._do(self._peers.__setitem__, name, peer)
        return peer.greeting

    def call(self, names: Sequence[str], messages: Sequence[list[bytes]]) -> list[Future[Any]]:
        """Send each registered worker its `[method, args]`, packed; one message may serve several.

        A future ends with the answer, a `RankFault`, or a `WorkerError`; one that is cancelled sends `cancel`.
        Segments are kept until every worker has answered.
        """
        number = next(self._numbers)
        waiting: dict[str, Future[Any]] = {name: Future() for name in names}
        futures = list(waiting.values())
        for name, future in waiting.items():
            future.add_done_callback(partial(self._dropped, name, number))
        self._do(self._send_call, number, _Call(messages, waiting))
        return futures

    def silence(self, name: str) -> float:
        """Return the seconds since the last sign of life of a worker."""
        return time.monotonic() - self._peers[name].heard

    def dismiss(self) -> None:
        """Tell every worker to close its engine and exit; calls are not answered any more, and their ends no errors."""
        self._do(self._dismiss)

    def close(self) -> None:
        """End the thread, fail what is outstanding, and sweep the run's segments. May be called twice."""
        super().close()
        self._dismiss()
        wire.sweep(self.prefix)
        self._claim.close()

    def _dismiss(self) -> None:
        for peer in self._peers.values():
            self._send(peer, "exit")
            self._lose(peer, peer.error("cannot answer: the driver has been closed"))

    def _send(self, peer: _Peer, kind: str, number: int = 0, frames: Sequence[bytes] = _NOTHING) -> None:
        if peer.identity and peer.gone is None:
            self._post(kind, number, frames, to=peer.identity)

    def _send_call(self, number: int, call: _Call) -> None:
        self._calls[number] = call
        for name, message in zip(list(call.waiting), call.messages, strict=True):
            peer = self._peers[name]
            self._send(peer, "call", number, message)
            if peer.gone is not None:
                self._settle(number, name, error=peer.gone)

    def _dropped(self, name: str, number: int, future: Future[Any]) -> None:
        if future.cancelled():
            self._do(self._send, self._peers[name], "cancel", number)

    def _settle(self, number: int, name: str, value: Any = None, error: BaseException | None = None) -> None:
        """End one worker's part in a call; with the last part the segments go."""
        call = self._calls[number]
        _end(call.waiting.pop(name), value, error)
        if not call.waiting:
            del self._calls[number]
            for message in call.messages:
                wire.release(message)

    def _received(self, sender: bytes, kind: str, number: int, frames: list[bytes]) -> None:
        if kind == "hello":
            self._greet(sender, wire.unpack(frames))
            return
        peer = next((peer for peer in self._peers.values() if peer.identity == sender), None)
        if peer is None:
            return  # it was refused and has not left yet
        peer.heard = time.monotonic()
        if number not in self._calls or peer.name not in self._calls[number].waiting:
            return
        try:
            value = wire.unpack(frames, prefix=self.prefix)
        except (PowertrainError, OSError) as exc:
            self._settle(number, peer.name, error=peer.error(f"sent an answer that cannot be read: {exc}"))
        else:
            wire.release(frames)
            self._settle(number, peer.name, value, wire.RankFault(value) if kind == "fault" else None)

    def _greet(self, sender: bytes, hello: dict[str, Any]) -> None:
        name = str(hello["name"])
        peer = self._peers.get(name)
        reason = refusal(hello, API_VERSION)
        if peer is None:
            reason = f"no worker {name!r} is expected"
        elif peer.identity:
            reason = f"worker {name!r} has registered already, from process {peer.greeting.result()['pid']}"
        elif reason:
            _end(peer.greeting, error=HandshakeError(reason, worker=name, rank=peer.rank))
        else:
            peer.identity, peer.heard = sender, time.monotonic()
            _end(peer.greeting, hello)
            return
        _LOG.warning("worker %r was refused: %s", name, reason)
        self._post("refuse", 0, wire.pack(reason), to=sender)

    def _tick(self, *, beat: bool) -> None:
        if beat:
            for peer in self._peers.values():
                self._send(peer, "beat")
        for status in self._watch():
            found = self._peers.get(status.name)
            if status.code is None or found is None or found.gone is not None:
                continue
            if not found.suspect:
                found.suspect = True  # what it said last may still be on its way: one tick more
                continue
            how = f"signal {-status.code}" if status.code < 0 else f"exit code {status.code}"
            what = f"(process {status.pid}) ended with {how}; its log {status.log} ends:\n{status.tail}"
            self._lose(found, found.error(what, status.tail))

    def _lose(self, peer: _Peer, error: WorkerError) -> None:
        peer.gone = peer.gone or error
        _end(peer.greeting, error=error)
        for number in [number for number, call in self._calls.items() if peer.name in call.waiting]:
            self._settle(number, peer.name, error=error)


def _tell_break(work: Future[Any]) -> None:
    """Log why half of a channel stopped, unless that was `close`."""
    if not work.cancelled() and (exc := work.exception()) is not None:
        _LOG.error("the control channel broke", exc_info=exc)


def _end(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
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

"""One vLLM over several ranks: rank 0 decides, the others do the same, step by step, as it tells them.

Every rank has a vLLM engine of its own (vLLM's executor "external_launcher"). They schedule alike as long as the same
requests come and go between the same steps, and their models meet in each step's collectives. So rank 0 tells the
others, in one stream: what is added and dropped, each step before it takes it, and how calls of its engine ended,
since every rank gets every call and all have to answer alike. A rank that ends or breaks off is known by its
connection, at once, whatever collective the others wait in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any, Final

import msgpack

from powertrain.errors import ConfigError, DeadlineError, PowertrainError, StateError, WorkerError
from powertrain.runtime.wire import RankFault, told

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec, RankSpec

KEY: Final = "powertrain-vllm"
"""Under it the store of torch's process group holds where rank 0 listens."""
LEAVE_SECONDS: Final = 5.0
CLOSED: Final = "was closed"
Lost = Callable[[Exception], None]


def variables(place: RankSpec) -> dict[str, str]:
    """Return what torch's process group is made from; only this rank's card is visible, so it is card 0."""
    host, _, port = place.rendezvous.rpartition(":")
    local = "0" if place.device == "cuda" else str(place.local_rank)
    rank = {"RANK": str(place.rank), "WORLD_SIZE": str(place.world), "LOCAL_RANK": local}
    return {**rank, "MASTER_ADDR": host, "MASTER_PORT": port}


def arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return vLLM's engine arguments of an engine of several ranks; none for one of one rank.

    vLLM's own all-reduce looks at cards that are not visible here. ConfigError for axes that vLLM cannot lay out so.
    """
    t, p, e = (spec.axes.get(axis, 1) for axis in "tpe")
    if t * p != spec.place.world:
        message = f"t{t}p{p} makes {t * p} ranks of an engine, and this one has {spec.place.world}"
        raise ConfigError(message)
    if e not in {1, t}:
        message = f"vLLM spreads experts over all {t} ranks of t or over none, not over e{e}: say e{t}, or leave it out"
        raise ConfigError(message)
    if spec.place.world == 1:
        return {}
    return {"distributed_executor_backend": "external_launcher", "disable_custom_all_reduce": True}


def _store(place: RankSpec, seconds: float) -> Any:
    from torch.distributed import TCPStore

    host, _, port = place.rendezvous.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


class Alone:
    """An engine of one rank, or one that sees to its ranks itself."""

    follows = False

    def send(self, *message: Any) -> None:
        """Tell the other ranks."""

    async def call(self, what: str, key: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do a call's work on rank 0 and return its answer; elsewhere wait for how it ended there, and return None.

        what, key: by these the ranks know that they are in the same call. What rank 0 raises, all raise.
        """
        return await work()

    async def closed(self) -> None:
        """Wait until rank 0 has paused and this rank has done all that came before."""

    async def opened(self) -> None:
        """Wait until rank 0 has resumed."""

    def broke(self, why: str) -> None:
        """Tell that this rank can do no more steps."""

    def close(self) -> None:
        """Take leave; may be called twice."""


class Leading(Alone):
    """Rank 0. lost: called once for a rank that ended or broke off, from any thread."""

    def __init__(self, place: RankSpec, seconds: float, lost: Lost) -> None:
        self._place, self._seconds, self._lost = place, seconds, lost
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._peers: dict[int, tuple[Connection, int]] = {}
        self._count = itertools.count()
        self._leaving = False
        self._sender = threading.Thread(target=self._send_on, name="powertrain-vllm-lead", daemon=True)

    def meet(self) -> None:
        """Let every other rank connect; DeadlineError names those that do not."""
        token = secrets.token_bytes(16)
        arrived: queue.SimpleQueue[tuple[int, int, Connection]] = queue.SimpleQueue()
        with Listener((self._place.rendezvous.rpartition(":")[0], 0), authkey=token) as listener:
            threading.Thread(target=_accept, args=(listener, arrived), daemon=True).start()
            _store(self._place, self._seconds).set(KEY, msgpack.packb([*listener.address, token]))
            end = time.monotonic() + self._seconds
            while len(self._peers) < self._place.world - 1:
                try:
                    rank, pid, connection = arrived.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    missing = ", ".join(f"rank {i}" for i in range(1, self._place.world) if i not in self._peers)
                    message = f"{missing} did not meet rank 0 within {self._seconds:g} s of its start"
                    raise DeadlineError(message, who=missing, what="start", seconds=self._seconds) from None
                self._peers[rank] = connection, pid
        self._sender.start()
        for rank in list(self._peers):
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def send(self, *message: Any) -> None:
        """Tell all other ranks, in the order of these calls; does not wait for them."""
        self._out.put(msgpack.packb(message))

    async def call(self, what: str, key: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do the work, and tell the others how it ended."""
        number = next(self._count)
        self.send("begun", number, what, key)
        try:
            answer = await work()
        except BaseException as exc:
            self.send("ended", number, told(exc))
            raise
        self.send("ended", number, None)
        return answer

    def close(self) -> None:
        """Tell the others that this is the end, and let go of them."""
        if not self._leaving:
            self._leaving = True
            self.send("end")
            self._out.put(None)
            if self._sender.is_alive():
                self._sender.join(LEAVE_SECONDS)

    def _send_on(self) -> None:
        while (message := self._out.get()) is not None:
            for connection, _ in list(self._peers.values()):
                with contextlib.suppress(OSError):  # its own thread tells who is lost
                    connection.send_bytes(message)

    def _watch(self, rank: int) -> None:
        """Wait for a rank's end; it says nothing but why it breaks off, or that it leaves."""
        connection, pid = self._peers[rank]
        what = f"(process {pid}) ended"
        with contextlib.suppress(EOFError, OSError):
            what = str(msgpack.unpackb(connection.recv_bytes()))
        del self._peers[rank]  # with its last user it is closed: nobody may read or write then
        if not self._leaving:
            self._lost(_gone(rank, what))


class Following(Alone):
    """A rank above 0. obey: does one message of the stream, called from a thread of its own, in their order."""

    follows = True

    def __init__(self, place: RankSpec, seconds: float, lost: Lost) -> None:
        self._place, self._seconds, self._lost = place, seconds, lost
        self._loop = asyncio.get_running_loop()
        self._mine: defaultdict[tuple[str, str], deque[asyncio.Future[None]]] = defaultdict(deque)
        self._theirs: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._paired: dict[int, asyncio.Future[None]] = {}
        self._ended: dict[int, dict[str, Any] | None] = {}
        self._gates = {"open": asyncio.Event(), "closed": asyncio.Event()}
        self._gates["open"].set()
        self._fault: Exception | None = None
        self._leaving = False
        self._lead: Connection | None = None

    def meet(self) -> None:
        """Connect to rank 0; DeadlineError when it is not there."""
        try:
            *address, token = msgpack.unpackb(_store(self._place, self._seconds).get(KEY))
            self._lead = Client(tuple(address), authkey=token)
        except (RuntimeError, OSError, EOFError, AuthenticationError) as exc:
            message = f"rank {self._place.rank} did not meet rank 0 within {self._seconds:g} s of its start: {exc}"
            raise DeadlineError(message, who="rank 0", what="start", seconds=self._seconds) from exc
        self._lead.send_bytes(msgpack.packb([self._place.rank, os.getpid()]))

    def listen(self, obey: Callable[[Sequence[Any]], None]) -> None:
        """Begin to read the stream."""
        threading.Thread(target=self._read, args=(obey,), name="powertrain-vllm-follow", daemon=True).start()

    def _read(self, obey: Callable[[Sequence[Any]], None]) -> None:
        lead = self._lead
        while lead is not None:
            try:
                kind, *args = msgpack.unpackb(lead.recv_bytes())
            except (EOFError, OSError):
                kind, args = "gone", ["ended"]
            if kind in {"gone", "end"}:
                self._lead = None
                if not self._leaving:
                    exc = _gone(0, args[0] if args else CLOSED)
                    self._lost(exc)
                    self._hear("lost", exc)
                return
            if kind in {"begun", "ended"}:
                self._hear(kind, *args)
            else:
                obey([kind, *args])

    def reached(self, gate: str) -> None:
        """Note that this rank has done all that came before rank 0 paused ("closed") or resumed ("open")."""
        self._hear("gate", gate)

    def _hear(self, kind: str, *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(getattr(self, f"_take_{kind}"), *args)

    # ---- on the engine's event loop
    def _take_begun(self, number: int, what: str, key: str) -> None:
        waiting = self._mine.get((what, key))
        if waiting:
            self._paired[number] = waiting.popleft()
            self._tidy((what, key))
        else:
            self._theirs[what, key].append(number)

    def _take_ended(self, number: int, fault: dict[str, Any] | None) -> None:
        waiter = self._paired.pop(number, None)
        if waiter is not None:
            _settle(waiter, fault)
        elif fault is not None and fault["type"] == "CancelledError":  # this rank's call may never begin
            for key in [key for key, numbers in self._theirs.items() if number in numbers]:
                self._theirs[key].remove(number)
                self._tidy(key)
        else:
            self._ended[number] = fault

    def _take_gate(self, gate: str) -> None:
        for name, event in self._gates.items():
            event.set() if name == gate else event.clear()

    def _take_lost(self, exc: Exception) -> None:
        self._fault = exc
        waiting = [*self._paired.values(), *itertools.chain(*self._mine.values())]
        self._paired, self._mine = {}, defaultdict(deque)
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(exc)
        for event in self._gates.values():
            event.set()

    def _tidy(self, key: tuple[str, str]) -> None:
        for table in (self._mine, self._theirs):
            if key in table and not table[key]:
                del table[key]

    async def call(self, what: str, key: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Wait until rank 0's call has ended, and raise what it raised; the work is rank 0's."""
        if self._fault is not None:
            raise self._fault
        waiter, numbers = self._loop.create_future(), self._theirs.get((what, key))
        if numbers:
            number = numbers.popleft()
            self._tidy((what, key))
            if number in self._ended:
                _settle(waiter, self._ended.pop(number))
            else:
                self._paired[number] = waiter
        else:
            self._mine[what, key].append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._mine.get((what, key), ()):
                self._mine[what, key].remove(waiter)
                self._tidy((what, key))

    async def closed(self) -> None:
        """Wait for rank 0's pause; what rank 0 raises in it, this rank need not."""
        await self._pass("closed")

    async def opened(self) -> None:
        """Wait for rank 0's resume, as long as any wait in the engine may take."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._pass("open")
        except TimeoutError as exc:
            message = f"rank {self._place.rank} waited {self._seconds:g} s for rank 0 to resume"
            raise DeadlineError(message, who="rank 0", what="resume", seconds=self._seconds) from exc

    async def _pass(self, gate: str) -> None:
        await self._gates[gate].wait()
        if self._fault is not None:
            raise self._fault

    def broke(self, why: str) -> None:
        """Tell rank 0, which then fails every call."""
        self._say(f"broke off: {why}")

    def close(self) -> None:
        """Tell rank 0 that this rank leaves."""
        if not self._leaving:
            self._leaving = True
            self._say(CLOSED)

    def _say(self, what: str) -> None:
        lead = self._lead
        if lead is not None:
            with contextlib.suppress(OSError):  # rank 0 is gone already
                lead.send_bytes(msgpack.packb(what))


def _accept(listener: Listener, arrived: queue.SimpleQueue[tuple[int, int, Connection]]) -> None:
    while True:
        try:
            connection = listener.accept()
            rank, pid = msgpack.unpackb(connection.recv_bytes())
        except (AuthenticationError, EOFError, ValueError):  # a stranger
            continue
        except OSError:  # all are here, the listener is closed
            return
        arrived.put((rank, pid, connection))


def _gone(rank: int, what: str) -> PowertrainError:
    message = f"rank {rank} of this engine {what}; without it the others cannot go on, close the engine"
    return StateError(message) if what == CLOSED else WorkerError(message, rank=rank)


def _settle(waiter: asyncio.Future[None], fault: dict[str, Any] | None) -> None:
    if waiter.done():
        return
    if fault is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(RankFault(fault))


ALONE: Final = Alone()

"""Transfer `p2p`: every trainer's rank sends each inference rank what that one needs, and nothing else, by the plan.

No rank gathers and none broadcasts. What one rank sends another of a bucket is one message, packed without gaps; both
sides go through their messages in one order that all ranks agree on, with a bounded number of bytes under way, so that
nobody waits for somebody who waits for him. Weights travel over a group that carries nothing else (NCCL, HCCL or gloo);
that all are there before the first byte, and that all have everything, is settled on a Gloo sidecar.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import TransferError
from powertrain.interfaces.weights import Piece
from powertrain.tensors.planned import PlannedTransfer
from powertrain.tensors.sidecar import Groups, Store
from powertrain.tensors.verify import Checked
from powertrain.tensors.views import read_view
from powertrain.weights.boxes import ITEM_SIZE
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights import TransferPlan, Update
    from powertrain.weights.plan import Read

_BACKENDS: Final = {"cuda": "nccl", "npu": "hccl"}
"""Kind of device -> what carries weights between devices of that kind."""
_BUCKETS: Final = 2
"""Buckets that a rank may have under way."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to another of one bucket: `reads` back to back, those of the larger elements first.

    So every one of them is aligned, and no byte is sent that is no weight. peer: the other rank's place in the groups.
    """

    order: tuple[int, ...]
    peer: int
    reads: tuple[Read, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the message."""
        return sum(read.bytes for read in self.reads)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[Read, torch.Tensor]]:
        """Yield each read with its place in the message."""
        place = 0
        for read in self.reads:
            part = buffer[place : place + read.bytes].view(getattr(torch, read.block.dtype))
            yield read, part.view(tuple(read.size))
            place += read.bytes


def messages(reads: Sequence[tuple[int, Read]], rank: int, world: int) -> list[Message]:
    """Return a rank's messages in their order; reads: (place of the other side's rank, read), in the plan's order.

    The order is by bucket, then so that ranks begin with different partners, and is the same for both ends.
    """
    table: dict[tuple[int, int], list[Read]] = {}
    for peer, read in reads:
        table.setdefault((read.block.bucket, peer), []).append(read)
    found = []
    for (bucket, peer), some in table.items():
        low, high = min(rank, peer), max(rank, peer)  # the trainer's ranks come first, so low is the sender
        some.sort(key=lambda read: -ITEM_SIZE[read.block.dtype])
        found.append(Message((bucket, (high - low) % world, low), peer, tuple(some)))
    return sorted(found, key=lambda message: message.order)


def _place(weights: WeightSource | WeightSink) -> torch.device:
    return next((tensor.device for tensor in weights.tensors().values()), torch.device("cpu"))


@dataclass(slots=True)
class _Session:
    """One pair as a rank sees it. window: most bytes under way."""

    groups: Groups
    messages: list[Message]
    window: int


class _End(Checked):
    """What both sides share: the groups, and the loop over messages."""

    def __init__(self, weights: Any, place: RankSpec) -> None:
        self._weights, self._rank = weights, place.rank
        self._sessions: dict[str, _Session] = {}

    def where(self, session: str) -> tuple[str, str]:
        """Return the kind of this rank's device and which one it is, whatever its number here."""
        device = _place(self._weights)
        card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return device.type, card

    def _open(
        self, session: str, mine: int, reads: Sequence[tuple[int, Read]], how: Mapping[str, Any], seconds: float
    ) -> None:
        self.release(session)
        names = how["names"]
        groups = Groups((how["host"], how["port"]), how["prefix"], mine, names, how["backend"])
        groups.limit(seconds)
        try:
            groups.open()
        except BaseException as exc:
            groups.give_up(exc)
            groups.close()
            raise
        self._sessions[session] = _Session(groups, messages(reads, mine, len(names)), how["window"])

    def _exchange(
        self,
        session: str,
        seconds: float,
        begin: Callable[[Groups, Message, torch.Tensor], Any],
        end: Callable[[Message, torch.Tensor], None],
    ) -> int:
        """Run all messages; begin(groups, message, buffer) returns its work, end(message, buffer) uses what came.

        Returns the bytes that were handed to the group for weights.
        """
        found = self._sessions.pop(session, None)  # back in its place only if all goes well
        if found is None:
            text = f"rank {self._rank} has no groups for pair {session}; it was restarted, or failed"
            raise TransferError(text, phase="wire")
        groups, device = found.groups, _place(self._weights)
        store = torch.device("cpu") if groups.backend == "gloo" else device
        groups.limit(seconds)
        under_way: deque[tuple[Message, torch.Tensor, Any]] = deque()
        carried = waiting = 0
        try:
            groups.barrier("liveness")
            for message in found.messages:
                while under_way and waiting + message.bytes > found.window:
                    waiting -= self._end_first(groups, under_way, end)
                buffer = torch.empty(message.bytes, dtype=torch.uint8, device=store)
                under_way.append((message, buffer, begin(groups, message, buffer)))
                waiting += message.bytes
                carried += buffer.numel()
            while under_way:
                self._end_first(groups, under_way, end)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            groups.barrier("completion")
        except BaseException as exc:
            under_way.clear()  # works hold on to connections, which are to close now
            groups.give_up(exc)
            groups.close()
            raise
        self._sessions[session] = found
        return carried

    @staticmethod
    def _end_first(
        groups: Groups,
        under_way: deque[tuple[Message, torch.Tensor, Any]],
        end: Callable[[Message, torch.Tensor], None],
    ) -> int:
        message, buffer, work = under_way.popleft()
        groups.finish(work, message.peer, message.reads[0].name)
        end(message, buffer)
        return message.bytes

    def release(self, session: str) -> None:
        """Destroy a pair's groups."""
        found = self._sessions.pop(session, None)
        if found is not None:
            found.groups.close()


class P2pSource(_End):
    """A training rank's half."""

    def open(
        self,
        session: str,
        reads: Sequence[Sequence[Sequence[Read]]],
        firsts: Sequence[int],
        how: Mapping[str, Any],
        seconds: float,
    ) -> None:
        """Make the groups, with all other ranks, and note what this rank sends.

        firsts: place of each engine's rank 0 among all ranks.
        """
        mine = [
            (first + rank, read)
            for first, engine in zip(firsts, reads, strict=True)
            for rank, some in enumerate(engine)
            for read in some
            if read.block.rank == self._rank
        ]
        self._open(session, self._rank, mine, how, seconds)

    def send(self, session: str, seconds: float) -> int:
        """Send all that this rank owns to whoever needs it; returns bytes sent, once every rank has everything."""
        self._weights.fence()
        tensors = self._weights.tensors()

        def begin(groups: Groups, message: Message, buffer: torch.Tensor) -> Any:
            with torch.no_grad():
                for read, place in message.views(buffer):
                    place.copy_(read_view(tensors[read.block.storage], read))
            return groups.send(buffer, message.peer, message.order[0])

        return self._exchange(session, seconds, begin, lambda message, buffer: None)


class P2pSink(_End):
    """An inference rank's half."""

    def open(
        self, session: str, reads: Sequence[Sequence[Read]], first: int, how: Mapping[str, Any], seconds: float
    ) -> None:
        """Make the groups, with all other ranks, and note what this rank receives.

        first: place of its engine's rank 0 among all ranks.
        """
        mine = [(read.block.rank, read) for read in reads[self._rank]]
        self._open(session, first + self._rank, mine, how, seconds)

    def receive(self, session: str, seconds: float) -> tuple[int, float]:
        """Receive all that this rank needs and copy it into place; returns bytes, and the seconds that copying took."""
        spent = 0.0

        def end(message: Message, buffer: torch.Tensor) -> None:
            nonlocal spent
            begun = time.perf_counter()
            self._weights.apply(Piece(read.name, tuple(read.start), view) for read, view in message.views(buffer))
            spent += time.perf_counter() - begun

        def begin(groups: Groups, message: Message, buffer: torch.Tensor) -> Any:
            return groups.receive(buffer, message.peer, message.order[0])

        return self._exchange(session, seconds, begin, end), spent


def _margin(deadline: float) -> float:
    """Return the seconds that a rank may wait, so that its error arrives within the deadline."""
    return deadline - min(2.0, 0.3 * deadline)


class P2pTransfer(PlannedTransfer):
    """Driver's half. Options: `backend`, `host`, `bucket_mb` and `verify`."""

    PLUGIN = "p2p"
    BUCKET_MB = 256

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._store: Store | None = None
        self._generation = 0

    async def move(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Let all ranks send and receive; waits begin when all engines have paused, so a deadline is the moving's own.

        After a failure the next update makes new groups.
        """
        self._check_kind(plan, update)
        ready = self._take_ready(plan)
        with meter.phase("gather"):
            if not ready:
                await self._open(plan, deadline)
        with meter.phase("wire"):
            seconds = _margin(deadline)
            calls = [self._call(self.source, "send", seconds=seconds, deadline=deadline)]
            calls += [self._call(sink, "receive", seconds=seconds, deadline=deadline) for sink in self.sinks]
            sent, *received = await together(calls)
        meter.bytes += sum(sent)
        copying = max(spent for engine in received for _, spent in engine)
        meter.seconds["wire"] -= copying
        meter.seconds["load"] += copying
        await self._verify(plan, update, meter, deadline=deadline)
        self._set_ready(plan)

    async def _open(self, plan: TransferPlan, deadline: float) -> None:
        """Make new groups on all ranks, under a name of their own in the store."""
        places = await together(self._call(h, "where", deadline=deadline) for h in [self.source, *self.sinks])
        names = [
            f"{handle.name} rank {rank}"
            for handle, ranks in zip([self.source, *self.sinks], places, strict=True)
            for rank in range(len(ranks))
        ]
        backend = _backend([place for ranks in places for place in ranks], str(self.options.get("backend", "auto")))
        if self._store is None:
            self._store = Store(str(self.options.get("host") or "127.0.0.1"))
        self._generation += 1
        how: dict[str, Any] = {"names": names, "backend": backend, "window": _BUCKETS * self.bucket_bytes}
        how |= {"host": self._store.host, "port": self._store.port, "prefix": f"{self.session}/{self._generation}"}
        firsts = [sum(len(ranks) for ranks in places[: 1 + e]) for e in range(len(self.sinks))]
        rest: dict[str, Any] = {"how": how, "seconds": _margin(deadline), "deadline": deadline}
        calls = [self._call(self.source, "open", reads=plan.reads, firsts=firsts, **rest)]
        calls += [
            self._call(sink, "open", reads=reads, first=first, **rest)
            for sink, reads, first in zip(self.sinks, plan.reads, firsts, strict=True)
        ]
        await together(calls)

    async def close(self) -> None:
        """Destroy the groups on all ranks, then the store."""
        await super().close()
        if self._store is not None:
            self._store.close()
            self._store = None


def _backend(places: Sequence[tuple[str, str]], wanted: str) -> str:
    """Choose what carries weights; places: (kind of device, card) of all ranks.

    NCCL takes no two ranks on one card, so where two share one gloo is taken, or NCCL refused if it was asked for.
    """
    kinds = {kind for kind, _ in places}
    cards = [card for _, card in places if card]
    twice = len(set(cards)) < len(cards)
    if wanted == "auto":
        kind = kinds.pop() if len(kinds) == 1 and not twice else "cpu"
        return _BACKENDS.get(kind, "gloo")
    if wanted == "nccl" and (kinds != {"cuda"} or twice):
        where = "two of them are on one card" if kinds == {"cuda"} else f"they are on {', '.join(sorted(kinds))}"
        message = f"backend=nccl needs every rank on a card of its own, and {where}; use backend=gloo"
        raise TransferError(message, phase="gather")
    return wanted

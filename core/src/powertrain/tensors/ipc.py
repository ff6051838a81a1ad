"""Transfer `ipc`: engines that share cards; sinks copy from the trainer's own memory on the device.

The trainer hands out one handle for each allocation that its weights lie in, once. A sink maps them, works out its
copies once, and from then on an update is one message to each rank: the trainer waits for its device and says so in
shared memory, a sink that waits for that copies in one kernel and waits for its device. Nothing is staged, so no extra
memory is taken. The mappings stay open while the trainer's storages stay where they are (`keep_open`); they are closed
before the trainer offloads or ends. No handle leaves the control channel, whose every message carries the run's token.

Blocks on a card that a sink does not run on go through a staging area in shared memory, as in the transfer `shm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from powertrain.errors import TransferError
from powertrain.interfaces.transfer import Loads
from powertrain.interfaces.weights import Piece
from powertrain.tensors import cuda_ipc
from powertrain.tensors.planned import PlannedTransfer
from powertrain.tensors.shm import ShmTransfer
from powertrain.tensors.sink import BoxSink, Prepared, dtype_name
from powertrain.tensors.turns import Turn, await_turn
from powertrain.tensors.verify import Checked
from powertrain.tensors.views import pieces
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.interfaces.transfer import Command
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights import TransferPlan, TransferReport, Update
    from powertrain.weights.plan import Read


def card() -> str:
    """Return the identity of this process's card, whatever its number here is."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class IpcSource(Checked):
    """A training rank's half."""

    def __init__(self, weights: WeightSource, place: RankSpec) -> None:
        self._weights, self._rank = weights, place.rank
        self._sessions: dict[str, tuple[int, Turn]] = {}

    def offer(self, session: str) -> dict[str, Any]:
        """Return where the weights lie: `card`, `process`, `turn` (path), `segments` [(handle, bytes)], and `storages`
        name -> (segment, bytes from its first, elements, dtype).
        """
        self.release(session)
        tensors = self._weights.tensors()
        off = [name for name, tensor in tensors.items() if not tensor.is_cuda]
        if off:
            message = f"{off[0]!r} is not on a card (offloaded?); bring the trainer's weights back, or use shm"
            raise TransferError(message, phase="gather")
        turn = Turn.make(session, self._rank)
        self._sessions[session] = self._weights.places(), turn
        return {"card": card(), "process": os.getpid(), "turn": turn.path, **_export(tensors)}

    def settle(self, session: str) -> None:
        """Take the turn's name away; called when every sink has it attached."""
        self._sessions[session][1].settle()

    def confirm(self, session: str, number: int) -> bool:
        """Wait for the device, and let sinks that wait for this number read; False where the offer is void by now."""
        self._weights.fence()
        places, turn = self._sessions[session]
        holds = places == self._weights.places()
        turn.post(number if holds else -number)
        return holds

    def release(self, session: str) -> None:
        """Forget an offer."""
        if session in self._sessions:
            self._sessions.pop(session)[1].close()


def _export(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    segments: dict[int, tuple[int, bytes, int]] = {}
    storages: dict[str, tuple[int, int, int, str]] = {}
    for name, tensor in tensors.items():
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not tensor.numel():
            continue
        base, size = cuda_ipc.allocation(tensor.data_ptr())
        if base not in segments:
            segments[base] = (len(segments), cuda_ipc.export_handle(base), size)
        storages[name] = (segments[base][0], tensor.data_ptr() - base, span, dtype_name(tensor.dtype))
    return {"segments": [(handle, size) for _, handle, size in segments.values()], "storages": storages}


@dataclass(slots=True)
class _Session:
    """One pair as a sink's rank sees it. reads: what lies on its card. offers: of every trainer rank."""

    kind: str
    reads: Sequence[Read]
    offers: Sequence[Mapping[str, Any]]
    bytes: int
    turns: Sequence[tuple[int, Turn]]
    mappings: list[cuda_ipc.Mapped] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    prepared: Prepared | None = None


class IpcSink(Checked):
    """An inference rank's half."""

    def __init__(self, weights: WeightSink, place: RankSpec) -> None:
        self._weights, self._rank = weights, place.rank
        self._sessions: dict[str, _Session] = {}

    def where(self, session: str) -> tuple[str, int]:
        """Return this rank's card and process."""
        return card(), os.getpid()

    def open(
        self, session: str, kind: str, reads: Sequence[Sequence[Read]], offers: Sequence[Mapping[str, Any]]
    ) -> None:
        """Note what this rank reads and where the trainer's ranks offer it; what was mapped before is closed."""
        self.release(session)
        mine = reads[self._rank]
        turns = [(rank, Turn.attach(offers[rank]["turn"])) for rank in sorted({read.block.rank for read in mine})]
        self._sessions[session] = _Session(kind, mine, list(offers), sum(read.bytes for read in mine), turns)

    def load(self, session: str, number: int, keep_open: bool, seconds: float) -> int:
        """Wait for the trainer's ranks, copy all that this rank reads, and wait for the device; returns bytes."""
        found = self._sessions.get(session)
        if found is None:
            message = f"this rank has no offer for pair {session}; it was restarted, and the next update makes one"
            raise TransferError(message, phase="load")
        if not found.mappings:
            self._map(found)
        await_turn(found.turns, number, seconds=seconds)
        sink = self._weights
        try:
            if found.kind == "adapter" or not isinstance(sink, BoxSink):
                sink.apply(iter(found.pieces))
            elif found.prepared is None or not sink.replay(found.prepared):
                found.prepared = sink.prepare(found.pieces)
                done = sink.replay(found.prepared)
                assert done, "storages moved while their pieces were prepared"
        finally:
            if not keep_open:
                _unmap(found)
        return found.bytes

    def _map(self, found: _Session) -> None:
        device = torch.cuda.current_device()
        views: dict[tuple[int, str], torch.Tensor] = {}
        for rank in sorted({read.block.rank for read in found.reads}):
            offer = found.offers[rank]
            maps = [cuda_ipc.Mapped(bytes(handle), size, device) for handle, size in offer["segments"]]
            found.mappings += maps
            for name, (segment, offset, count, dtype) in offer["storages"].items():
                views[rank, name] = maps[segment].view(offset, count, getattr(torch, dtype))
        found.pieces = list(pieces(found.reads, lambda block: views[block.rank, block.storage]))

    def release(self, session: str) -> None:
        """Unmap a pair's memory."""
        found = self._sessions.pop(session, None)
        if found is not None:
            _unmap(found)
            for _, turn in found.turns:
                turn.close()


def _unmap(found: _Session) -> None:
    found.pieces, found.prepared = [], None
    while found.mappings:
        found.mappings.pop().close()


@dataclass(slots=True)
class _Opened:
    """What an update finds ready from the one before. rest: what goes by shared memory, None where nothing does."""

    plan: TransferPlan
    sinks: list[str]
    turns: list[Turn]
    rest: TransferPlan | None


class IpcTransfer(PlannedTransfer):
    """Driver's half. Options: `keep_open`, and `bucket_mb` and `folder` for what lies on other cards."""

    PLUGIN = "ipc"
    BUCKET_MB = ShmTransfer.BUCKET_MB

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._keep_open = bool(options.get("keep_open", True))
        self._staged = ShmTransfer("shm", {**options, "verify": 0, "direct": False})  # this one verifies all
        self._opened: _Opened | None = None
        self._number = 0

    async def gather(self, plan: TransferPlan, update: Update, *, deadline: float) -> Loads | None:
        """Tell sinks where the weights lie, if they do not know; the trainer's wait goes on beside their loading."""
        self._check_kind(plan, update)
        opened = self._opened
        if opened is None or opened.plan is not plan or opened.sinks != [sink.name for sink in self.sinks]:
            self._forget()
            opened = self._opened = await self._open(plan, deadline)
        if opened.rest or self._due(update):
            return None
        return self._all(deadline)

    async def move(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Bring what lies on other cards by shared memory, then let every sink copy the rest at once."""
        assert self._opened is not None
        if self._opened.rest:
            await self._staged.move(self._opened.rest, update, meter, deadline=deadline)
        await self._load_apart(self._all(deadline), meter, deadline)
        await self._verify(plan, update, meter, deadline=deadline)

    def _all(self, deadline: float) -> Loads:
        """Return what lets every sink copy what lies on its card, once the trainer has confirmed its weights."""
        self._number += 1
        how = {"number": self._number, "keep_open": self._keep_open, "seconds": deadline}
        load: Command = ("endpoint.call", (self.PLUGIN, "load", {"session": self.session, **how}))
        return Loads([load] * len(self.sinks), [self._confirm(deadline)])

    async def _confirm(self, deadline: float) -> None:
        try:
            held = await self._call(self.source, "confirm", number=self._number, deadline=deadline)
        except BaseException:  # a trainer that died, or a push that was cancelled: no sink is left waiting
            for turn in self._opened.turns if self._opened else ():
                turn.post(-self._number)
            raise
        if not all(held):
            message = "the trainer's weights have moved since they were offered; the next update maps them again"
            raise TransferError(message, phase="gather")

    def _forget(self) -> None:
        for turn in self._opened.turns if self._opened else ():
            turn.close()
        self._opened = None

    async def _push(self, update: Update, *, deadline: float, pause_mode: str) -> TransferReport:
        """Run one update; after one that failed the next opens everything anew."""
        try:
            return await super()._push(update, deadline=deadline, pause_mode=pause_mode)
        except BaseException:
            self._forget()
            raise

    async def unmap(self, *, deadline: float) -> None:
        """Let every sink close its mappings; called before the trainer's storages are freed or moved."""
        self._forget()
        await together(self._call(sink, "release", deadline=deadline) for sink in self.sinks)

    async def close(self) -> None:
        """Close the sinks' mappings, then forget the offers."""
        self._forget()
        await self._staged.close()
        await super().close()

    async def _open(self, plan: TransferPlan, deadline: float) -> _Opened:
        """Take an offer of every trainer rank to the sinks, and sort out what lies on other cards than theirs."""
        offers = await self._call(self.source, "offer", deadline=deadline)
        places = await together(self._call(sink, "where", deadline=deadline) for sink in self.sinks)
        if {process for engine in places for _, process in engine} & {offer["process"] for offer in offers}:
            message = "both engines live in one process, which cannot map its own memory; use the transfer local"
            raise TransferError(message, phase="gather")

        def here(read: Read, engine: int, rank: int) -> bool:
            return bool(offers[read.block.rank]["card"] == places[engine][rank][0])

        near, far = _kept(plan, here), _kept(plan, lambda *where: not here(*where))
        await together(
            self._call(sink, "open", kind=plan.kind, reads=reads, offers=offers, deadline=deadline)
            for sink, reads in zip(self.sinks, near.reads, strict=True)
        )
        turns = [Turn.attach(offer["turn"]) for offer in offers]
        await self._call(self.source, "settle", deadline=deadline)
        self._staged.source, self._staged.sinks = self.source, self.sinks
        return _Opened(plan, [sink.name for sink in self.sinks], turns, far if far.blocks else None)


def _kept(plan: TransferPlan, keep: Callable[[Read, int, int], bool]) -> TransferPlan:
    """Return a plan with the reads that keep(read, engine, rank) is true for, and the blocks that they need."""
    reads = tuple(
        tuple(tuple(read for read in ranks if keep(read, e, r)) for r, ranks in enumerate(engine))
        for e, engine in enumerate(plan.reads)
    )
    needed = {id(read.block) for engine in reads for ranks in engine for read in ranks}
    return replace(plan, blocks=tuple(block for block in plan.blocks if id(block) in needed), reads=reads)

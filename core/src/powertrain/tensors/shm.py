"""Transfer `shm`: engines of one host, by one copy where the system allows it, else by an area in shared memory.

Where weights lie in host memory on both sides, an engine's rank reads them from the trainer's own memory
(`powertrain.tensors.direct`). Else they go through a staging area, as follows.

Each source rank copies its own blocks to their places (no gather, no collective), each sink copies what it needs out.
The area has a few slots, each the size of a bucket, and keeps its memory from update to update. An update is one
command to each rank: all go through the buckets by themselves and tell one another in the area how far they are
(`Ledger`), so that bucket k is written while k - 1 is read, and a slot is written again only when every sink has
copied. Small buckets stay in the processor's cache on their way. Memory of a card is copied straight into the area and
out of it, which both sides have pinned.

The area's file is unlinked as soon as all have it open, so a crash leaves nothing; what a crash within that moment
leaves is swept by the next area's maker, which tells by the file lock that its owner is gone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import TransferError
from powertrain.interfaces.weights import Piece
from powertrain.tensors.area import Area, default_folder
from powertrain.tensors.copies import copy_into
from powertrain.tensors.direct import Aims, Offers, addresses_by_read
from powertrain.tensors.ledger import Ledger, Stopped
from powertrain.tensors.planned import PlannedTransfer, margin
from powertrain.tensors.verify import Checked
from powertrain.tensors.views import block_view, device_of, narrowed
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights import TransferPlan, TransferReport, Update
    from powertrain.weights.plan import Block, Read

_LOG: Final = logging.getLogger("powertrain.shm")
SLOTS = 4
"""Slots of an area: one is written, one read, and two let either side run ahead of the other."""


@dataclass(slots=True)
class _Session:
    """One pair's area as a rank sees it.

    rank: this one's place among all, the trainer's first. writers: how many of these are the trainer's. work: by
    bucket, what this rank copies, with views of the area.
    """

    area: Area
    ledger: Ledger
    rank: int
    writers: int
    buckets: int
    slots: int
    work: dict[int, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, area: Area, rank: int, how: Mapping[str, Any]) -> _Session:
        """Return a session without work; how: what the driver tells all ranks."""
        names = how["names"]
        return cls(area, Ledger(area.lines(), names), rank, how["writers"], how["buckets"], how["slots"])

    @property
    def readers(self) -> range:
        """The engines' ranks."""
        return range(self.writers, self.ledger.ranks)


class _Sessions(Checked):
    """What both sides share: sessions by name."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def _session(self, session: str) -> _Session:
        if session not in self._sessions:
            message = (
                f"this rank has no staging area for pair {session}; it was restarted, and the next update opens one"
            )
            raise TransferError(message, phase="wire")
        return self._sessions[session]

    def release(self, session: str) -> None:
        """Unmap a pair's area, and unlink it if this rank made it."""
        found = self._sessions.pop(session, None)
        if found is not None:
            found.work.clear()
            found.area.unlink()
            found.area.close()


class ShmSource(_Sessions):
    """A training rank's half."""

    def __init__(self, weights: WeightSource, place: RankSpec) -> None:
        super().__init__()
        self._weights, self._rank = weights, place.rank
        self._offers = Offers(weights, place.rank)

    def offer(self, session: str, blocks: Sequence[Block] | None, readers: Sequence[int]) -> dict[str, Any] | str:
        """Say where this rank's blocks lie, or why nobody may read them directly; see `Offers.make`."""
        return self._offers.make(session, blocks, readers)

    def withdraw(self, session: str) -> None:
        """Take back what was offered."""
        self._offers.release(session)

    def release(self, session: str) -> None:
        """Free the pair's area, and take back what was offered."""
        self._offers.release(session)
        super().release(session)

    def create(self, session: str, how: Mapping[str, Any], folder: str | None) -> str | None:
        """Make the area on rank 0 and return its path; the other ranks return None."""
        super().release(session)
        if self._rank != 0:
            return None
        area = Area.create(Path(folder) if folder else default_folder(), session, **_sizes(how))
        self._sessions[session] = _Session.of(area, 0, how)
        return str(area.path)

    def open(self, session: str, path: str, how: Mapping[str, Any], blocks: Sequence[Block]) -> None:
        """Map the area and note which blocks this rank writes."""
        found = self._sessions.get(session)
        if found is None:
            area = Area.attach(Path(path), **_sizes(how))
            found = self._sessions[session] = _Session.of(area, self._rank, how)
        for block in blocks:
            if block.rank == self._rank:
                found.work.setdefault(block.bucket, []).append((found.area.block(block), block))

    def settle(self, session: str) -> None:
        """Unlink the area's file; called when every rank has it open."""
        self._session(session).area.unlink()

    def write(self, session: str, first: int, seconds: float) -> int:
        """Copy all that this rank owns into place, each bucket once its slot has been read; returns bytes.

        first: number of the update's first bucket in this area's life. seconds: what a wait may take. Ends early, with
        the bytes up to there, when another rank has failed.
        """
        found, total = self._session(session), 0
        with found.ledger.stopping():
            self._weights.fence()
            tensors, end = self._weights.tensors(), time.monotonic() + seconds
            for bucket in range(found.buckets):
                work, done = found.work.get(bucket), first + bucket + 1
                if work:
                    what = f"copy what lay in the slot of bucket {bucket}, for {work[0][1].name!r}"
                    if not found.ledger.wait(found.rank, found.readers, done - found.slots, what, end):
                        break
                    total += _put(found.area, work, tensors)
                found.ledger.post(found.rank, done)
        return total


class ShmSink(_Sessions):
    """An inference rank's half."""

    def __init__(self, weights: WeightSink, place: RankSpec) -> None:
        super().__init__()
        self._weights, self._rank = weights, place.rank
        self._aims = Aims(weights)

    def where(self, session: str) -> int:
        """Return this rank's process."""
        return os.getpid()

    def aim(
        self,
        session: str,
        reads: Sequence[Sequence[Read]],
        addresses: Sequence[bytes],
        offers: Sequence[Mapping[str, Any]],
    ) -> str | None:
        """Get ready to read the trainer's memory directly, or say why not; see `Aims.aim`."""
        return self._aims.aim(session, reads[self._rank], addresses[self._rank], offers)

    def take(self, session: str, seconds: float) -> tuple[int, float]:
        """Read all that this rank needs from the trainer's memory; returns bytes and seconds, as `read`.

        Ends early when another rank has failed.
        """
        found, begun = self._session(session), time.monotonic()
        with found.ledger.stopping(), suppress(Stopped):
            total = self._aims.take(session, lambda: found.ledger.look(found.rank, begun, begun + seconds))
            return total, time.monotonic() - begun
        return 0, 0.0

    def release(self, session: str) -> None:
        """Free the pair's area, and forget what is read directly."""
        self._aims.release(session)
        super().release(session)

    def open(
        self, session: str, path: str, how: Mapping[str, Any], reads: Sequence[Sequence[Read]], first_rank: int
    ) -> None:
        """Map the area and note what this rank reads. first_rank: place of its engine's rank 0 among all ranks."""
        super().release(session)
        area = Area.attach(Path(path), **_sizes(how))
        found = self._sessions[session] = _Session.of(area, first_rank + self._rank, how)
        for read in reads[self._rank]:
            part = narrowed(area.block(read.block), read.block.start, read.start, read.size)
            found.work.setdefault(read.block.bucket, []).append((read, Piece(read.name, read.start, part)))

    def read(self, session: str, first: int, seconds: float) -> tuple[int, float]:
        """Copy all that this rank needs out of the area, each bucket once it is written; see `ShmSource.write`.

        Returns bytes, and the seconds that copying took.
        """
        found, total, spent = self._session(session), 0, 0.0
        device = device_of(self._weights)
        with found.ledger.stopping():
            found.area.pin(device)
            end = time.monotonic() + seconds
            for bucket in range(found.buckets):
                work, done = found.work.get(bucket), first + bucket + 1
                if work:
                    what = f"write bucket {bucket}, for {work[0][0].name!r}"
                    owners = sorted({read.block.rank for read, _ in work})
                    if not found.ledger.wait(found.rank, owners, done, what, end):
                        break
                    begun = time.perf_counter()
                    self._weights.apply(piece for _, piece in work)
                    spent += time.perf_counter() - begun
                    total += sum(read.bytes for read, _ in work)
                found.ledger.post(found.rank, done)
        return total, spent


def _sizes(how: Mapping[str, Any]) -> dict[str, int]:
    return {"slot_bytes": how["slot_bytes"], "slots": how["slots"], "lines": 1 + len(how["names"])}


def _put(area: Area, work: Sequence[tuple[torch.Tensor, Block]], tensors: Mapping[str, torch.Tensor]) -> int:
    """Copy blocks into their places; complete when it returns, those from a card too. Returns bytes."""
    total, cards = 0, set[torch.device]()
    with torch.no_grad():
        for place, block in work:
            view = block_view(tensors[block.storage], block.place, block.size, block.stride)
            if view.is_cuda and view.device not in cards:
                area.pin(view.device)
                cards.add(view.device)
            copy_into(place, view)
            total += block.bytes
    for card in cards:
        torch.cuda.current_stream(card).synchronize()
    return total


class ShmTransfer(PlannedTransfer):
    """Driver's half. Options: `direct`, `bucket_mb`, `folder` and `verify`."""

    PLUGIN = "shm"
    BUCKET_MB = 32

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._area: Area | None = None
        self._done = 0
        self._offers: list[Any] | None = None
        self._told = False

    async def _push(self, update: Update, *, deadline: float, pause_mode: str) -> TransferReport:
        """Run one update; its report's `direct` is 1 where nothing was staged."""
        report = await super()._push(update, deadline=deadline, pause_mode=pause_mode)
        return report.noting(direct=float(self._offers is not None))

    async def move(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Let all ranks write and read, each through all buckets; a fault of one ends the others at once.

        After a failure the next update makes a new area.
        """
        self._check_kind(plan, update)
        ready = self._take_ready(plan)
        with meter.phase("gather"):
            if ready and self._offers is not None:  # they may have moved
                again: dict[str, Any] = {"blocks": None, "readers": ()}
                ready = self._offers == await self._call(self.source, "offer", **again, deadline=deadline)
            if not ready:
                await self._open(plan, deadline)
        begun = time.perf_counter()
        first, self._done = self._done, self._done + len(plan.buckets)
        how: dict[str, Any] = {"seconds": margin(deadline), "deadline": deadline}
        if self._offers is not None:
            calls = [self._or_stop("load", meter, self._call(sink, "take", **how)) for sink in self.sinks]
            received = await together(calls)
            meter.bytes += plan.bytes
        else:
            how["first"] = first
            calls = [self._or_stop("wire", meter, self._call(self.source, "write", **how))]
            calls += [self._or_stop("load", meter, self._call(sink, "read", **how)) for sink in self.sinks]
            sent, *received = await together(calls)
            meter.bytes += sum(sent)
        copying = max(spent for engine in received for _, spent in engine)
        meter.seconds["load"] += copying
        meter.seconds["wire"] += time.perf_counter() - begun - copying
        await self._verify(plan, update, meter, deadline=deadline)
        self._set_ready(plan)

    async def _or_stop(self, phase: str, meter: Any, call: Awaitable[Any]) -> Any:
        """Await a call; where it fails or is cancelled, nobody waits for that rank any more."""
        meter.current = phase
        try:
            return await call
        except BaseException:
            meter.failed = meter.failed or phase
            if self._area is not None:
                Ledger(self._area.lines(), ()).stop()
            raise

    async def _open(self, plan: TransferPlan, deadline: float) -> None:
        """Make a new area and let all ranks, and the driver where it is on their host, map it."""
        self._forget()
        slot = -(-max(plan.buckets, default=1) // Area.PAGE) * Area.PAGE
        worlds = [len(await self._call(self.source, "release", deadline=deadline)), *map(len, plan.reads)]
        self._offers = await self._agree(plan, deadline)
        blocks, reads = (plan.blocks, plan.reads) if self._offers is None else ((), [[()] * w for w in worlds[1:]])
        how: dict[str, Any] = {"slot_bytes": slot, "slots": min(SLOTS, max(1, len(plan.buckets))) if blocks else 0}
        how |= {"names": self._rank_names(worlds), "writers": worlds[0], "buckets": len(plan.buckets)}
        folder = self.options.get("folder")
        path = (await self._call(self.source, "create", how=how, folder=folder, deadline=deadline))[0]
        with suppress(OSError):  # the ranks are on another host than the driver
            self._area = Area.attach(Path(path), **_sizes(how))
        where: dict[str, Any] = {"path": path, "how": how, "deadline": deadline}
        calls = [self._call(self.source, "open", blocks=blocks, **where)]
        calls += [
            self._call(sink, "open", reads=mine, first_rank=sum(worlds[: 1 + e]), **where)
            for e, (sink, mine) in enumerate(zip(self.sinks, reads, strict=True))
        ]
        await together(calls)
        await self._call(self.source, "settle", deadline=deadline)

    async def _agree(self, plan: TransferPlan, deadline: float) -> list[Any] | None:
        """Return the trainer's offers if every sink can read all that it needs directly, else None.

        What stands in the way is logged once.
        """
        if plan.kind != "full" or not plan.blocks or not self.options.get("direct", True):
            return None
        processes = await together(self._call(sink, "where", deadline=deadline) for sink in self.sinks)
        readers = sorted({process for engine in processes for process in engine})
        offers = await self._call(self.source, "offer", blocks=plan.blocks, readers=readers, deadline=deadline)
        reasons = [offer for offer in offers if isinstance(offer, str)]
        if not reasons:
            bare = [{**offer, "addresses": b""} for offer in offers]
            calls = [
                self._call(sink, "aim", reads=reads, addresses=addresses, offers=bare, deadline=deadline)
                for sink, reads, addresses in zip(self.sinks, plan.reads, addresses_by_read(plan, offers), strict=True)
            ]
            reasons = [reason for engine in await together(calls) for reason in engine if reason]
        if not reasons:
            return offers
        await self._call(self.source, "withdraw", deadline=deadline)
        if not self._told:
            self._told = True
            _LOG.info("weights go through the staging area, since %s", reasons[0])
        return None

    def _forget(self) -> None:
        area, self._area, self._done = self._area, None, 0
        if area is not None:
            area.close()

    async def close(self) -> None:
        """Unmap the area on all ranks, and here."""
        self._forget()
        await super().close()

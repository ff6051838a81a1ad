"""Transfer `shm`: one staging area in shared memory, written in place by the trainer's ranks, read by every engine.

Each source rank copies its own blocks to their places (no gather, no collective), each sink copies what it needs out.
The area has two slots and keeps its memory from update to update; a slot is written again only when every sink has
answered that it has copied. Its file is unlinked as soon as all have it open, so a crash leaves nothing; what a crash
within that moment leaves is swept by the next area's maker, which tells by the file lock that its owner is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import TransferError
from powertrain.interfaces.weights import Piece
from powertrain.tensors.planned import PlannedTransfer
from powertrain.tensors.verify import Checked
from powertrain.tensors.views import block_view, narrowed
from powertrain.weights.boxes import ITEM_SIZE
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights import TransferPlan, Update
    from powertrain.weights.plan import Block, Read

PREFIX = "powertrain-stage-"
SLOTS = 2


class Area:
    """A mapped staging file: `slots` slots of `slot_bytes`."""

    PAGE: Final = mmap.PAGESIZE

    def __init__(self, descriptor: int, path: Path, slot_bytes: int, slots: int) -> None:
        self._descriptor, self.path = descriptor, path
        self._slot_bytes, self._slots = slot_bytes, slots
        self._named = False
        self._map = mmap.mmap(descriptor, slot_bytes * slots)
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, folder: Path, session: str, slot_bytes: int, slots: int) -> Area:
        """Make the file, its memory reserved now: a full /dev/shm is an error here and no crash later."""
        sweep(folder)
        path = folder / f"{PREFIX}{os.getpid()}-{session}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, slot_bytes * slots)
            area = cls(descriptor, path, slot_bytes, slots)
        except OSError as exc:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            stat = os.statvfs(folder)
            message = (
                f"{folder} has {stat.f_bavail * stat.f_frsize} bytes free and the staging area needs "
                f"{slot_bytes * slots}; give it more, set `folder`, or use a smaller `bucket_mb`"
            )
            raise TransferError(message, phase="gather") from exc
        area._named = True
        return area

    @classmethod
    def attach(cls, path: Path, slot_bytes: int, slots: int) -> Area:
        """Map an area that another rank has made."""
        return cls(os.open(path, os.O_RDWR), path, slot_bytes, slots)

    def block(self, block: Block) -> torch.Tensor:
        """Return the block's place in the area, in the block's dtype and shape."""
        assert self._bytes is not None
        begin = (block.bucket % self._slots) * self._slot_bytes + block.offset
        flat = self._bytes[begin : begin + prod(block.size) * ITEM_SIZE[block.dtype]]
        return flat.view(getattr(torch, block.dtype)).view(block.size)

    def words(self) -> torch.Tensor:
        """Return the area as int64."""
        assert self._bytes is not None
        return self._bytes.view(torch.int64)

    def unlink(self) -> None:
        """Take the file's name away if it was made here; the memory lives as long as somebody has it mapped."""
        if self._named:
            self._named = False
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap; may be called twice."""
        if self._bytes is None:
            return
        self._bytes = None
        self._map.close()
        os.close(self._descriptor)


def sweep(folder: Path) -> None:
    """Delete staging files whose maker is gone: nobody holds their lock."""
    for path in folder.glob(PREFIX + "*"):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:  # another user's, or swept by somebody else meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class _Session:
    """One pair's area, and what this rank writes or reads of it by bucket."""

    area: Area
    work: Mapping[int, Sequence[Any]]


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
            found.area.unlink()
            found.area.close()


class ShmSource(_Sessions):
    """A training rank's half."""

    def __init__(self, weights: WeightSource, place: RankSpec) -> None:
        super().__init__()
        self._weights, self._rank = weights, place.rank

    def create(self, session: str, slot_bytes: int, slots: int, folder: str | None) -> str | None:
        """Make the area on rank 0 and return its path; the other ranks return None."""
        self.release(session)
        if self._rank != 0:
            return None
        area = Area.create(Path(folder) if folder else default_folder(), session, slot_bytes, slots)
        self._sessions[session] = _Session(area, {})
        return str(area.path)

    def open(self, session: str, path: str, slot_bytes: int, slots: int, blocks: Sequence[Block]) -> None:
        """Map the area and note which blocks this rank writes."""
        work = _by_bucket((block.bucket, block) for block in blocks if block.rank == self._rank)
        made = self._sessions.get(session)
        self._sessions[session] = _Session(made.area if made else Area.attach(Path(path), slot_bytes, slots), work)

    def settle(self, session: str) -> None:
        """Unlink the area's file; called when every rank has it open."""
        self._session(session).area.unlink()

    def write(self, session: str, bucket: int) -> int:
        """Copy this rank's blocks of a bucket into place; returns bytes."""
        found, tensors, total = self._session(session), self._weights.tensors(), 0
        with torch.no_grad():
            for block in found.work.get(bucket, ()):
                found.area.block(block).copy_(block_view(tensors[block.storage], block.place, block.size, block.stride))
                total += block.bytes
        return total


class ShmSink(_Sessions):
    """An inference rank's half."""

    def __init__(self, weights: WeightSink, place: RankSpec) -> None:
        super().__init__()
        self._weights, self._rank = weights, place.rank

    def open(self, session: str, path: str, slot_bytes: int, slots: int, reads: Sequence[Sequence[Read]]) -> None:
        """Map the area and note what this rank reads."""
        self.release(session)
        work = _by_bucket((read.block.bucket, read) for read in reads[self._rank])
        self._sessions[session] = _Session(Area.attach(Path(path), slot_bytes, slots), work)

    def read(self, session: str, bucket: int) -> int:
        """Copy out what this rank needs of a bucket; when it returns, the slot may be written again. Returns bytes."""
        found = self._session(session)
        reads = found.work.get(bucket, ())
        self._weights.apply(_staged(found.area, read) for read in reads)
        return sum(read.bytes for read in reads)


def _staged(area: Area, read: Read) -> Piece:
    return Piece(read.name, read.start, narrowed(area.block(read.block), read.block.start, read.start, read.size))


def _by_bucket(pairs: Iterator[tuple[int, Any]]) -> dict[int, list[Any]]:
    table: dict[int, list[Any]] = {}
    for bucket, work in pairs:
        table.setdefault(bucket, []).append(work)
    return table


def default_folder() -> Path:
    """Return where staging files lie if nothing else is said: in memory, where the host has such a folder."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class ShmTransfer(PlannedTransfer):
    """Driver's half. Options: `bucket_mb`, `folder` and `verify`."""

    PLUGIN = "shm"
    BUCKET_MB = 1024

    async def move(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Write bucket k while the sinks read bucket k - 1 from the other slot; a round ends when all have answered."""
        self._check_kind(plan, update)
        ready = self._take_ready(plan)
        with meter.phase("gather"):
            await self.source.call("weights.fence", deadline=deadline)
            if not ready:
                await self._open(plan, deadline)
        count = len(plan.buckets)
        for k in range(count + 1):
            calls = [self._call(self.source, "write", bucket=k, deadline=deadline)] if k < count else []
            if k > 0:
                calls += [self._call(sink, "read", bucket=k - 1, deadline=deadline) for sink in self.sinks]
            with meter.phase("wire" if k == 0 else "load"):
                answers = await together(calls)
            meter.bytes += sum(answers[0]) if k < count else 0
        await self._verify(plan, update, meter, deadline=deadline)
        self._set_ready(plan)

    async def _open(self, plan: TransferPlan, deadline: float) -> None:
        slot = -(-max(plan.buckets, default=1) // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = {"slot_bytes": slot, "slots": min(SLOTS, max(1, len(plan.buckets)))}
        folder = self.options.get("folder")
        path = (await self._call(self.source, "create", folder=folder, deadline=deadline, **sizes))[0]
        calls = [self._call(self.source, "open", path=path, blocks=plan.blocks, deadline=deadline, **sizes)]
        calls += [
            self._call(sink, "open", path=path, reads=reads, deadline=deadline, **sizes)
            for sink, reads in zip(self.sinks, plan.reads, strict=True)
        ]
        await together(calls)
        await self._call(self.source, "settle", deadline=deadline)

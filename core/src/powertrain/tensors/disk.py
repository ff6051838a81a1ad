"""Transfer `disk`: safetensors files in a folder that both sides see, for engines that share nothing else.

Every trainer rank writes its own blocks into one file of a folder `partial-VERSION`; the folder gets its name
`version-VERSION` by one rename, once all files and a manifest with the checksum of every block are on disk. Each
inference rank then checks what it will read, all of it, while it still answers with its old weights: a full disk, a
truncated file or a wrong checksum ends the update before a weight is touched. Only then do the engines pause and load.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import PowertrainError, TransferError
from powertrain.interfaces.transfer import Loads
from powertrain.interfaces.weights import Piece
from powertrain.tensors.disk_files import CHUNK, FORMAT, Clock, Stored, header, key
from powertrain.tensors.disk_folder import Folder, write_all
from powertrain.tensors.planned import PlannedTransfer
from powertrain.tensors.verify import Checked
from powertrain.tensors.views import block_view
from powertrain.weights.boxes import ITEM_SIZE
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights import TransferPlan, Update
    from powertrain.weights.plan import Block, Read

_SEEN_SECONDS: Final = 10.0
"""Seconds that a network file system has to show a new folder to its other hosts."""


class DiskSource(Checked):
    """A training rank's half."""

    def __init__(self, weights: WeightSource, place: RankSpec) -> None:
        self._weights, self._rank, self._world = weights, place.rank, place.world
        self._sessions: dict[str, list[tuple[str, Block]]] = {}
        self._folders: dict[str, Folder] = {}

    def open(self, session: str, blocks: Sequence[Block]) -> None:
        """Note which blocks this rank writes; of the larger elements first, so that all lie aligned."""
        pieces = Counter(block.name for block in blocks)
        mine = [
            (block.name if pieces[block.name] == 1 else key(block.name, block.start, block.size), block)
            for block in blocks
            if block.rank == self._rank
        ]
        self._sessions[session] = sorted(mine, key=lambda pair: -ITEM_SIZE[pair[1].dtype])

    def prepare(self, session: str, folder: str | None, keep: int, version: str) -> str | None:
        """On rank 0 make room for a version and return its folder while it is written; the other ranks return None."""
        if self._rank != 0:
            return None
        if session not in self._folders:
            self._folders[session] = Folder.make(session, folder, keep)
        return str(self._folders[session].begin(version))

    def write(self, session: str, path: str, version: str, seconds: float) -> dict[str, Any]:
        """Write this rank's file; returns `file`, `bytes`, and `tensors` key -> what the manifest says of it."""
        if session not in self._sessions:
            message = f"trainer rank {self._rank} was restarted and knows of no pair {session}; the next update tells"
            raise TransferError(message, phase="gather")
        self._weights.fence()
        name = f"rank-{self._rank}-of-{self._world}.safetensors"
        clock = Clock(seconds, f"trainer rank {self._rank}", "gather")
        blocks = self._sessions[session]
        head = header(blocks, {"format": "pt", "version": version})
        told: dict[str, Any] = {}
        current, place = "its header", len(head)
        try:
            with (Path(path) / name).open("xb", buffering=0) as file:
                write_all(file, head)
                for label, block in blocks:
                    current = repr(label)
                    clock.check(current)
                    told[label] = {**_facts(block), "begin": place, "crc32": self._write(file, block, clock)}
                    place += block.bytes
                os.fsync(file.fileno())
        except OSError as exc:
            free = os.statvfs(path) if Path(path).is_dir() else None
            room = f" ({free.f_bavail * free.f_frsize} bytes are free, its file needs {place})" if free else ""
            message = f"trainer rank {self._rank} could not write {current} to {path}: {exc.strerror or exc}{room}"
            raise TransferError(message, phase="gather") from exc
        return {"file": name, "bytes": place, "tensors": told}

    def _write(self, file: Any, block: Block, clock: Clock) -> int:
        view = block_view(self._weights.tensors()[block.storage], block.place, block.size, block.stride)
        data = memoryview(view.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        checksum = 0
        for begin in range(0, len(data), CHUNK):
            clock.check(repr(block.name))
            part = data[begin : begin + CHUNK]
            write_all(file, part)
            checksum = zlib.crc32(part, checksum)
        return checksum

    def seal(self, session: str, version: str, kind: str, parts: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
        """On rank 0 write the manifest and give the version its name; returns its folder and the manifest's digest."""
        if self._rank != 0:
            return None
        files = {part["file"]: {"bytes": part["bytes"], "tensors": part["tensors"]} for part in parts}
        told = {"format": FORMAT, "version": version, "kind": kind, "files": files}
        text = json.dumps(told, indent=1).encode()
        try:
            return str(self._folders[session].seal(version, text)), sha256(text).hexdigest()
        except OSError as exc:
            message = f"trainer rank 0 could not finish version {version} on disk: {exc}"
            raise TransferError(message, phase="gather") from exc

    def discard(self, session: str) -> None:
        """Remove what an update left unfinished."""
        if session in self._folders:
            self._folders[session].discard()

    def release(self, session: str) -> None:
        """Forget a pair, and remove its files but for the versions that are to be kept."""
        self._sessions.pop(session, None)
        folder = self._folders.pop(session, None)
        if folder is not None:
            folder.close()

    def close(self) -> None:
        """Forget every pair, also one that this rank made a folder for and was told no blocks of."""
        for session in {*self._sessions, *self._folders}:
            self.release(session)


def _facts(block: Block) -> dict[str, Any]:
    return {"name": block.name, "start": list(block.start), "size": list(block.size), "dtype": block.dtype}


class DiskSink(Checked):
    """An inference rank's half."""

    def __init__(self, weights: WeightSink, place: RankSpec) -> None:
        self._weights, self._rank = weights, place.rank
        self._who = f"inference rank {place.rank}" + (f" of engine {place.instance}" if place.instance else "")
        self._sessions: dict[str, Sequence[Read]] = {}

    def open(self, session: str, reads: Sequence[Sequence[Read]]) -> None:
        """Note what this rank reads."""
        self._sessions[session] = reads[self._rank]

    def check(self, session: str, path: str, digest: str, seconds: float) -> int:
        """Read every block that this rank needs and compare its checksum; nothing is written. Returns bytes read."""
        clock, total = Clock(seconds, self._who, "gather"), 0
        with self._stored(session, path, digest, min(seconds, _SEEN_SECONDS)) as stored:
            blocks = {(read.block.name, read.block.start): read.block for read in self._sessions[session]}
            for block in blocks.values():
                clock.check(repr(block.name))
                stored.check(block, clock)
                total += block.bytes
        return total

    def load(self, session: str, path: str, digest: str, seconds: float) -> int:
        """Copy all that this rank reads into place; returns bytes."""
        clock = Clock(seconds, self._who, "load")
        reads = self._sessions.get(session, ())
        with self._stored(session, path, digest, 0.0) as stored:
            self._weights.apply(_pieces(reads, stored, clock))
        return sum(read.bytes for read in reads)

    def _stored(self, session: str, path: str, digest: str, seconds: float) -> Stored:
        if session not in self._sessions:
            message = f"{self._who} was restarted and knows of no pair {session}; the next update tells it"
            raise TransferError(message, phase="gather")
        return Stored(Path(path), digest, self._who, seconds)

    def release(self, session: str) -> None:
        """Forget a pair."""
        self._sessions.pop(session, None)


def _pieces(reads: Sequence[Read], stored: Stored, clock: Clock) -> Iterator[Piece]:
    for read in reads:
        clock.check(repr(read.name))
        yield Piece(read.name, read.start, stored.read(read, clock))


class DiskTransfer(PlannedTransfer):
    """Driver's half. Options: `folder`, `keep`, `bucket_mb` and `verify`."""

    PLUGIN = "disk"
    BUCKET_MB = 1024

    async def gather(self, plan: TransferPlan, update: Update, *, deadline: float) -> Loads | None:
        """Write, name and check the version, while every engine still answers; loading is one command then."""
        self._check_kind(plan, update)
        if not self._take_ready(plan):
            await self._tell(plan, deadline)
        try:
            path, digest = await self._store(update, deadline)
            where: dict[str, Any] = {"path": path, "digest": digest, "seconds": 0.9 * deadline}
            await together(self._call(sink, "check", deadline=deadline, **where) for sink in self.sinks)
        except BaseException:
            await self._discard(deadline)
            raise
        self._set_ready(plan)
        load = ("endpoint.call", (self.PLUGIN, "load", {"session": self.session, **where}))
        return self._at_once(update, Loads([load] * len(self.sinks)))

    async def _tell(self, plan: TransferPlan, deadline: float) -> None:
        calls = [self._call(self.source, "open", blocks=plan.blocks, deadline=deadline)]
        calls += [
            self._call(sink, "open", reads=reads, deadline=deadline)
            for sink, reads in zip(self.sinks, plan.reads, strict=True)
        ]
        await together(calls)

    async def _store(self, update: Update, deadline: float) -> tuple[str, str]:
        version = str(update.version)
        how = {"folder": self.options.get("folder"), "keep": int(self.options.get("keep", 1))}
        path = (await self._call(self.source, "prepare", version=version, deadline=deadline, **how))[0]
        write = {"path": path, "version": version, "seconds": 0.9 * deadline}
        parts = await self._call(self.source, "write", deadline=deadline, **write)
        seal = {"version": version, "kind": update.kind, "parts": parts}
        path, digest = (await self._call(self.source, "seal", deadline=deadline, **seal))[0]
        return path, digest

    async def _discard(self, deadline: float) -> None:
        """Remove an unfinished version, if the trainer can still be asked to; else the next update does."""
        try:
            await self._call(self.source, "discard", deadline=deadline)
        except (PowertrainError, OSError):  # the first fault is the one to tell
            return

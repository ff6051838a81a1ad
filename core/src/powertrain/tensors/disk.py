"""Transfer `disk`: safetensors files in a folder that both sides see, for engines that share nothing else.

Every trainer rank writes its own blocks into one file of a folder `partial-VERSION`; the folder gets its name
`version-VERSION` by one rename, once all files and a manifest with the checksum of every block are on disk. Each
inference rank then checks what it will read, all of it, while it still answers with its old weights: a full disk, a
truncated file or a wrong checksum ends the update before a weight is touched. Only then do the engines pause and load.

With the option `delta` both sides keep the bytes of the version before, and a block is written as what has changed of
it where that is less. Such a version names the one that it builds on, which stays beside it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import PowertrainError, TransferError
from powertrain.interfaces.transfer import Loads
from powertrain.interfaces.weights import Piece
from powertrain.tensors import delta
from powertrain.tensors.bases import Bases, DeltaTransfer, where
from powertrain.tensors.disk_files import CHUNK, FORMAT, Clock, Stored, header, key
from powertrain.tensors.disk_folder import Folder, write_all
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


_CHAIN: Final = 2
"""Versions that tell changes follow on one that holds all values, until together they are so many times its size."""
_ROOM: Final = 32
"""Bytes that a block's line in a file's header may grow by when it tells changes."""


@dataclass(slots=True)
class _Session:
    """One pair as a rank sees it. own: blocks that it writes, by key; or reads. keep: where bases lie, if any."""

    own: Sequence[Any]
    keep: torch.device | None
    bases: Bases = field(default_factory=Bases)


class _End(Checked):
    """What both sides share: the pairs, and what was kept of their last update."""

    def __init__(self, weights: Any, place: RankSpec) -> None:
        self._weights, self._rank, self._world = weights, place.rank, place.world
        self._sessions: dict[str, _Session] = {}

    def _note(self, session: str, own: Sequence[Any], how: str) -> None:
        self._sessions[session] = _Session(own, None if how == "off" else where(self._weights, how))

    def base(self, session: str) -> str:
        """Return the version that this rank holds the base of, "" for none."""
        found = self._sessions.get(session)
        return found.bases.version if found else ""


class DiskSource(_End):
    """A training rank's half."""

    def __init__(self, weights: WeightSource, place: RankSpec) -> None:
        super().__init__(weights, place)
        self._folders: dict[str, Folder] = {}

    def open(self, session: str, blocks: Sequence[Block], delta: str) -> None:
        """Note which blocks this rank writes; of the larger elements first, so that all lie aligned."""
        pieces = Counter(block.name for block in blocks)
        mine = [
            (block.name if pieces[block.name] == 1 else key(block.name, block.start, block.size), block)
            for block in blocks
            if block.rank == self._rank
        ]
        self._note(session, sorted(mine, key=lambda pair: -ITEM_SIZE[pair[1].dtype]), delta)

    def prepare(self, session: str, folder: str | None, keep: int, version: str, base: str) -> str | None:
        """On rank 0 make room for a version and return its folder while it is written; the other ranks return None.

        base: version that it may build on, "" for none.
        """
        if self._rank != 0:
            return None
        if session not in self._folders:
            self._folders[session] = Folder.make(session, folder, keep)
        return str(self._folders[session].begin(version, base))

    def write(self, session: str, path: str, version: str, base: str, seconds: float) -> dict[str, Any]:
        """Write this rank's file; returns `file`, `bytes`, `tensors` key -> what the manifest says of it, and `counts`,
        which are `DeltaTransfer`'s. base: the version whose bytes all ranks hold, "" where all bytes are to be written.
        """
        found = self._sessions.get(session)
        if found is None:
            message = f"trainer rank {self._rank} was restarted and knows of no pair {session}; the next update tells"
            raise TransferError(message, phase="gather")
        self._weights.fence()
        name = f"rank-{self._rank}-of-{self._world}.safetensors"
        clock = Clock(seconds, f"trainer rank {self._rank}", "gather")
        facts = {"format": "pt", "version": version}
        head = header(found.own, facts)
        head += b" " * (-(-_ROOM * len(found.own) // 8) * 8 if base else 0)  # to be written over at the end
        told: dict[str, Any] = {}
        written: list[tuple[str, Block]] = []
        current, place = "its header", len(head)
        try:
            with found.bases.update(base, version if found.keep else ""), (Path(path) / name).open("xb", 0) as file:
                write_all(file, head)
                for label, block in found.own:
                    current = repr(label)
                    clock.check(current)
                    data = self._data(block, found, label, build=bool(base))
                    told[label] = {**_facts(block), "begin": place, "crc32": self._write(file, data, block, clock)}
                    if data.numel() < block.bytes:
                        told[label]["delta"] = data.numel()
                        label, block = f"{label}.delta", replace(block, dtype="uint8", size=(data.numel(),))
                    written.append((label, block))
                    place += data.numel()
                if base:
                    file.seek(0)
                    write_all(file, header(written, facts, len(head)))
                os.fsync(file.fileno())
        except OSError as exc:
            free = os.statvfs(path) if Path(path).is_dir() else None
            room = f" ({free.f_bavail * free.f_frsize} bytes are free, its file needs {place})" if free else ""
            message = f"trainer rank {self._rank} could not write {current} to {path}: {exc.strerror or exc}{room}"
            raise TransferError(message, phase="gather") from exc
        saved = sum(block.bytes for label, block in found.own if "delta" in told[label])
        counts = {"all": sum(block.bytes for _, block in found.own), "saved": saved, **found.bases.tally}
        return {"file": name, "bytes": place, "tensors": told, "counts": counts}

    def _data(self, block: Block, found: _Session, label: str, *, build: bool) -> torch.Tensor:
        """Return the flat bytes to be written of a block, on its way into the base where one is kept."""
        view = block_view(self._weights.tensors()[block.storage], block.place, block.size, block.stride).detach()
        dtype = getattr(torch, block.dtype)
        if found.keep is None:
            return view.to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)
        new = torch.empty(block.size, dtype=dtype, device=found.keep).copy_(view).reshape(-1).view(torch.uint8)
        layout = [(ITEM_SIZE[block.dtype], block.bytes)]
        return found.bases.outgoing(label, new, layout, build=build).cpu()

    def _write(self, file: Any, bytes_: torch.Tensor, block: Block, clock: Clock) -> int:
        data, checksum = memoryview(bytes_.numpy()), 0
        for begin in range(0, len(data), CHUNK):
            clock.check(repr(block.name))
            part = data[begin : begin + CHUNK]
            write_all(file, part)
            checksum = zlib.crc32(part, checksum)
        return checksum

    def seal(
        self, session: str, version: str, kind: str, base: str, parts: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str] | None:
        """On rank 0 write the manifest and give the version its name; returns its folder and the manifest's digest.

        base: version that its changes are of, "" where it holds all values.
        """
        if self._rank != 0:
            return None
        files = {part["file"]: {"bytes": part["bytes"], "tensors": part["tensors"]} for part in parts}
        told = {"format": FORMAT, "version": version, "kind": kind, **({"base": base} if base else {}), "files": files}
        text = json.dumps(told, indent=1).encode()
        try:
            if base:
                self._folders[session].builds_on(version, base)
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


class DiskSink(_End):
    """An inference rank's half."""

    def __init__(self, weights: WeightSink, place: RankSpec) -> None:
        super().__init__(weights, place)
        self._who = f"inference rank {place.rank}" + (f" of engine {place.instance}" if place.instance else "")

    def open(self, session: str, reads: Sequence[Sequence[Read]], delta: str) -> None:
        """Note what this rank reads."""
        self._note(session, reads[self._rank], delta)

    def check(self, session: str, path: str, digest: str, seconds: float) -> int:
        """Read every block that this rank needs and compare its checksum; nothing is written. Returns bytes read."""
        clock, total = Clock(seconds, self._who, "gather"), 0
        with self._stored(session, path, digest, min(seconds, _SEEN_SECONDS)) as stored:
            held = self._sessions[session].bases.version
            if stored.base and stored.base != held:
                message = (
                    f"version {stored.version} on disk tells changes of version {stored.base}, and {self._who} holds "
                    f"{held or 'none'}; the next update writes all values"
                )
                raise TransferError(message, phase="gather")
            blocks = {(read.block.name, read.block.start): read.block for read in self._sessions[session].own}
            for block in blocks.values():
                clock.check(repr(block.name))
                total += stored.check(block, clock)
        return total

    def load(self, session: str, path: str, digest: str, seconds: float) -> int:
        """Copy all that this rank reads into place; returns bytes."""
        clock = Clock(seconds, self._who, "load")
        with self._stored(session, path, digest, 0.0) as stored:
            found = self._sessions[session]
            loading = _Loading(found, stored, clock)
            with found.bases.update(stored.base, stored.version if found.keep else ""):
                self._weights.apply(loading.pieces())
        return loading.bytes

    def _stored(self, session: str, path: str, digest: str, seconds: float) -> Stored:
        if session not in self._sessions:
            message = f"{self._who} was restarted and knows of no pair {session}; the next update tells it"
            raise TransferError(message, phase="gather")
        return Stored(Path(path), digest, self._who, seconds)

    def release(self, session: str) -> None:
        """Forget a pair."""
        self._sessions.pop(session, None)


class _Loading:
    """One load of a version. bytes: read so far; changes of a block that several reads take are read once."""

    def __init__(self, found: _Session, stored: Stored, clock: Clock) -> None:
        self._found, self._stored, self._clock = found, stored, clock
        self._last: tuple[Any, torch.Tensor | None] = None, None
        self.bytes = 0

    def pieces(self) -> Iterator[Piece]:
        """Yield all that a rank reads."""
        for number, read in enumerate(self._found.own):
            self._clock.check(repr(read.name))
            kept = self._found.keep is not None
            yield Piece(read.name, read.start, self._built(number, read) if kept else self._whole(read))

    def _whole(self, read: Read) -> torch.Tensor:
        self.bytes += read.bytes
        return self._stored.read(read, self._clock)

    def _built(self, number: int, read: Read) -> torch.Tensor:
        """Return a read from its base, into which it is brought first."""
        block, bases, place = read.block, self._found.bases, self._found.keep
        if self._last[0] != (block.name, block.start):
            told = self._stored.changes(block, self._clock)
            self.bytes += 0 if told is None else told.numel()
            self._last = (block.name, block.start), None if told is None else told.to(place)
        data, item = self._last[1], ITEM_SIZE[block.dtype]
        if data is None:
            bases.keep(number, self._whole(read).contiguous().reshape(-1).view(torch.uint8).to(place))
        elif read.size == block.size:
            delta.patch(bases.part(number), data, [(item, block.bytes)])
        else:
            start = [at - own for at, own in zip(read.start, block.start, strict=True)]
            delta.patch_range(bases.part(number), data, item, block.size, start, read.size)
        return bases.part(number).view(getattr(torch, block.dtype)).view(tuple(read.size))


class DiskTransfer(DeltaTransfer):
    """Driver's half. Options: `folder`, `keep`, `bucket_mb`, `delta` and `verify`."""

    PLUGIN = "disk"
    BUCKET_MB = 1024

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._chain = 0
        self._built: set[str] = set()
        """The last version written and those that it builds on."""

    async def gather(self, plan: TransferPlan, update: Update, *, deadline: float) -> Loads | None:
        """Write, name and check the version, while every engine still answers; loading is one command then."""
        self._check_kind(plan, update)
        base = ""
        if not self._take_ready(plan):
            await self._tell(plan, deadline)
        elif self._last and self._chain < _CHAIN * plan.bytes and str(update.version) not in self._built:
            base = await self._agree(deadline=deadline)
        try:
            path, digest = await self._store(update, base, deadline)
            where: dict[str, Any] = {"path": path, "digest": digest, "seconds": 0.9 * deadline}
            await together(self._call(sink, "check", deadline=deadline, **where) for sink in self.sinks)
        except BaseException:
            await self._discard(deadline)
            raise
        self._set_ready(plan)
        load = ("endpoint.call", (self.PLUGIN, "load", {"session": self.session, **where}))
        return self._at_once(update, Loads([load] * len(self.sinks)))

    async def _tell(self, plan: TransferPlan, deadline: float) -> None:
        how: dict[str, Any] = {"delta": self.delta if plan.kind == "full" else "off", "deadline": deadline}
        calls = [self._call(self.source, "open", blocks=plan.blocks, **how)]
        calls += [
            self._call(sink, "open", reads=reads, **how) for sink, reads in zip(self.sinks, plan.reads, strict=True)
        ]
        await together(calls)

    async def _store(self, update: Update, base: str, deadline: float) -> tuple[str, str]:
        version = str(update.version)
        how = {"folder": self.options.get("folder"), "keep": int(self.options.get("keep", 1)), "base": base}
        path = (await self._call(self.source, "prepare", version=version, deadline=deadline, **how))[0]
        write = {"path": path, "version": version, "base": base, "seconds": 0.9 * deadline}
        parts = await self._call(self.source, "write", deadline=deadline, **write)
        self._count([part.pop("counts") for part in parts])
        base = base if self.tally["saved"] else ""
        self._chain = self._chain + sum(part["bytes"] for part in parts) if base else 0
        self._built = {version, *(self._built if base else ())}
        seal = {"version": version, "kind": update.kind, "base": base, "parts": parts}
        path, digest = (await self._call(self.source, "seal", deadline=deadline, **seal))[0]
        return path, digest

    async def _discard(self, deadline: float) -> None:
        """Remove an unfinished version, if the trainer can still be asked to; else the next update does."""
        try:
            await self._call(self.source, "discard", deadline=deadline)
        except (PowertrainError, OSError):  # the first fault is the one to tell
            return

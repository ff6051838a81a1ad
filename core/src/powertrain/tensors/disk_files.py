"""What lies in a version's folder of the transfer `disk`: safetensors files and a manifest, written and read in parts.

Files are read by `pread` and not mapped, since a mapped file that somebody truncates kills the process that reads it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from powertrain.errors import DeadlineError, TransferError
from powertrain.tensors.delta import patch
from powertrain.tensors.disk_folder import MANIFEST, chain
from powertrain.tensors.views import narrowed
from powertrain.weights import ranges
from powertrain.weights.boxes import ITEM_SIZE

if TYPE_CHECKING:
    from powertrain.weights.plan import Block, Read

FORMAT: Final = "powertrain-weights-1"
"""What the manifest calls this form."""
CHUNK: Final = 16 << 20
"""Bytes between two looks at the clock."""
_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Dtypes as the header of a safetensors file calls them."""


class Clock:
    """What is left of a deadline; who and what are named when nothing is."""

    def __init__(self, seconds: float, who: str, phase: str) -> None:
        self._seconds, self._who, self._phase = seconds, who, phase
        self._end = time.monotonic() + seconds

    def check(self, what: str) -> None:
        """DeadlineError once the time is over; what: the tensor that was being worked on."""
        if time.monotonic() > self._end:
            where = f"was still at {what} in phase {self._phase!r} after {self._seconds:g} s"
            message = f"{self._who} {where}; the disk is too slow for this deadline"
            raise DeadlineError(message, who=self._who, what=what, seconds=self._seconds)


def key(name: str, start: Sequence[int], size: Sequence[int]) -> str:
    """Return how a block that is not its whole tensor is called in a file: with its range."""
    return name + ranges.text((tuple(start), tuple(size)))


def header(blocks: Sequence[tuple[str, Block]], facts: Mapping[str, str], room: int = 0) -> bytes:
    """Return what a safetensors file begins with, for blocks that follow on one another; facts: its metadata.

    Its form: 8 bytes of length, then JSON, padded so that the data begin at a multiple of 8. room: bytes that it must
    take at least, a multiple of 8.
    """
    table: dict[str, Any] = {"__metadata__": dict(facts)}
    place = 0
    for name, block in blocks:
        ends = [place, place + block.bytes]
        table[name] = {"dtype": _NAMES[block.dtype], "shape": list(block.size), "data_offsets": ends}
        place += block.bytes
    text = json.dumps(table).encode()
    text += b" " * max(room - 8 - len(text), -len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Stored:
    """A version on disk as a reader sees it. digest: of the manifest it must have. seconds: until it must be seen.

    version/base: its own, and the one that it tells changes of, "" where it holds all values.
    """

    def __init__(self, path: Path, digest: str, who: str, seconds: float) -> None:
        self._path, self._who = path, who
        self._open: dict[str, int] = {}
        text = self._seen(path / MANIFEST, seconds)
        if sha256(text).hexdigest() != digest:
            self._refuse(f"{MANIFEST} has another checksum than the trainer gave")
        told = json.loads(text)
        self.version, self.base = str(told["version"]), str(told.get("base", ""))
        self._files = told["files"]
        self._where = {
            (entry["name"], tuple(entry["start"]), tuple(entry["size"])): (file, entry)
            for file, facts in self._files.items()
            for entry in facts["tensors"].values()
        }

    def _seen(self, path: Path, seconds: float) -> bytes:
        end = time.monotonic() + seconds
        while True:
            try:
                return path.read_bytes()
            except OSError as exc:
                if time.monotonic() > end:
                    message = (
                        f"{self._who} cannot read {path}: {exc.strerror}; the option `folder` must name one that the "
                        "trainer and every engine see"
                    )
                    raise TransferError(message, phase="gather") from exc
            time.sleep(0.02)

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def _refuse(self, what: str, cause: OSError | None = None) -> NoReturn:
        message = f"{self._who} does not take the weights in {self._path}: {what}"
        raise TransferError(message, phase="gather") from cause

    def _place(self, block: Block) -> tuple[int, Mapping[str, Any]]:
        """Return the descriptor of the file that holds a block, of the size it must have, and the block's facts."""
        file, entry = self._where.get((block.name, block.start, block.size), ("", {}))
        if not file:
            self._refuse(f"{key(block.name, block.start, block.size)} is not in it")
        if file not in self._open:
            try:
                descriptor = self._open[file] = os.open(self._path / file, os.O_RDONLY)
            except OSError as exc:
                self._refuse(f"{file} with {block.name!r} cannot be opened: {exc.strerror}", exc)
            size, told = os.fstat(descriptor).st_size, self._files[file]["bytes"]
            if size != told:
                self._refuse(f"{file} with {block.name!r} has {size} bytes and was written with {told}")
        return self._open[file], entry

    def check(self, block: Block, clock: Clock) -> int:
        """Compare a block's checksum with the manifest's; returns its bytes on disk."""
        descriptor, entry = self._place(block)
        found, done, count = 0, 0, entry.get("delta", block.bytes)
        while done < count:
            clock.check(repr(block.name))
            part = os.pread(descriptor, min(CHUNK, count - done), entry["begin"] + done)
            if not part:
                self._refuse(f"the file of {block.name!r} ends at byte {entry['begin'] + done}")
            found, done = zlib.crc32(part, found), done + len(part)
        if found != entry["crc32"]:
            what = f"{key(block.name, block.start, block.size)} has checksum {found:08x} and was written with"
            self._refuse(f"{what} {entry['crc32']:08x}")
        return int(count)

    def changes(self, block: Block, clock: Clock) -> torch.Tensor | None:
        """Return the bytes that tell what has changed in a block, None where the file holds all of it."""
        descriptor, entry = self._place(block)
        if "delta" not in entry:
            return None
        data = torch.empty(entry["delta"], dtype=torch.uint8)
        self._fill(data, descriptor, entry["begin"], block.name, clock)
        return data

    def read(self, read: Read, clock: Clock) -> torch.Tensor:
        """Return what a rank reads of a block: as much of it as lies together is read from disk."""
        block = read.block
        descriptor, entry = self._place(block)
        first, rows = (read.start[0] - block.start[0], read.size[0]) if block.size else (0, 1)
        row = prod(block.size[1:]) * ITEM_SIZE[block.dtype]
        data = torch.empty(rows * row, dtype=torch.uint8)
        self._fill(data, descriptor, entry["begin"] + first * row, read.name, clock)
        view = data.view(getattr(torch, block.dtype)).view((rows, *block.size[1:]) if block.size else ())
        return narrowed(view, (*read.start[:1], *block.start[1:]), read.start, read.size)

    def _fill(self, data: torch.Tensor, descriptor: int, begin: int, name: str, clock: Clock) -> None:
        memory, done = memoryview(data.numpy()), 0
        while done < len(memory):
            clock.check(repr(name))
            got = os.preadv(descriptor, [memory[done : done + CHUNK]], begin + done)
            if not got:
                self._refuse(f"the file of {name!r} has become shorter since it was checked")
            done += got


def load_version(folder: Path) -> dict[str, torch.Tensor]:
    """Return all blocks of a version by their keys, for whoever opens its folder, put together from those it builds on.

    A block that is its whole tensor has that one's name, another its range behind it. TransferError for a wrong
    checksum, OSError where a file is missing.
    """
    found: dict[str, torch.Tensor] = {}
    for path in reversed(chain(folder)):
        for file, facts in json.loads((path / MANIFEST).read_bytes())["files"].items():
            with (path / file).open("rb") as stream:
                for label, entry in facts["tensors"].items():
                    item = ITEM_SIZE[entry["dtype"]]
                    layout = [(item, item * prod(entry["size"]))]
                    stream.seek(entry["begin"])
                    data = bytearray(stream.read(entry.get("delta", layout[0][1])))
                    if zlib.crc32(data) != entry["crc32"]:
                        message = f"{label!r} in {path / file} has another checksum than it was written with"
                        raise TransferError(message, phase="load")
                    block = torch.frombuffer(data, dtype=torch.uint8)
                    if "delta" in entry:
                        patch(found[label].view(-1).view(torch.uint8), block, layout)
                    else:
                        found[label] = block.view(getattr(torch, entry["dtype"])).view(entry["size"])
    return found

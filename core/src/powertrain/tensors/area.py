"""The staging area in shared memory that ranks of one host write and read, mapped from a file without a name."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import tempfile
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from powertrain.errors import TransferError
from powertrain.weights.boxes import ITEM_SIZE

if TYPE_CHECKING:
    from powertrain.weights.plan import Block

_LOG: Final = logging.getLogger("powertrain.area")
PREFIX = "powertrain-stage-"


class Area:
    """A mapped file: `slots` slots of `slot_bytes`, and `lines` lines of 64 bytes behind them for a ledger."""

    PAGE: Final = mmap.PAGESIZE
    LINE: Final = 64

    def __init__(self, descriptor: int, path: Path, slot_bytes: int, slots: int, lines: int = 0) -> None:
        self._descriptor, self.path = descriptor, path
        self._slot_bytes, self._slots = slot_bytes, slots
        self._named = self._pinned = False
        self._map = mmap.mmap(descriptor, slot_bytes * slots + lines * self.LINE)
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, folder: Path, session: str, slot_bytes: int, slots: int, lines: int = 0) -> Area:
        """Make the file, its memory reserved now: a full /dev/shm is an error here and no crash later."""
        sweep(folder)
        path = folder / f"{PREFIX}{os.getpid()}-{session}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        size = slot_bytes * slots + lines * cls.LINE
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, size)
            area = cls(descriptor, path, slot_bytes, slots, lines)
        except OSError as exc:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            stat = os.statvfs(folder)
            message = (
                f"{folder} has {stat.f_bavail * stat.f_frsize} bytes free and the staging area needs "
                f"{size}; give it more, set `folder`, or use a smaller `bucket_mb`"
            )
            raise TransferError(message, phase="gather") from exc
        area._named = True
        return area

    @classmethod
    def attach(cls, path: Path, slot_bytes: int, slots: int, lines: int = 0) -> Area:
        """Map an area that another rank has made."""
        return cls(os.open(path, os.O_RDWR), path, slot_bytes, slots, lines)

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

    def lines(self) -> torch.Tensor:
        """Return the lines behind the slots, int64, one a row."""
        return self.words()[self._slots * self._slot_bytes // 8 :].view(-1, self.LINE // 8)

    def pin(self, device: torch.device) -> None:
        """Let a CUDA card read and write the area directly, until `close`; for any other device nothing is done.

        Where the driver refuses (a limit on locked memory, say), copies go through its own buffer: slower, and right.
        """
        if device.type != "cuda" or self._pinned or self._bytes is None:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        self._pinned = code == 0
        if not self._pinned:
            _LOG.warning("the staging area cannot be pinned (CUDA error %d): copies from and to cards are slow", code)
            if torch.cuda.is_initialized():
                with suppress(RuntimeError):  # takes the error away, which the next kernel would be blamed for
                    torch.empty(1, device=device).fill_(0)

    def unlink(self) -> None:
        """Take the file's name away if it was made here; the memory lives as long as somebody has it mapped."""
        if self._named:
            self._named = False
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap; may be called twice. Memory that a view is left of is unmapped with it."""
        if self._bytes is None:
            return
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = None
        with suppress(BufferError):
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


def default_folder() -> Path:
    """Return where staging files lie if nothing else is said: in memory, where the host has such a folder."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())

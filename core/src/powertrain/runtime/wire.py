"""How values cross a process border: msgpack for plain data, one block of bytes for all arrays, never pickle.

What may cross: None, bool, int (64 bits), float (also inf and nan), str, bytes, list, tuple, mappings, numpy arrays
and scalars (which arrive as Python numbers), and the dataclasses marked with `powertrain.interfaces.wire.wire`.
Everything else is refused by name. The arrays of a message lie end to end in one block; up to 64 KiB of it travel in
the message, more in a segment: a file in shared memory that only this user can read. The sender owns the segment and
removes it once every receiver has answered; the receiver maps it, copies, and lets go.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import mmap
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgpack

import powertrain.interfaces.build
import powertrain.interfaces.data
import powertrain.weights  # noqa: F401 - these three fill WIRE_TYPES
from powertrain.errors import ConfigError
from powertrain.interfaces.wire import WIRE_TYPES

MAX_PLAIN: Final = 64 << 20
"""Bytes of plain data in one message, arrays not counted."""
INLINE_ARRAYS: Final = 64 << 10
"""Bytes of arrays that still travel inside the message."""
RUN_PREFIX: Final = "powertrain-"
"""What the names of all runs' segments begin with."""
_TUPLE, _RECORD, _ARRAY = 1, 2, 3
_ALIGN: Final = 64
_PLAIN: Final[tuple[type[Any], ...]] = (bool, int, float, str, bytes)


@dataclasses.dataclass(slots=True)
class Packet:
    """One encoded value: plain data, its arrays end to end, and the segment that holds them when they are large.

    users: receivers that have yet to answer.
    """

    plain: bytes
    arrays: bytes = b""
    segment: Path | None = None
    users: int = 0

    def frames(self) -> list[bytes]:
        """Return the three parts of the message."""
        return [self.plain, self.arrays, str(self.segment or "").encode()]

    def release(self) -> None:
        """Called by the sender when one receiver has answered or will not: the last one removes the segment."""
        self.users -= 1
        if self.segment is not None and self.users <= 0:
            self.segment.unlink(missing_ok=True)


def pack(value: Any, *, prefix: str | None) -> Packet:
    """Encode a value. prefix: of segment names, the same in a whole run; None keeps arrays in the message.

    ConfigError for a value that may not cross, or for more than 64 MiB of plain data.
    """
    encoder = _Encoder()
    try:
        plain = encoder.encode(value)
    except (OverflowError, ValueError, RecursionError) as exc:
        if isinstance(exc, ConfigError):
            raise
        message = f"a value cannot be sent to another process: {exc}"
        raise ConfigError(message) from exc
    if len(plain) > MAX_PLAIN:
        message = (
            f"a message holds {len(plain) / (1 << 20):.0f} MiB of plain data, the most is {MAX_PLAIN >> 20} MiB; "
            "send numbers as numpy arrays, which have no such bound"
        )
        raise ConfigError(message)
    if prefix is None or encoder.size <= INLINE_ARRAYS:
        return Packet(plain, b"".join(encoder.blocks))
    return Packet(plain, segment=_write_segment(encoder.blocks, prefix))


def unpack(frames: Sequence[bytes], *, prefix: str = "") -> Any:
    """Decode what `Packet.frames` gave. Arrays are the receiver's own. ConfigError for anything not understood.

    prefix: a segment whose name does not begin with it is refused.
    """
    plain, arrays, segment = frames
    if not segment:
        return _decode(plain, memoryview(arrays))
    path = Path(bytes(segment).decode())
    if not prefix or not path.name.startswith(prefix) or path.parent not in _folders():
        message = f"a message names the segment {path}, which is none of this run's"
        raise ConfigError(message)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as block:
        view = memoryview(block)
        try:
            return _decode(plain, view)
        finally:
            view.release()


def copied(value: Any) -> Any:
    """Return what a worker would see of `value`: the same checks, nothing shared with the original."""
    return unpack(pack(value, prefix=None).frames())


def sweep(prefix: str) -> list[str]:
    """Remove every segment of a run, also those of processes that were killed; return their paths."""
    assert prefix, "an empty prefix would remove the segments of every run"
    found = [path for folder in _folders() for path in folder.glob(f"{prefix}*")]
    for path in found:
        path.unlink(missing_ok=True)
    return [str(path) for path in found]


def claim(prefix: str) -> IO[bytes]:
    """Mark a run's segments as in use for as long as the returned file is open, which a killed process's is not."""
    file = (_folders()[0] / f"{prefix}lock").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def sweep_dead() -> None:
    """Remove the segments of every run of this user whose driver is gone without having swept itself."""
    for lock in [path for folder in _folders() for path in folder.glob(f"{RUN_PREFIX}*-lock")]:
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep(lock.name.removesuffix("lock"))
        except OSError:  # in use, another user's, or just swept by someone else
            continue


class _Encoder:
    """Packs one value; arrays are collected beside the plain data, each at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.size = 0

    def encode(self, value: Any) -> bytes:
        packed: bytes = msgpack.packb(value, default=self._other, strict_types=True, use_bin_type=True)
        return packed

    def _other(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple:
            return msgpack.ExtType(_TUPLE, self.encode(list(value)))
        if WIRE_TYPES.get(kind.__name__) is kind:
            fields = [getattr(value, field.name) for field in dataclasses.fields(kind)]
            return msgpack.ExtType(_RECORD, self.encode([kind.__name__, fields]))
        if isinstance(value, Mapping):
            return dict(value)
        import numpy as np

        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic) and isinstance(plain := value.item(), _PLAIN):
            return plain
        for base in _PLAIN:
            if isinstance(value, base):
                return base(value)
        message = (
            f"a value of type {kind.__module__}.{kind.__qualname__} may not go to another process; plain data, numpy "
            f"arrays and the records of powertrain.interfaces may"
        )
        raise ConfigError(message)

    def _array(self, value: Any) -> Any:
        import numpy as np

        if value.dtype.kind not in "biufcSU":
            message = f"an array of dtype {value.dtype} may not go to another process; numbers, bools and text may"
            raise ConfigError(message)
        block = np.asarray(value, order="C")
        offset = self.size
        padding = -block.nbytes % _ALIGN
        self.blocks += [block.reshape(-1).view(np.uint8).data if block.size else b"", bytes(padding)]
        self.size += block.nbytes + padding
        return msgpack.ExtType(_ARRAY, self.encode([block.dtype.str, list(block.shape), offset]))


def _decode(plain: bytes, arrays: memoryview) -> Any:
    def extension(code: int, data: bytes) -> Any:
        inner = load(data)
        if code == _TUPLE:
            return tuple(inner)
        if code == _RECORD:
            return _record(*inner)
        if code == _ARRAY:
            return _copy_array(arrays, *inner)
        message = f"a message holds an extension of code {code}, which this powertrain does not know"
        raise ConfigError(message)

    def load(data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False, raw=False)

    try:
        return load(plain)
    except (msgpack.UnpackException, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as exc:
        if isinstance(exc, ConfigError):
            raise
        message = f"a message cannot be read: {type(exc).__name__}: {exc}"
        raise ConfigError(message) from exc


def _record(name: str, values: list[Any]) -> Any:
    kind = WIRE_TYPES.get(name)
    if kind is None:
        message = f"a message holds a record {name!r}, which is not allowed on the channel"
        raise ConfigError(message)
    fields = [field.name for field in dataclasses.fields(kind)]
    return kind(**dict(zip(fields, values, strict=True)))


def _copy_array(arrays: memoryview, dtype: str, shape: list[int], offset: int) -> Any:
    import numpy as np

    count = 1
    for size in shape:
        count *= size
    return (
        np.frombuffer(arrays, np.dtype(dtype), count, offset).reshape(shape).copy() if count else np.empty(shape, dtype)
    )


def _folders() -> list[Path]:
    shared = Path("/dev/shm")
    return [*([shared] if shared.is_dir() else []), Path(tempfile.gettempdir())]


def _write_segment(blocks: Sequence[Any], prefix: str) -> Path:
    """Write the blocks into a new segment; the folder for temporary files stands in where shared memory is full."""
    folders = _folders()
    for folder in folders:
        path = folder / f"{prefix}{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.writelines(blocks)
            return path
        except OSError as exc:
            path.unlink(missing_ok=True)
            if exc.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS) or folder == folders[-1]:
                raise
    raise AssertionError(folders)

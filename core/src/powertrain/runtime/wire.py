"""How values cross a process border: msgpack for plain data, one block of bytes for all arrays, never pickle.

What may cross: None, bool, int (64 bits), float (also inf and nan), str, bytes, list, tuple, mappings, numpy arrays
and scalars (which arrive as Python numbers), and the records of `powertrain.interfaces.wire`. Everything else is
refused by name. The arrays of a message lie end to end in one block; up to 64 KiB of it travel in the message, more
in a segment: a file in shared memory that only this user can read. The driver removes segments, its own ones once
every worker has answered, the workers' as it reads them; what a killed process left is swept.

Errors are told as plain data on the rank, and raised again as the same class on the driver.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import re
import secrets
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgpack

import powertrain.interfaces.build
import powertrain.interfaces.data
import powertrain.weights  # noqa: F401 - these three fill WIRE_TYPES
from powertrain import errors
from powertrain.errors import ConfigError, PowertrainError, WorkerError
from powertrain.interfaces.wire import WIRE_TYPES

MAX_PLAIN: Final = 64 << 20
"""Bytes of plain data in one message, arrays not counted."""
INLINE_ARRAYS: Final = 64 << 10
"""Bytes of arrays that still travel inside the message."""
RUN_PREFIX: Final = "powertrain-"
"""What the names of all runs' segments begin with."""
FOLDER: Final = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""Where segments lie."""
_TUPLE, _RECORD, _ARRAY = 1, 2, 3
_PLAIN = (str, int, float, bool, tuple, type(None))


def pack(value: Any, *, prefix: str = "") -> list[bytes]:
    """Encode a value as the three frames of a message: plain data, small arrays, name of the segment of large ones.

    prefix: of segment names, the same in a whole run; "" keeps arrays in the message. ConfigError for a value that may
    not cross, for more than 64 MiB of plain data, and where shared memory is full.
    """
    block = bytearray()
    try:
        plain = _encode(value, block)
    except (OverflowError, TypeError, ValueError, RecursionError) as exc:
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
    if not prefix or len(block) <= INLINE_ARRAYS:
        return [plain, bytes(block), b""]
    return [plain, b"", _write_segment(block, prefix).encode()]


def unpack(frames: Sequence[bytes], *, prefix: str = "") -> Any:
    """Decode what `pack` gave. Arrays are the receiver's own. ConfigError for anything not understood.

    prefix: a segment whose name does not begin with it is refused.
    """
    plain, arrays, segment = frames
    if not segment:
        return _decode(plain, arrays)
    name = bytes(segment).decode()
    if not prefix or not name.startswith(prefix) or "/" in name:
        message = f"a message names the segment {name}, which is none of this run's"
        raise ConfigError(message)
    with (FOLDER / name).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as block:
        return _decode(plain, block)


def release(frames: Sequence[bytes]) -> None:
    """Remove the segment of a message, if it has one; those who are reading it keep it."""
    if frames[2]:
        (FOLDER / bytes(frames[2]).decode()).unlink(missing_ok=True)


def copied(value: Any) -> Any:
    """Return what a worker would see of `value`: the same checks, nothing shared with the original."""
    return unpack(pack(value))


def sweep(prefix: str) -> None:
    """Remove every segment of a run, also those of processes that were killed."""
    assert prefix, "an empty prefix would remove the segments of every run"
    for path in FOLDER.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def claim(prefix: str) -> IO[bytes]:
    """Mark a run's segments as in use for as long as the returned file is open, which a killed process's is not."""
    file = (FOLDER / f"{prefix}lock").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def sweep_dead() -> None:
    """Remove the segments of every run of this user whose driver is gone without having swept itself."""
    for lock in FOLDER.glob(f"{RUN_PREFIX}*-lock"):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep(lock.name.removesuffix("lock"))
        except OSError:  # in use, another user's, or just swept by someone else
            continue


def _encode(value: Any, block: bytearray) -> bytes:
    """Pack one value; the bytes of its arrays are appended to `block`."""

    def other(value: Any) -> Any:
        import numpy as np

        kind = type(value)
        if kind is tuple:
            return msgpack.ExtType(_TUPLE, _encode(list(value), block))
        if WIRE_TYPES.get(kind.__name__) is kind:
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
            return msgpack.ExtType(_RECORD, _encode([kind.__name__, fields], block))
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, np.ndarray):
            _check_dtype(value.dtype)
            header = [value.dtype.str, list(value.shape), len(block)]
            block.extend(value.tobytes())
            return msgpack.ExtType(_ARRAY, _encode(header, block))
        if isinstance(value, np.generic):
            return value.item()
        for plain in (int, float, str):  # members of an enumeration, for one
            if isinstance(value, plain):
                return plain(value)
        message = (
            f"a value of type {kind.__module__}.{kind.__qualname__} may not go to another process; plain data, numpy "
            f"arrays and the records of powertrain.interfaces may"
        )
        raise ConfigError(message)

    return bytes(msgpack.packb(value, default=other, strict_types=True))


def _decode(plain: bytes, arrays: bytes | mmap.mmap) -> Any:
    def extension(code: int, data: bytes) -> Any:
        inner = load(data)
        if code == _TUPLE:
            return tuple(inner)
        if code == _RECORD:
            name, fields = inner
            if name not in WIRE_TYPES:
                message = f"a message holds a record {name!r}, which is not allowed on the channel"
                raise ConfigError(message)
            return WIRE_TYPES[name](**fields)
        if code == _ARRAY:
            return _array(arrays, *inner)
        message = f"a message holds an extension of code {code}, which this powertrain does not know"
        raise ConfigError(message)

    def load(data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)

    try:
        return load(plain)
    except (msgpack.UnpackException, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as exc:
        if isinstance(exc, ConfigError):
            raise
        message = f"a message cannot be read: {type(exc).__name__}: {exc}"
        raise ConfigError(message) from exc


def _array(arrays: bytes | mmap.mmap, dtype: str, shape: list[int], offset: int) -> Any:
    import numpy as np

    _check_dtype(np.dtype(dtype))
    return np.ndarray(shape, dtype, buffer=arrays, offset=offset).copy()


def _check_dtype(dtype: Any) -> None:
    if dtype.kind not in "biufcSU":
        message = f"an array of dtype {dtype} may not go to another process; numbers, bools and text may"
        raise ConfigError(message)


def _write_segment(block: bytearray, prefix: str) -> str:
    """Write a block into a new segment and return its name."""
    name = f"{prefix}{secrets.token_hex(8)}"
    try:
        with os.fdopen(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(block)
    except OSError as exc:
        (FOLDER / name).unlink(missing_ok=True)
        message = f"{len(block) / (1 << 20):.0f} MiB of arrays do not fit into {FOLDER}: {exc}"
        raise ConfigError(message) from exc
    return name


class RankFault(Exception):
    """What a rank's engine raised, as `told` tells it."""

    def __init__(self, fault: dict[str, Any]) -> None:
        super().__init__(fault["message"])
        self.fault = fault


def told(exc: BaseException) -> dict[str, Any]:
    """Return an error as plain data: class name, message, traceback, and the plain attributes of our own errors."""
    kept = vars(exc) if isinstance(exc, PowertrainError) else {}
    return {
        "type": type(exc).__name__,
        "message": str(exc),
        "traceback": "".join(traceback.format_exception(exc))[-20_000:],
        "attributes": {name: value for name, value in kept.items() if isinstance(value, _PLAIN)},
    }


def rebuilt(fault: dict[str, Any], *, engine: str, rank: int) -> PowertrainError:
    """Return the error to raise on the driver.

    Classes of `powertrain.errors` come back as themselves; every other one as a `WorkerError` with `remote_type` and
    `remote_traceback`. The message begins with engine and rank.
    """
    where, name, remote = f"{engine} rank {rank}", str(fault["type"]), fault["traceback"]
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PowertrainError):
        error = kind.__new__(kind, f"{where}: {fault['message']}")
        vars(error).update(fault["attributes"])
    else:
        message = f"{where}: {name}: {fault['message']}"
        error = WorkerError(message, worker=engine, rank=rank, remote_type=name, remote_traceback=remote)
    error.during = fault.get("during", "")
    error.add_note(f"from {where}:\n{remote}")
    return error


def same(faults: Sequence[dict[str, Any]]) -> bool:
    """Tell whether all ranks raised the same error, so that they still stand where they stood together."""
    return len({(fault["type"], re.sub(r"rank \d+", "rank", fault["message"])) for fault in faults}) == 1

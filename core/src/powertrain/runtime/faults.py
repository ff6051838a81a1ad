"""Errors on their way from a rank to the driver: told as plain data there, raised again as the same class here."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

from powertrain import errors
from powertrain.errors import PowertrainError, WorkerError

_PLAIN = (str, int, float, bool, type(None))


def told(exc: BaseException) -> dict[str, Any]:
    """Return an error as plain data: class name, message, traceback, and those attributes that are plain."""
    kept = {
        name: value
        for name, value in vars(exc).items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))
    }
    return {
        "type": type(exc).__name__,
        "message": str(exc),
        "traceback": "".join(traceback.format_exception(exc))[-20_000:],
        "attributes": kept if isinstance(exc, PowertrainError) else {},
    }


def rebuilt(fault: dict[str, Any], *, engine: str, rank: int) -> PowertrainError:
    """Return the error to raise on the driver.

    Classes of `powertrain.errors` come back as themselves; every other one as a `WorkerError` with `remote_type` and
    `remote_traceback`. The message begins with engine and rank.
    """
    kind = getattr(errors, str(fault["type"]), None)
    if isinstance(kind, type) and issubclass(kind, PowertrainError):
        found = kind.__new__(kind, f"{engine} rank {rank}: {fault['message']}")
        vars(found).update(fault["attributes"])
        found.add_note(f"from {engine} rank {rank}:\n{fault['traceback']}")
        return found
    message = f"{engine} rank {rank}: {fault['type']}: {fault['message']}"
    error = WorkerError(
        message, worker=engine, rank=rank, remote_type=fault["type"], remote_traceback=fault["traceback"]
    )
    error.add_note(f"from {engine} rank {rank}:\n{fault['traceback']}")
    return error


def same(faults: Sequence[dict[str, Any]]) -> bool:
    """Tell whether all ranks raised the same error, so that they still stand where they stood together."""
    return len({(fault["type"], re.sub(r"rank \d+", "rank", fault["message"])) for fault in faults}) == 1

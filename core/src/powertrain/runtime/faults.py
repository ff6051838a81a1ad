"""Errors on their way from a rank to the driver: told as plain data there, raised again as the same class here."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

from powertrain import errors
from powertrain.errors import PowertrainError, WorkerError

_PLAIN = (str, int, float, bool, tuple, type(None))


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
    error.add_note(f"from {where}:\n{remote}")
    return error


def same(faults: Sequence[dict[str, Any]]) -> bool:
    """Tell whether all ranks raised the same error, so that they still stand where they stood together."""
    return len({(fault["type"], re.sub(r"rank \d+", "rank", fault["message"])) for fault in faults}) == 1

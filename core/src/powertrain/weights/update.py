"""One kind of update object for full weights, adapters and whatever else, and the report of what an update cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any, Final

from powertrain.interfaces.wire import record
from powertrain.weights.version import WeightVersion

PHASES: Final = ("pause", "make_room", "gather", "wire", "load", "finish", "resume")
"""The phases of every update in their order; every report names them all."""


@record()
class Update:
    """What is about to be written into the sinks of a set.

    version: the version that the sinks carry once all have finished. kind: as the trainer's manifests say, "full" or
    "adapter"; core's sinks take no other. adapter: versioned adapter name (kind adapter). adapter_config: PEFT's
    adapter_config as plain data.

    Whether all bytes of it travel or only changes since another version is the transfer's matter, and shows in no kind.
    """

    version: WeightVersion
    kind: str = "full"
    adapter: str = ""
    adapter_config: Mapping[str, Any] = field(default_factory=dict)


@record()
class TransferReport:
    """What one update did: seconds of each phase, bytes that travelled, sinks reached, and the version now served.

    details: numbers of this transfer's own, by names that stand behind `transfer/` in metrics.
    """

    transfer: str
    version: WeightVersion
    seconds: Mapping[str, float]
    bytes: int
    sinks: int
    total_seconds: float
    details: Mapping[str, float] = field(default_factory=dict)

    def noting(self, **details: float) -> TransferReport:
        """Return the report with more details."""
        return replace(self, details={**self.details, **details})

    def metrics(self) -> dict[str, float]:
        """Return the report as flat numbers for `metrics.jsonl`."""
        return {
            **{f"transfer/{phase}_s": seconds for phase, seconds in self.seconds.items()},
            "transfer/total_s": self.total_seconds,
            "transfer/bytes": float(self.bytes),
            "transfer/gb_per_s": self.bytes / 1e9 / max(self.total_seconds, 1e-9),
            **{f"transfer/{name}": value for name, value in self.details.items()},
        }


class Meter:
    """Measures phases on the driver's clock; a phase entered twice adds up, and phases may overlap.

    current: the last one entered. failed: the first one that an exception left.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.bytes = 0
        self.current = ""
        self.failed = ""
        self._begun = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; `current` and `failed` name it for error messages."""
        assert name in self.seconds, name
        self.current = name
        begun = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self.seconds[name] += time.perf_counter() - begun

    def total(self) -> float:
        """Seconds since the meter was made."""
        return time.perf_counter() - self._begun

"""`metrics.jsonl`: one line of JSON for each step, complete on disk before the next step begins.

Keys are the recipe's; those under `time/` and `weight_version` differ between two equal runs, all others are bitwise
equal at staleness 0. A number that is not finite is written as null. A torn last line (a killed run) is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.errors import CheckpointError


class MetricsLog:
    """Appends lines to one run's metrics file; used by the driver alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one step's line and hand it to the operating system."""
        line = json.dumps({"step": step, **{key: _plain(value) for key, value in values.items()}}, allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._stream.close()


def _plain(value: Any) -> Any:
    """Return what JSON can hold; numpy scalars become Python's."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, or an empty list where there is none; CheckpointError for a damaged line."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is torn or empty
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError) as exc:
            message = f"line {number} of {path} is not a step's metrics: {line[:80]!r}"
            raise CheckpointError(message) from exc
        rows.append(row)
    return rows


def cut_metrics(path: Path, step: int) -> Path | None:
    """Keep the lines up to and with `step`; the whole file from before stays as `metrics.jsonl.cut-N`.

    Called on resume, since the steps after the checkpoint are taken again. Returns the kept copy, or None where
    nothing had to be cut.
    """
    if not path.exists():
        return None
    rows = read_metrics(path)
    kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    if kept == path.read_text(encoding="utf-8"):
        return None
    number = 1
    while (copy := path.with_name(f"{path.name}.cut-{number}")).exists():
        number += 1
    part = path.with_name(path.name + ".part")
    part.write_text(kept, encoding="utf-8")
    copy.hardlink_to(path)
    part.replace(path)
    return copy

"""`metrics.jsonl`: one line of JSON for each step, complete on disk before the next step begins.

Keys are the recipe's; those under `time/` and `weight_version` differ between two equal runs, all others are bitwise
equal at staleness 0. A number that is not finite is written as null. A torn last line (a killed run) is ignored.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.errors import CheckpointError


def append_metrics(path: Path, step: int, values: Mapping[str, Any]) -> None:
    """Append one step's line and hand it to the operating system; called by the driver alone."""
    line = json.dumps({"step": step, **{key: _plain(value) for key, value in values.items()}}, allow_nan=False)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")


def _plain(value: Any) -> Any:
    """Return what JSON can hold; numpy scalars become Python's."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
            message = f"line {number} of {path} is not a step's metrics; take it out: {line[:80]!r}"
            raise CheckpointError(message) from exc
        rows.append(row)
    return rows


def cut_metrics(path: Path, step: int) -> None:
    """Keep the lines up to and with `step`; the whole file from before stays as `metrics.jsonl.cut-N`.

    Called on resume, since the steps after the checkpoint are taken again. Does nothing where nothing has to be cut.
    """
    kept = "".join(json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] <= step)
    if path.exists() and kept != path.read_text(encoding="utf-8"):
        part = path.with_name(path.name + ".part")
        part.write_text(kept, encoding="utf-8")
        unused(path, f"{path.name}.cut-{{}}").hardlink_to(path)
        part.replace(path)


def unused(path: Path, form: str) -> Path:
    """Return the first of the names `form.format(1)`, `form.format(2)` ... beside `path` that is not taken."""
    names = (path.with_name(form.format(number)) for number in itertools.count(1))
    return next(name for name in names if not name.exists())

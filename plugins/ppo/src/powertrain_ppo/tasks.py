"""The demo's task: sums of two whole numbers, answers checked exactly. Data and check as a user's own would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

SHOTS: Final = ((12, 25), (58, 71))
"""The worked examples in front of each question; their pairs are not asked for."""


def sums(low: int = 10, high: int = 99, shots: int = 2) -> list[dict[str, Any]]:
    """Return one record for each ordered pair of numbers from `low` to `high`: lines of sums, the last one open.

    shots: worked examples in front, at most two. An answer ends with its line, so the newline belongs into `stop`.
    """
    head = "".join(f"{a} + {b} = {a + b}\n" for a, b in SHOTS[:shots])
    return [
        {
            "prompt": f"{head}{a} + {b} =",
            "answer": str(a + b),
            "key": f"{min(a, b)}+{max(a, b)}",  # a + b and b + a are never on both sides of the split
        }
        for a in range(low, high + 1)
        for b in range(low, high + 1)
        if (a, b) not in SHOTS and (b, a) not in SHOTS
    ]


def exact(record: Mapping[str, Any], text: str, tokens: Sequence[int]) -> float:
    """Return 1 when the completion is the record's answer and nothing else but blanks around it, else 0."""
    return float(text.strip() == record["answer"])

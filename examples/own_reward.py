"""A reward of one's own: called with the prompt's record, the completion's text and its token ids; may be async."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def short_and_right(record: Mapping[str, Any], text: str, tokens: Sequence[int]) -> float:
    """Return 1 for the right capital alone, half of it when other words stand around it."""
    if record["answer"].lower() not in text.lower():
        return 0.0
    return 1.0 if text.strip(" .\n").lower() == record["answer"].lower() else 0.5

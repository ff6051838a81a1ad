"""The faults found in one config string, each with the character it is about."""

from __future__ import annotations

import unicodedata
from typing import Final

from powertrain.errors import LayoutError

_WINDOW: Final = 110


class Faults:
    """Collects the faults of one config string, so that all are told at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: list[tuple[int, str]] = []

    def add(self, at: int, message: str, *, when: object = True) -> None:
        """Note a fault at offset `at` if `when` is true."""
        if when:
            self._found.append((at, message))

    def __len__(self) -> int:
        return len(self._found)

    def check(self) -> None:
        """Raise `LayoutError` with everything noted, in the order of the text; do nothing when there is nothing."""
        if self._found:
            heading = f"layout has {len(self)} fault{'s' * (len(self) != 1)}:"
            found = sorted(self._found, key=lambda fault: fault[0])
            raise LayoutError([f"{message}\n{self._quote(at)}" for at, message in found], heading=heading)

    def _quote(self, at: int) -> str:
        """Return the line and a caret under offset `at`; unprintable characters become blanks, long lines are cut."""
        start = max(0, at - 2 * _WINDOW // 3) if len(self.text) > _WINDOW else 0
        piece = "".join(c if c.isprintable() else " " for c in self.text[start : start + _WINDOW])
        before = "".join("\u3000" if unicodedata.east_asian_width(c) in "WF" else " " for c in piece[: at - start])
        left, right = ("…" if start else ""), ("…" if start + _WINDOW < len(self.text) else "")
        return f"    {left}{piece}{right}\n    {' ' * len(left)}{before}^"


def shorten(text: str, most: int) -> str:
    """Return `text`, cut to `most` characters for a message."""
    return text if len(text) <= most else text[:most] + "…"

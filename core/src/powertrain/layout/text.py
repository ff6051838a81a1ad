"""The text of a config string: its grammar as patterns, and the faults found in it; nothing here knows a backend.

`PART` and `SECTION` match any text, since each of their pieces may be absent: a fault never stops the reading, and
`powertrain.layout.check` says what is missing where.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from powertrain.errors import LayoutError

MAX_LENGTH: Final = 10_000
_WINDOW: Final = 110
_WORD: Final = r"[^\s:\[\]()|+?&=']"
_QUOTED: Final = r"'(?:[^']|'')*'?"
_BARE: Final = r"[^&|+\s']*"
_OPTION: Final = rf"\s*[\w.-]*(?:=(?:{_QUOTED}|{_BARE}))?\s*"
_DIMS: Final = r"(?:[^\W\d]+[0-9]*)*"

WORD: Final = re.compile(f"{_WORD}+")
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
AXIS: Final = re.compile(r"[^\W\d]+")
KEY: Final = re.compile(r"[\w.-]+")
DIM: Final = re.compile(r"([^\W\d]+)([0-9]*)")
OPTION: Final = re.compile(rf"[?&]\s*(?P<key>[\w.-]*)(?:=(?P<value>{_QUOTED}|{_BARE}))?\s*")
SECTION: Final = re.compile(rf"[(|]\s*(?P<section>{_WORD}*)\s*(?P<colon>:?)\s*(?P<dims>{_DIMS})\s*(?P<stray>[^|)]*)")
PART: Final = re.compile(
    rf"""
    \s* (?P<backend> {_WORD}* )
    \s* (?: \[ (?P<name> [^\[\]|+:?()]* ) (?P<name_end> \]? ) )?
    \s* (?P<colon> :? )
    \s* (?P<sizes> (?P<sections> \( [^()+?]* \)? ) | (?P<dims> (?: (?!via\b) {_DIMS} )? ) )
    \s* (?P<stray> (?: (?!via\b) [^|+?]+ )? )
    (?P<options> \? {_OPTION} (?: & {_OPTION} )* )?
    (?: via\b \s* (?P<via> {_WORD}* ) )?
    \s* (?P<rest> [^|+]* )
    """,
    re.VERBOSE,
)


def read(text: str, faults: Faults) -> list[list[re.Match[str]]]:
    """Return a match of `PART` for every part, group by group; empty parts are faults and left out.

    Raises `LayoutError` for a text that cannot be read at all.
    """
    if len(text) > MAX_LENGTH:
        faults.add(MAX_LENGTH, f"the layout has {len(text)} characters; the most allowed is {MAX_LENGTH}")
    elif half := re.search("[\ud800-\udfff]", text):
        faults.add(half.start(), f"character {half.group()!a} is half of a surrogate pair and cannot be written")
    elif not text.strip():
        faults.add(len(text), "the layout is empty; write for example 'BACKEND:d1'")
    faults.check()
    groups: list[list[re.Match[str]]] = [[]]
    start = 0
    while start <= len(text) and (found := PART.match(text, start)):
        end = found.end()
        if found.group().strip():
            groups[-1].append(found)
        else:
            beside = end if end < len(text) else start - 1
            faults.add(beside, f"a part is missing beside {text[beside]!r}")
        if text[end : end + 1] == "+":
            groups.append([])
        start = end + 1
    return groups


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

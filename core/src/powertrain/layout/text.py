"""The grammar of a config string as patterns; nothing here knows a backend.

`PART` and `SECTION` match any text, since each of their pieces may be absent: a fault never stops the reading, and
`powertrain.layout.written` says what is missing where.
"""

from __future__ import annotations

import re
from typing import Final

from powertrain.layout.faults import Faults

MAX_LENGTH: Final = 10_000
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

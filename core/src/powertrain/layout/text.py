"""Reads a config string into raw parts, each word with its offset, and collects every fault on the way.

Nothing here knows a backend: `powertrain.layout.check` gives the words their meaning. A fault never stops the
reading; what cannot be read is skipped up to the next place where something known can start.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import Final

from powertrain.errors import LayoutError
from powertrain.options import nearest

SECTIONS: Final = ("attn", "ffn")
WORD: Final = re.compile(r"[^\s:\[\]()|+?&=']+")
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
MAX_LENGTH: Final = 10_000
AXIS: Final = re.compile(r"[^\W\d]+")
KEY: Final = re.compile(r"[\w.-]+")
_DIM: Final = re.compile(AXIS.pattern.join("()") + r"([0-9]*)")
_BRACKET: Final = re.compile(r"\[([^\[\]|+:?()]*)(\]?)")
_QUOTED: Final = re.compile(r"'((?:[^']|'')*)'")
_BARE: Final = re.compile(r"[^&|+\s']*")
_VIA: Final = re.compile(r"via(?!\w)\s*")
_BLANK: Final = re.compile(r"\s*")
_WINDOW: Final = 110


@dataclass(frozen=True, slots=True)
class Word:
    """A piece of the config string and the offset at which it starts."""

    text: str
    at: int


@dataclass(frozen=True, slots=True)
class RawOption:
    """`key=value` as written; `quoted` tells `'null'` from `null`."""

    key: Word
    value: Word
    quoted: bool


@dataclass(slots=True)
class RawPart:
    """One part as written. sections: dims by section, `""` without brackets; a missing number is empty text.

    broken: something in it could not be read.

    missing: offset at which dims should have stood, or None.
    """

    at: int
    backend: Word
    name: Word | None = None
    sections: dict[str, list[tuple[Word, Word]]] = field(default_factory=dict)
    sections_at: dict[str, int] = field(default_factory=dict)
    options: list[RawOption] = field(default_factory=list)
    via: Word | None = None
    missing: int | None = None
    broken: bool = False


class Problems:
    """The faults found so far in one config string, each with its offset."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: list[tuple[int, str]] = []

    def add(self, at: int, message: str) -> None:
        """Note a fault at offset `at`; equal ones are kept once."""
        if (at, message) not in self._found:
            self._found.append((at, message))

    def __len__(self) -> int:
        return len(self._found)

    def check(self) -> None:
        """Raise `LayoutError` with everything noted, in the order of the text; do nothing when there is nothing."""
        if not self._found:
            return
        found = sorted(self._found, key=lambda item: item[0])
        count = "1 fault" if len(found) == 1 else f"{len(found)} faults"
        raise LayoutError([f"{message}\n{self._quote(at)}" for at, message in found], heading=f"layout has {count}:")

    def _quote(self, at: int) -> str:
        """Return the line and a caret under offset `at`; unprintable characters become blanks, long lines are cut."""
        start = max(0, at - 2 * _WINDOW // 3) if len(self.text) > _WINDOW else 0
        piece = "".join(c if c.isprintable() else " " for c in self.text[start : start + _WINDOW])
        before = "".join("\u3000" if unicodedata.east_asian_width(c) in "WF" else " " for c in piece[: at - start])
        left, right = ("…" if start else ""), ("…" if start + _WINDOW < len(self.text) else "")
        return f"    {left}{piece}{right}\n    {' ' * len(left)}{before}^"


def read(text: str, problems: Problems) -> list[list[RawPart]]:
    """Return the raw parts of `text`, group by group; faults go to `problems`."""
    if len(text) > MAX_LENGTH:
        problems.add(MAX_LENGTH, f"the layout has {len(text)} characters; the most allowed is {MAX_LENGTH}")
        return []
    bad = re.search("[\ud800-\udfff]", text)
    if bad:
        problems.add(
            bad.start(), f"character {bad.group()!a} is half of a surrogate pair and cannot be written anywhere"
        )
        return []
    groups = []
    for chunks in _split(text):
        parts = [_Reader(text, start, end, problems).part() for start, end in chunks]
        groups.append([part for part in parts if part is not None])
    return groups


def _split(text: str) -> list[list[tuple[int, int]]]:
    """Return (start, end) of every part: `+` ends a group, `|` a part, neither inside quotes, `|` not inside `( )`."""
    groups: list[list[tuple[int, int]]] = [[]]
    start = at = 0
    bracket = options = False
    while at < len(text):
        char = text[at]
        if char == "'" and options and text[at - 1] == "=":
            quoted = _QUOTED.match(text, at)
            at = quoted.end() if quoted else len(text)
            continue
        if char in "()" and not options:
            bracket = char == "("
        elif char == "?" and not bracket:
            options = True
        elif char == "+" or (char == "|" and not bracket):
            groups[-1].append((start, at))
            if char == "+":
                groups.append([])
            start, bracket, options = at + 1, False, False
        at += 1
    groups[-1].append((start, len(text)))
    return groups


class _Reader:
    """Reads the part that stands in `text[start:end]`."""

    def __init__(self, text: str, start: int, end: int, problems: Problems) -> None:
        self.text, self.start, self.end, self.problems = text, start, end, problems
        self.pos = start

    def part(self) -> RawPart | None:
        self._blank()
        if self.pos == self.end:
            at = self.end if self.end < len(self.text) or not self.start else self.start - 1
            whole = "the layout is empty; write for example 'BACKEND:d1'"
            self.problems.add(at, whole if not self.text.strip() else f"a part is missing beside {self.text[at]!r}")
            return None
        word = self._match(WORD)
        part = RawPart(self.pos, Word(word.group(), word.start()) if word else Word("", self.pos))
        if word is None:
            self.problems.add(self.pos, f"a backend's name is missing before {self.text[self.pos]!r}")
            part.broken = True
        else:
            self.pos = word.end()
        self._name(part)
        if self._take(":"):
            self._blank()
            if self._peek() == "(":
                self._sections(part)
            else:
                part.sections_at[""] = self.pos
                part.sections[""] = self._dims(part)
        else:
            part.missing, part.broken = self.pos, True
            self.pos = self._next("?")
        self._rest("?", part)
        if self._take("?"):
            self._options(part)
        self._via(part)
        self._rest("", part)
        return part

    def _blank(self) -> None:
        found = _BLANK.match(self.text, self.pos, self.end)
        self.pos = found.end() if found else self.pos

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self.text, self.pos, self.end)

    def _peek(self) -> str:
        return self.text[self.pos : min(self.pos + 1, self.end)]

    def _take(self, char: str) -> bool:
        self._blank()
        found = self._peek() == char
        self.pos += found
        return found

    def _rest(self, stops: str, part: RawPart) -> None:
        """Complain about what stands before the next of `stops`, the word `via` or the end, and skip it."""
        self._blank()
        if self.pos == self.end or self._peek() in [*stops] or (stops == "?" and self._match(_VIA)):
            return
        piece = self.text[self.pos : self.end].strip()
        self.problems.add(self.pos, f"unexpected {piece if len(piece) <= 20 else piece[:20] + '…'!r}")
        part.broken = True
        self.pos = self._next(stops)

    def _next(self, stops: str) -> int:
        """Return the offset of the next of `stops`, or the part's end."""
        places = [self.text.find(stop, self.pos, self.end) for stop in stops]
        return min((place for place in places if place >= 0), default=self.end)

    def _name(self, part: RawPart) -> None:
        self._blank()
        found = self._match(_BRACKET)
        if found is None:
            return
        name = found.group(1).strip()
        if not found.group(2):
            self.problems.add(self.pos, "bracket '[' is not closed")
            part.broken = True
        elif not NAME.fullmatch(name):
            message = f"{name!r} cannot be a name: it takes letters, digits, '_', '.', '-' and starts with a letter"
            self.problems.add(self.pos + 1, message)
        part.name = Word(name, self.pos + 1)
        self.pos = found.end()

    def _dims(self, part: RawPart) -> list[tuple[Word, Word]]:
        dims = []
        begin = self.pos
        while found := self._match(_DIM):
            self.pos = found.end()
            if found.group() == "via" and begin == found.start():
                self.pos = begin
                break
            dims.append((Word(found.group(1), found.start()), Word(found.group(2), found.start(2))))
        if self.pos == begin:
            part.missing, part.broken = begin, True
        return dims

    def _sections(self, part: RawPart) -> None:
        opened = self.pos
        self.pos += 1
        while True:
            self._blank()
            word, at = self._match(WORD), self.pos
            name = word.group() if word else ""
            self.pos += len(name)
            if name not in SECTIONS:
                self.problems.add(at, f"unknown section {name!r}{nearest(name, SECTIONS)}; there are attn and ffn")
            elif name in part.sections:
                self.problems.add(at, f"section {name!r} stands there twice")
            part.broken |= name not in SECTIONS or name in part.sections
            if self._take(":"):
                self._blank()
                part.sections[name], part.sections_at[name] = self._dims(part), at
            else:
                part.sections[name], part.sections_at[name], part.missing, part.broken = [], at, self.pos, True
            self._blank()
            if self._peek() not in ("|", ")", ""):
                self._rest("|)", part)
            if not self._take("|"):
                break
        if not self._take(")"):
            self.problems.add(opened, "bracket '(' is not closed")
            part.broken = True
        lacking = [name for name in SECTIONS if name not in part.sections]
        if lacking and not part.broken:
            self.problems.add(opened, f"section {lacking[0]!r} is missing; write '(attn:…|ffn:…)'")
            part.broken = True

    def _options(self, part: RawPart) -> None:
        while True:
            self._blank()
            key = self._match(KEY)
            if key is None:
                self.problems.add(self.pos, "an option is missing here; write 'name=value'")
                return
            self.pos = key.end()
            if self._peek() != "=":
                self.problems.add(self.pos, f"option {key.group()!r} has no value; write '{key.group()}=value'")
            else:
                self.pos += 1
                value = self._value()
                if value:
                    part.options.append(RawOption(Word(key.group(), key.start()), *value))
            if not self._take("&"):
                return

    def _value(self) -> tuple[Word, bool] | None:
        at = self.pos
        if self._peek() == "'":
            found = self._match(_QUOTED)
            if found is None:
                self.problems.add(at, "quote ' is not closed; a ' inside quotes is written ''")
                self.pos = self.end
                return None
            self.pos = found.end()
            return Word(found.group(1).replace("''", "'"), at), True
        found = self._match(_BARE)
        value = found.group() if found else ""
        self.pos += len(value)
        if not value:
            self.problems.add(at, "a value is missing; an empty one is written ''")
            return None
        return Word(value, at), False

    def _via(self, part: RawPart) -> None:
        self._blank()
        found = self._match(_VIA)
        if found is None:
            return
        self.pos = found.end()
        name = self._match(WORD)
        if name is None:
            self.problems.add(self.pos, "a transfer's name is missing after 'via'")
            return
        part.via = Word(name.group(), name.start())
        self.pos = name.end()

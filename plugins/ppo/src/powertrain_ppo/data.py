"""Prompts: where they come from, which are held out, and in which order they are trained on.

A record is a mapping with a `prompt` (text, or chat messages as a list of {"role", "content"}) and whatever its
reward needs beside. Rows with the same `key` (the prompt where a record has none) are never split. A data function
returns a list of records, or {"train": [...], "held_out": [...]}.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powertrain.errors import ConfigError
from powertrain.options import nearest
from powertrain_ppo.references import check_keywords, load_function, no_file, place_of, raised

Record = Mapping[str, Any]

SIDES: Final = ("train", "held_out")


@dataclass(frozen=True)
class Data:
    """Training and held-out records; no key (the prompt where a record has none) is in both."""

    train: Sequence[Record]
    held_out: Sequence[Record]

    def batch(self, step: int, size: int, seed: int) -> list[tuple[int, Record]]:
        """Return (position, record) of the step's prompts; step 1 is the first.

        Positions count prompts from the run's start; every epoch is a permutation of its own, so a resumed run needs
        nothing but the step's number.
        """
        rows = len(self.train)
        positions = range((step - 1) * size, step * size)
        orders = {epoch: _order(rows, epoch, seed) for epoch in {position // rows for position in positions}}
        return [(position, self.train[orders[position // rows][position % rows]]) for position in positions]


def _order(rows: int, epoch: int, seed: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"powertrain order {seed} {epoch}").shuffle(order)
    return order


def load_data(options: Mapping[str, Any], *, seed: int, path: Callable[[str], Path]) -> Data:
    """Load and split the recipe's data.

    options: the recipe's (`data`, `data_options`, `held_out`). Held-out rows are drawn by `seed` unless the data
    brings its own. Rows with the same prompt always fall on the same side. ConfigError for unusable data.
    """
    name = options["data"]
    if ":" in name and Path(name).suffix != ".jsonl":
        found = _called(name, options["data_options"], path)
    else:
        found = _read_jsonl(name, path)
        if given := options["data_options"]:
            message = f"ppo.data_options is {given!r}, which a file cannot take: ppo.data is {name!r}, not a function"
            raise ConfigError(message)
    if isinstance(found, Mapping):
        data = Data(*(_records(found.get(side, []), name, f"{side} row") for side in SIDES))
        both = {_key(row) for row in data.train} & {_key(row) for row in data.held_out}
        if both:
            message = (
                f"ppo.data {name!r}: {len(both)} prompts are in train and in held_out, such as {sorted(both)[0][:80]!r}"
            )
            raise ConfigError(message)
    else:
        data = split(found, options["held_out"], seed)
    if not data.train:
        held = len(data.held_out)
        message = (
            f"ppo.data {name!r}: {held} rows are held out (ppo.held_out is {options['held_out']}), "
            "none is left to train on"
            if held
            else f"ppo.data {name!r} gives no rows; there must be one at least to train on"
        )
        raise ConfigError(message)
    return data


def _called(name: str, given: Mapping[str, Any], path: Callable[[str], Path]) -> Any:
    """Return what the data function gives: checked records, or a mapping of both sides; ConfigError if it fails."""
    what = "ppo.data"
    function = load_function(name, what=what, path=path)
    check_keywords(function, name, given, what=what, option="data_options")
    try:
        found = function(**given)
        if isinstance(found, Iterable) and not isinstance(found, Mapping | str | bytes):
            found = list(found)
    except (Exception, SystemExit) as exc:  # a user's function may raise anything
        message = f"{what} {name!r} raised {raised(exc)}"
        raise ConfigError(message) from exc
    if not isinstance(found, Mapping):
        return _records(found, name, "row", place_of(function))
    wrong = [key for key in found if key not in SIDES]
    if wrong:
        hint = nearest(str(wrong[0]), SIDES)
        message = f"{what} {name!r} returned a mapping with the key {wrong[0]!r}{hint}; it takes {' and '.join(SIDES)}"
        raise ConfigError(message)
    return found


def split(rows: Sequence[Record], held_out: int, seed: int) -> Data:
    """Hold out `held_out` rows, a few more where rows share a prompt or key; those stay together."""
    by_prompt: dict[str, list[Record]] = {}
    for row in rows:
        by_prompt.setdefault(_key(row), []).append(row)
    keys = list(by_prompt)
    random.Random(f"powertrain split {seed}").shuffle(keys)
    kept: list[Record] = []
    while keys and len(kept) < held_out:
        kept += by_prompt.pop(keys.pop())
    left = {id(row) for group in by_prompt.values() for row in group}
    return Data([row for row in rows if id(row) in left], kept)


def _key(row: Record) -> str:
    """Return what makes two rows the same for the split."""
    prompt = row.get("key", row["prompt"])
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=repr)


def _records(rows: Any, name: str, each: str, place: str = "") -> list[Record]:
    """Return a function's rows, checked; each: what one is called in messages, where they count from 1."""
    if not isinstance(rows, list | tuple):
        kind = f"ppo.data {name!r} returned {type(rows).__name__}{f' ({place})' if place else f' as {each}s'}"
        message = f'{kind}; it must return a list of records, or {{"train": [...], "held_out": [...]}} of such lists'
        raise ConfigError(message)
    return [_record(row, f"ppo.data {name!r}: {each} {number}") for number, row in enumerate(rows, start=1)]


def _record(row: Any, which: str) -> Record:
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    chat = isinstance(prompt, list) and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in prompt)
    if not prompt or not (chat or isinstance(prompt, str)):
        message = f"{which} has no `prompt` (text, or messages with role and content): {str(row)[:120]}"
        raise ConfigError(message)
    return dict(row)  # a row given twice becomes two, so that each has an identity


def _read_jsonl(name: str, path: Callable[[str], Path]) -> list[Record]:
    """Return the records of a JSONL file; messages count lines from 1."""
    try:
        file = path(name)
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as exc:
        module = name.replace(".", "").replace("_", "").isalnum() and "/" not in name
        hint = f"; a function is named {f'{name}:FUNCTION'!r}" if module and not name.endswith("jsonl") else ""
        message = f"ppo.data: {no_file(file)}{hint}"
        raise ConfigError(message) from exc
    except UnicodeDecodeError as exc:
        message = f"ppo.data: {str(file)!r} is not UTF-8 (byte {exc.start}: {exc.reason}); save it as UTF-8"
        raise ConfigError(message) from exc
    except OSError as exc:
        message = f"ppo.data: {str(file)!r} cannot be read: {exc.strerror}"
        raise ConfigError(message) from exc
    except ValueError as exc:
        message = f"ppo.data: {name!r} is no path of a file: {exc}"
        raise ConfigError(message) from exc
    if name.endswith(".py"):
        message = f"ppo.data {name!r} is a Python file; name the function in it: {f'{name}:FUNCTION'!r}"
        raise ConfigError(message)
    rows = []
    # Not splitlines: JSON text may hold other line separators as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as exc:
                message = f"ppo.data: line {number} of {str(file)!r} is not JSON: {line[:80]!r}"
                raise ConfigError(message) from exc
            rows.append(_record(row, f"ppo.data: line {number} of {str(file)!r}"))
    if not rows:
        message = f"ppo.data: {str(file)!r} is empty; it must hold a JSON object a line, with a `prompt`"
        raise ConfigError(message)
    return rows

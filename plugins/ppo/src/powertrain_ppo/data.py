"""Prompts: where they come from, which are held out, and in which order they are trained on.

A record is a mapping with a `prompt` (text, or chat messages as a list of {"role", "content"}) and whatever its
reward needs beside. Rows with the same `key` (the prompt where a record has none) are never split. A data function
returns a list of records, or {"train": [...], "held_out": [...]}.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.errors import ConfigError
from powertrain_ppo.references import load_function

Record = Mapping[str, Any]


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
        function = load_function(name, what="data", path=path)
        try:
            found = function(**options["data_options"])
        except TypeError as exc:
            message = f"data {name!r} does not take data_options {options['data_options']!r}: {exc}"
            raise ConfigError(message) from exc
    else:
        found = _read_jsonl(path(name))
    if isinstance(found, Mapping):
        data = Data(_checked(found.get("train", ()), name), _checked(found.get("held_out", ()), name))
        both = {_key(row) for row in data.train} & {_key(row) for row in data.held_out}
        if both:
            message = (
                f"data {name!r}: {len(both)} prompts are in train and in held_out, such as {sorted(both)[0][:80]!r}"
            )
            raise ConfigError(message)
    else:
        data = split(_checked(found, name), options["held_out"], seed)
    if not data.train:
        held = len(data.held_out)
        message = f"data {name!r}: {held} rows are held out ({options['held_out']} asked for), none is left to train on"
        raise ConfigError(message)
    return data


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
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def _checked(rows: Any, name: str) -> list[Record]:
    checked: list[Record] = []
    for number, row in enumerate(rows):
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        chat = isinstance(prompt, list) and all(
            isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in prompt
        )
        if not prompt or not (chat or isinstance(prompt, str)):
            shown = str(row)[:120]
            message = f"data {name!r}: row {number} has no `prompt` (text, or messages with role and content): {shown}"
            raise ConfigError(message)
        checked.append(dict(row))  # a row given twice becomes two, so that each has an identity
    return checked


def _read_jsonl(file: Path) -> list[Any]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        message = f"data: {str(file)!r} cannot be read: {exc}; a relative path is read from the recipe file's folder"
        raise ConfigError(message) from exc
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as exc:
                message = f"data: line {number} of {str(file)!r} is not JSON: {line[:80]!r}"
                raise ConfigError(message) from exc
    return rows

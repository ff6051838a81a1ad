"""Manifests: which part of which tensor one rank holds, and where in its memory it lies.

A layout that nobody thought of is still a list of boxes, so nothing here knows a layout by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from math import prod
from typing import Any, Final

from powertrain.errors import ConfigError
from powertrain.interfaces.wire import record

_DTYPES: Final = {
    8: ("float64", "int64"),
    4: ("float32", "int32"),
    2: ("bfloat16", "float16", "int16"),
    1: ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"),
}
ITEM_SIZE: Final[Mapping[str, int]] = {name: size for size, names in _DTYPES.items() for name in names}
"""Bytes of one element by torch's dtype name."""
FLOATS: Final = ("float64", "float32", "bfloat16", "float16")
"""Dtypes between which core's own sinks cast by themselves."""


@record(kw_only=False)
class Box:
    """A block of a global tensor and its place in a rank's memory.

    start/size: the half-open range start[i] .. start[i] + size[i] of the global tensor, one number a dimension.
    storage: which of the rank's storages (`WeightSource.tensors()`). offset: elements from the storage's first one.
    stride: elements from one index to the next in each dimension, as torch counts them.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    storage: str
    offset: int
    stride: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements in the box (1 for a scalar)."""
        return prod(self.size)

    def place(self, start: tuple[int, ...]) -> int:
        """Return the storage offset of the element at global index `start`, which must lie in the box."""
        return self.offset + sum(
            (s - mine) * stride for s, mine, stride in zip(start, self.start, self.stride, strict=True)
        )


@record(kw_only=False)
class Entry:
    """One tensor by its canonical HF name.

    dtype: torch's name ("bfloat16"). shape: of the whole tensor. boxes: what this rank holds of it, disjoint; empty
    when another rank holds all. accepts: other dtypes that a sink converts from by itself. frozen: a sink's tensor that
    needs no update when the sender does not have it.

    transform: what the sink does to arriving values beside a plain cast, by a name of its own ("fp8_block"). One name
    has a meaning here: "transpose", for a tensor that the sink sees with its dimensions in reverse order; ranges arrive
    as the sender counts them. (A tensor that only lies transposed in memory needs none: that is a box's stride.)
    scales: what the transform makes beside this tensor, named by the last part ("weight_scale_inv"): tensors that must
    arrive when this one arrives as `dtype`, and must not when it is converted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    accepts: tuple[str, ...] = ()
    frozen: bool = False
    transform: str = ""
    scales: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZE:
            message = (
                f"tensor {self.name!r} has dtype {self.dtype!r}, unknown to transfers; known: {', '.join(ITEM_SIZE)}"
            )
            raise ConfigError(message)


@record(kw_only=False)
class Manifest:
    """All that one rank holds (source) or wants (sink).

    entries: in a fixed order, equal on all ranks of an engine, names unique. tied: alias -> name of the entry that
    it shares its storage with; a tied weight travels once. kind: "full", or "adapter" for LoRA tensors alone.
    """

    rank: int
    world: int
    entries: tuple[Entry, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    kind: str = "full"
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            message = f"manifest of rank {self.rank} lists {', '.join(twice)} more than once"
            raise ConfigError(message)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def by_name(self) -> dict[str, Entry]:
        """Return the entries by name."""
        return {entry.name: entry for entry in self.entries}

"""A whole engine's weights in short: how a tensor lies over the ranks is a pattern that many tensors share.

A model has tens of thousands of tensors and few ways in which they are cut, so static manifests are made of patterns,
plans are worked out once for each, and a single rank's `Manifest` is drawn from them when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from powertrain.interfaces.wire import record
from powertrain.weights.boxes import Box, Entry, Manifest
from powertrain.weights.ranges import Range, left_of, text, twice

_PLACE: Final = attrgetter("start", "size", "offset", "stride")
_WHOLE: Final = attrgetter("start", "size", "offset", "stride", "storage")
Held = tuple[tuple[int, ...], tuple[Box, ...]]
"""Ranks, and the boxes that each of them holds. In a pattern, `Box.storage` follows on the tensor's own `storage`."""


@record(kw_only=False)
class Pattern:
    """How tensors of one dtype and shape lie over an engine's ranks; makers give equal tensors the same object.

    entry: all else that is said of them, without name and boxes. held: ranks that hold nothing are left out.
    """

    entry: Entry
    held: tuple[Held, ...]

    def ranges(self) -> Iterator[tuple[tuple[int, ...], list[Range]]]:
        """Yield ranks and the ranges that each holds, as the sender counts them."""
        turn = -1 if self.entry.transform == "transpose" else 1
        for ranks, boxes in self.held:
            yield ranks, [(box.start[::turn], box.size[::turn]) for box in boxes if box.elements]

    def faults(self, side: str) -> Iterator[str]:
        """Yield what is wrong with the boxes themselves, each to be read behind the tensor's name. side: for words."""
        shape = self.entry.shape
        for (rank, *_), boxes in self.held:
            places = [(box.start, box.size) for box in boxes if box.elements]
            if other := [box for box in boxes if {*map(len, (box.start, box.size, box.stride))} != {len(shape)}]:
                yield f" has shape {list(shape)} and at {side} rank {rank} a box {list(other[0].size)} in it"
                return
            for part in (part for place in places for part in left_of(place, [((0,) * len(shape), shape)])):
                yield f"{text(part)} of {side} rank {rank} lies outside of shape {list(shape)}"
            yield from (f"{text(part)} is held twice by {side} rank {rank}" for part in twice(places))


class Tensor(NamedTuple):
    """One tensor of an engine. On a rank, a box of its pattern lies in `storage` + its own, from `base` + its own."""

    name: str
    pattern: Pattern
    storage: str = ""
    base: int = 0

    def box(self, box: Box) -> Box:
        """Return a box of the pattern as it is for this tensor."""
        return Box(box.start, box.size, self.storage + box.storage, self.base + box.offset, box.stride)


@dataclass(frozen=True, eq=False)
class EngineManifest:
    """The manifests of all ranks of one engine; fields as in `Manifest`, tensors in the same fixed order.

    A backend's `manifest` function returns one for a model's config and a part of a layout, before anything runs.
    """

    world: int
    tensors: Sequence[Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    kind: str = "full"

    def rank(self, rank: int) -> Manifest:
        """Return the manifest of one rank."""
        entries = []
        for tensor in self.tensors:
            mine = [tensor.box(box) for ranks, boxes in tensor.pattern.held if rank in ranks for box in boxes]
            entries.append(replace(tensor.pattern.entry, name=tensor.name, boxes=tuple(mine)))
        return Manifest(rank, self.world, tuple(entries), self.tied, self.kind)

    @classmethod
    def of(cls, manifests: Sequence[Manifest], side: str, problems: list[str]) -> EngineManifest:
        """Put the manifests of an engine's ranks together; ranks that list other tensors are added to `problems`."""
        first = [_facts(entry) for entry in manifests[0]]
        problems += [
            f"{side} rank {one.rank} lists other tensors, shapes or dtypes than rank {manifests[0].rank}"
            for one in manifests[1:]
            if [_facts(entry) for entry in one] != first
        ]
        numbers = range(len(manifests)) if side == "sink" else [one.rank for one in manifests]
        held: dict[str, dict[tuple[Box, ...], list[int]]] = {entry.name: {} for entry in manifests[0]}
        for number, one in zip(numbers, manifests, strict=True):
            for entry in one:
                if entry.boxes and entry.name in held:
                    held[entry.name].setdefault(entry.boxes, []).append(number)
        made: dict[tuple[Any, ...], Pattern] = {}
        tensors = []
        for entry in manifests[0]:
            places = [(tuple(ranks), boxes) for boxes, ranks in held[entry.name].items()]
            storages = {box.storage for _, boxes in places for box in boxes}
            own = storages.pop() if len(storages) == 1 else ""  # a name of its own would keep tensors from being alike
            facts = entry.dtype, entry.shape, entry.accepts, entry.frozen, entry.transform, entry.scales
            key = facts, own == "", *((ranks, *map(_PLACE if own else _WHOLE, boxes)) for ranks, boxes in places)
            if key not in made:
                alike = [(r, tuple(replace(b, storage="") if own else b for b in boxes)) for r, boxes in places]
                made[key] = Pattern(replace(entry, name="", boxes=()), tuple(alike))
            tensors.append(Tensor(entry.name, made[key], own))
        return cls(len(manifests), tensors, manifests[0].tied, manifests[0].kind)


def _facts(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
    return entry.name, entry.dtype, entry.shape

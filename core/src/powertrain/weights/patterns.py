"""A whole engine's weights in short: how a tensor lies over the ranks is a pattern that many tensors share.

A model has tens of thousands of tensors and few ways in which they are cut, so static manifests are made of patterns,
plans are worked out once for each, and a single rank's `Manifest` is drawn from them when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from powertrain.interfaces.wire import record
from powertrain.weights.boxes import Box, Entry, Manifest
from powertrain.weights.ranges import Range, left_of, text, twice

_MORE: Final = ("accepts", "frozen", "transform", "scales")
Held = tuple[tuple[int, ...], tuple[Box, ...]]
"""Ranks, and the boxes that each of them holds. In a pattern, `Box.storage` follows on the tensor's own `storage`."""


@record()
class Pattern:
    """How tensors of one dtype and shape lie over an engine's ranks; the other fields are those of `Entry`.

    held: ranks that hold nothing are left out. Makers give equal tensors the same object.
    """

    dtype: str
    shape: tuple[int, ...]
    held: tuple[Held, ...]
    accepts: tuple[str, ...] = ()
    frozen: bool = False
    transform: str = ""
    scales: tuple[str, ...] = ()

    def ranges(self, *, sent: bool = False) -> Iterator[tuple[tuple[int, ...], list[Range]]]:
        """Yield ranks and the ranges that each holds; sent: as the sender counts them."""
        turn = -1 if sent and self.transform == "transpose" else 1
        for ranks, boxes in self.held:
            yield ranks, [(box.start[::turn], box.size[::turn]) for box in boxes if box.elements]

    def faults(self, side: str) -> list[str]:
        """Return what is wrong with the boxes themselves, each to be read behind the tensor's name. side: for words."""
        whole: Range = ((0,) * len(self.shape), self.shape)
        found = []
        for ranks, boxes in self.held:
            for box in boxes:
                if not len(self.shape) == len(box.start) == len(box.size) == len(box.stride):
                    return [f" has shape {list(self.shape)} and at {side} rank {ranks[0]} a box {list(box.size)} in it"]
                beyond = [part for part in left_of((box.start, box.size), [whole]) if prod(part[1])]
                where = f"of {side} rank {ranks[0]} lies outside of shape {list(self.shape)}"
                found += [f"{text(part)} {where}" for part in beyond]
            places = [(box.start, box.size) for box in boxes if box.elements]
            found += [f"{text(part)} is held twice by {side} rank {ranks[0]}" for part in twice(places)]
        return found


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
            pattern = tensor.pattern
            mine = [box for ranks, boxes in pattern.held if rank in ranks for box in boxes]
            more: dict[str, Any] = {name: getattr(pattern, name) for name in _MORE}
            entries.append(Entry(tensor.name, pattern.dtype, pattern.shape, tuple(map(tensor.box, mine)), **more))
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
        tensors: list[Tensor] = []
        made: dict[Pattern, Pattern] = {}
        for entry in manifests[0]:
            places = tuple((tuple(ranks), boxes) for boxes, ranks in held[entry.name].items())
            facts: dict[str, Any] = {name: getattr(entry, name) for name in ("dtype", "shape", *_MORE)}
            pattern = Pattern(held=places, **facts)
            tensors.append(Tensor(entry.name, made.setdefault(pattern, pattern)))
        return cls(len(manifests), tensors, manifests[0].tied, manifests[0].kind)


def _facts(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
    return entry.name, entry.dtype, entry.shape

"""Boxes of one rank that lie in the same memory: what one tensor writes there is overwritten by another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from powertrain.weights.boxes import Box

Named = tuple[str, Box]
"""A tensor's name and one of its boxes."""


def shared(boxes: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """Yield each two that have an element of a storage in common."""
    storages: dict[str, list[tuple[int, int, Named]]] = {}
    for name, box in boxes:
        if box.elements:
            last = box.offset + sum((n - 1) * stride for n, stride in zip(box.size, box.stride, strict=True))
            storages.setdefault(box.storage, []).append((box.offset, last, (name, box)))
    for spans in storages.values():
        before: list[tuple[int, Named]] = []
        for first, last, named in sorted(spans, key=lambda span: span[:2]):
            before = [one for one in before if one[0] >= first]
            yield from ((other, named) for _, other in before if _meet(other[1], named[1]))
            before.append((last, named))


def _meet(one: Box, other: Box) -> bool:
    """Compare the runs of neighbouring elements that two boxes are made of; their spans are known to overlap."""
    import numpy as np

    (starts, run), (others, length) = _runs(one), _runs(other)
    before = np.searchsorted(others, starts + run) - 1  # the last of the others that begins before a run ends
    return bool(((before >= 0) & (others[before] + length > starts)).any())


def _runs(box: Box) -> tuple[Any, int]:
    """Return where runs of neighbouring elements begin, in order, and how long each is."""
    import numpy as np

    starts, run = np.array([box.offset]), 1
    for stride, n in sorted(zip(box.stride, box.size, strict=True)):
        if stride == run:
            run *= n
        else:
            starts = np.add.outer(starts, stride * np.arange(n)).reshape(-1)
    return np.sort(starts), run

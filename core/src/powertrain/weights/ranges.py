"""Ranges of global tensors: what two have in common, what is left of one, and cutting one into bounded pieces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from math import prod

Range = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, size) of a block of a global tensor."""


def text(place: Range) -> str:
    """Return a range as it stands behind a tensor's name, such as "[0:4, 2:3]"."""
    return "[" + ", ".join(f"{s}:{s + n}" for s, n in zip(*place, strict=True)) + "]"


def overlap(a: Range, b: Range) -> Range | None:
    """Return what two ranges have in common, or None."""
    start = tuple(map(max, a[0], b[0]))
    size = tuple(min(s + n, t + m) - at for s, n, t, m, at in zip(*a, *b, start, strict=True))
    return (start, size) if all(n > 0 for n in size) else None


class Index:
    """Ranges of one tensor, to be asked which of them have something in common with another.

    They are kept in order along the axis on which they start at the most different places, so that a tensor that a
    thousand ranks have in slices is not searched through for each slice of the other side.
    """

    def __init__(self, places: Sequence[Range]) -> None:
        starts = [set(axis) for axis in zip(*(start for start, _ in places), strict=True)] or [set()]
        self._axis = axis = max(range(len(starts)), key=lambda axis: len(starts[axis]))
        # A scalar's range is (), which stands at 0 of an axis of its own.
        spans = sorted((*place[0][axis : axis + 1], 0, i) for i, place in enumerate(places))
        self._starts = [span[0] for span in spans]
        self._order = [span[-1] for span in spans]
        self._longest = max((size[axis] for _, size in places if size), default=1)
        self._places = places

    def common(self, place: Range) -> Iterator[tuple[int, Range]]:
        """Yield (number of a range, what it has in common with `place`) in the order of the numbers."""
        at, size = (place[0][self._axis], place[1][self._axis]) if place[0] else (0, 1)
        first, last = bisect_right(self._starts, at - self._longest), bisect_left(self._starts, at + size)
        for i in sorted(self._order[first:last]):
            if part := overlap(self._places[i], place):
                yield i, part


def twice(places: Sequence[Range]) -> Iterator[Range]:
    """Yield what two of the ranges have in common, for each two that have."""
    index = Index(places)
    yield from (part for i, place in enumerate(places) for j, part in index.common(place) if j < i)


def left_of(whole: Range, parts: Sequence[Range]) -> list[Range]:
    """Return the disjoint ranges of `whole` that no part covers."""
    left = [whole]
    for part in parts:
        left = [piece for rest in left for piece in _minus(rest, part)]
    return left


def _minus(whole: Range, part: Range) -> Iterator[Range]:
    common = overlap(whole, part)
    if common is None:
        yield whole
        return
    start, size = list(whole[0]), list(whole[1])
    for axis, (at, n) in enumerate(zip(*common, strict=True)):
        before, after = at - start[axis], start[axis] + size[axis] - at - n
        if before:
            yield tuple(start), (*size[:axis], before, *size[axis + 1 :])
        if after:
            yield (*start[:axis], at + n, *start[axis + 1 :]), (*size[:axis], after, *size[axis + 1 :])
        start[axis], size[axis] = at, n


def split(place: Range, most: int) -> Iterator[Range]:
    """Cut a range into row blocks of at most `most` elements; a row that is bigger is cut along the next dimension."""
    start, size = place
    if prod(size) <= most:
        yield place
        return
    axis = next(i for i, n in enumerate(size) if n > 1)
    step = max(1, most // prod(size[axis + 1 :]))
    for at in range(0, size[axis], step):
        n = min(step, size[axis] - at)
        yield from split(
            ((*start[:axis], start[axis] + at, *start[axis + 1 :]), (*size[:axis], n, *size[axis + 1 :])), most
        )

"""Ranges of global tensors: what two have in common, what is left of one, and cutting one into bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Range = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, size) of a block of a global tensor."""


def overlap(a: Range, b: Range) -> Range | None:
    """Return what two ranges have in common, or None."""
    start = tuple(map(max, a[0], b[0]))
    size = tuple(min(s + n, t + m) - at for s, n, t, m, at in zip(*a, *b, start, strict=True))
    return (start, size) if all(n > 0 for n in size) else None


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

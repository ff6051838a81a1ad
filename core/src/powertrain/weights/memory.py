"""Boxes of one rank that lie in the same memory: what is written there by one tensor is overwritten by another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from powertrain.weights.boxes import Box


class _Span(NamedTuple):
    """Elements of a storage: those at `first` plus any index times its stride, largest stride first."""

    first: int
    dims: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        return self.first + sum((n - 1) * stride for stride, n in self.dims)

    def halves(self) -> tuple[_Span, _Span] | None:
        """Return both halves of the span, or None where no element between its first and last one is left out."""
        (stride, n), rest = self.dims[0], self.dims[1:]
        inner = _Span(self.first, rest).last + 1 - self.first
        if stride <= inner and (not rest or _Span(self.first, rest).halves() is None):
            return None
        below = n // 2
        cuts = ((self.first, below), (self.first + below * stride, n - below))
        one, other = (_Span(at, ((stride, k), *rest) if k > 1 else rest or ((1, 1),)) for at, k in cuts)
        return one, other


def _span(box: Box) -> _Span:
    dims = sorted(((stride, n) for stride, n in zip(box.stride, box.size, strict=True) if n > 1), reverse=True)
    return _Span(box.offset, tuple(dims) or ((1, 1),))


def _meet(a: _Span, b: _Span) -> bool:
    if a.last < b.first or b.last < a.first:
        return False
    if a.last - a.first < b.last - b.first:
        a, b = b, a
    halves = a.halves()
    if halves is None and (halves := b.halves()) is None:
        return True
    other = b if a.halves() is not None else a
    return any(_meet(half, other) for half in halves)


def shared(boxes: Iterable[tuple[str, Box]]) -> Iterator[tuple[tuple[str, Box], tuple[str, Box]]]:
    """Yield each two of the (tensor's name, box) pairs that have an element of a storage in common."""
    storages: dict[str, list[tuple[_Span, tuple[str, Box]]]] = {}
    for name, box in boxes:
        if box.elements:
            storages.setdefault(box.storage, []).append((_span(box), (name, box)))
    for held in storages.values():
        held.sort(key=lambda one: one[0])
        open_: list[tuple[_Span, tuple[str, Box]]] = []
        for span, named in held:
            open_ = [other for other in open_ if other[0].last >= span.first]
            yield from ((before, named) for other, before in open_ if _meet(other, span))
            open_.append((span, named))

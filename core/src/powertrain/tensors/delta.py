"""What has changed between two states of the same bytes: found bit by bit, written compactly, and put in place again.

Elements are compared as whole numbers of their own width, so that -0.0 and 0.0, and two NaN of different payloads, are
different: what is patched equals what was encoded in every bit. Bytes are cut into parts of at most `PART` elements,
and each part is written in the smallest of four ways: nothing (no element changed), the places and values of those that
changed, a bit for every element and the values of those that changed, or all elements.

A part begins with two int64: its way, and how many elements changed. All that follows is padded to 8 bytes. Places are
16 bits each, within chunks of `CHUNK` elements, behind an int32 for each chunk: how many are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Final, NoReturn

import torch

from powertrain.errors import TransferError

CHUNK: Final = 1 << 16
"""Elements that a place of 16 bits reaches."""
PART: Final = 1 << 22
"""Most elements of a part; what is worked out for it is bounded by that, however big a message is."""
WORTH: Final = 0.8
"""Changes that take more than this share of all bytes are not worth their way: all bytes go instead."""
Spans = Sequence[tuple[int, int]]
"""Bytes that follow on one another, as (bytes of an element, bytes); those of larger elements come first."""

_HEAD: Final = 16
_NONE, _PLACES, _BITS, _ALL = range(4)
_INTS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GATHER: Final = 0x0102040810204080
"""Eight bytes of 0 or 1, as an int64, times this: their bits in the highest byte, the first one's highest."""


def spans(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (bytes of an element, bytes) pairs with neighbours of equal elements put together."""
    found: list[tuple[int, int]] = []
    for item, count in sizes:
        found[-1:] = [(item, found[-1][1] + count)] if found and found[-1][0] == item else [*found[-1:], (item, count)]
    return found


def encode(new: torch.Tensor, old: torch.Tensor, layout: Spans) -> tuple[torch.Tensor | None, int]:
    """Return what turns `old` into `new`, None where that is no saving, and how many elements differ.

    new/old: flat uint8 on one device, of the bytes that `layout` says; the answer lies there too.
    """
    pieces: list[torch.Tensor] = []
    changed = 0
    for mine, theirs in zip(_parts(new, layout), _parts(old, layout), strict=True):
        made, count = _encoded(mine, theirs)
        pieces += made
        changed += count
    if sum(piece.numel() for piece in pieces) > WORTH * new.numel():
        return None, changed
    return torch.cat(pieces), changed


def patch(old: torch.Tensor, data: torch.Tensor, layout: Spans) -> None:
    """Change `old` in place into what `data` was encoded from; TransferError where the data cannot be that."""
    for (where, values), part in zip(changes(data, layout), _parts(old, layout), strict=True):
        if where is None:
            part.copy_(values)
        elif where.dtype == torch.bool:
            part.masked_scatter_(where, values)
        else:
            part[where] = values


def patch_range(
    old: torch.Tensor, data: torch.Tensor, item: int, block: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> None:
    """As `patch`, for `old` that holds the range (start, size) of a block, of which all changes are in `data`.

    item: bytes of an element. block: shape of the block; start counts from its first element.
    """
    held, begin = old.view(_INTS[item]), 0
    layout = [(item, item * prod(block))]
    for (where, values), (_, count) in zip(changes(data, layout), _sizes(layout), strict=True):
        if where is None:
            where = torch.arange(count, device=old.device)
        elif where.dtype == torch.bool:
            where = where.nonzero().squeeze(1)
        left, begin = where + begin, begin + count
        inside = torch.ones_like(left, dtype=torch.bool)
        place, stride = torch.zeros_like(left), 1
        for whole, first, n in zip(reversed(block), reversed(start), reversed(size), strict=True):
            here = left % whole - first
            inside &= (here >= 0) & (here < n)
            place += here * stride
            left, stride = left // whole, stride * n
        held[place[inside]] = values[inside]


def changes(data: torch.Tensor, layout: Spans) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
    """Yield for each part which elements changed and their values, as whole numbers.

    Which: None for all, a mask of booleans, or their places as int64. The first fault in the data ends it with a
    TransferError; no place is ever outside of its part.
    """
    at = 0
    for item, count in _sizes(layout):
        way, changed = (int(word) for word in _taken(data, at, _HEAD).view(torch.int64))
        if not 0 <= changed <= count:
            _refuse(f"{changed} of {count} elements are said to have changed")
        at += _HEAD
        where: torch.Tensor | None = None
        if way in {_PLACES, _NONE}:
            chunks = -(-count // CHUNK) if way == _PLACES else 0
            counts = _taken(data, at, 4 * chunks).view(torch.int32)
            at += _padded(4 * chunks)
            low = _taken(data, at, 2 * changed * (way == _PLACES)).view(torch.int16)
            at += _padded(low.numel() * 2)
            where = _places(counts.long(), low, count)
        elif way == _BITS:
            size = _padded(-(-count // 8))
            where = _unpacked(_taken(data, at, size))[:count]
            at += size
            if int(where.count_nonzero()) != changed:
                _refuse(f"{changed} elements are said to have changed, and other ones marked")
        elif way != _ALL or changed != count:
            _refuse(f"a part is written in way {way}, with {changed} of {count} elements")
        values = _taken(data, at, item * changed * (way != _NONE)).view(_INTS[item])
        at += _padded(item * values.numel())
        yield where, values
    if at != data.numel():
        _refuse(f"it has {data.numel()} bytes, and changes are told in {at}")


def _refuse(what: str) -> NoReturn:
    message = f"changed values arrived damaged: {what}; the next update sends all"
    raise TransferError(message, phase="load")


def _taken(data: torch.Tensor, at: int, count: int) -> torch.Tensor:
    if at + count > data.numel():
        _refuse(f"it ends at byte {data.numel()}, and {at + count} are told of")
    return data[at : at + count]


def _padded(count: int) -> int:
    return -(-count // 8) * 8


def _pad(data: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor's bytes, filled up to a multiple of 8."""
    flat = data.view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 8))


def _sizes(layout: Spans) -> Iterator[tuple[int, int]]:
    """Yield bytes of an element and number of elements of each part."""
    for item, count in layout:
        for begin in range(0, count // item, PART):
            yield item, min(PART, count // item - begin)


def _parts(data: torch.Tensor, layout: Spans) -> Iterator[torch.Tensor]:
    """Yield each part of flat bytes, as whole numbers of its elements' width."""
    at = 0
    for item, count in _sizes(layout):
        yield data[at : at + item * count].view(_INTS[item])
        at += item * count


def _encoded(new: torch.Tensor, old: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Return one part's bytes in order, and how many of its elements differ."""
    count, item = new.numel(), new.element_size()
    found = _different(new, old)
    changed = int(found.count_nonzero()) if found.dtype == torch.bool else found.numel()
    chunks = -(-count // CHUNK)
    sizes = {
        _PLACES: _padded(4 * chunks) + _padded(2 * changed) + _padded(item * changed),
        _BITS: _padded(-(-count // 8)) + _padded(item * changed),
        _ALL: _padded(item * count),
    }
    way = min(sizes, key=lambda one: sizes[one]) if changed else _NONE
    head = torch.tensor([way, count if way == _ALL else changed], dtype=torch.int64).view(torch.uint8).to(new.device)
    if way == _NONE:
        return [head], 0
    if way == _ALL:
        return [head, _pad(new)], changed
    if way == _BITS:
        mask = found if found.dtype == torch.bool else new != old
        return [head, _packed(mask), _pad(new[mask])], changed
    places = found.nonzero().squeeze(1) if found.dtype == torch.bool else found
    counts = torch.bincount(places // CHUNK, minlength=chunks).to(torch.int32)
    return [head, _pad(counts), _pad((places % CHUNK).to(torch.int16)), _pad(new[places])], changed


def _different(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return which elements differ: the places of few, in order, or a mask of booleans.

    Looked at in words of 8 bytes first, since most of them are equal where this pays.
    """
    item, each = new.element_size(), 8 // new.element_size()
    aligned = all(one.storage_offset() * item % 8 == 0 for one in (new, old)) and new.numel() % each == 0
    if not aligned or each == 1:
        return new != old
    words = new.view(torch.int64) != old.view(torch.int64)
    if int(words.count_nonzero()) > words.numel() // 4:
        return new != old
    rows = words.nonzero().squeeze(1)
    inner = (new.view(-1, each)[rows] != old.view(-1, each)[rows]).nonzero()
    return rows[inner[:, 0]] * each + inner[:, 1]


def _places(counts: torch.Tensor, low: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of 16-bit ones, `counts` of them in each chunk, in a part of `count` elements."""
    if int(counts.sum()) != low.numel() or (counts < 0).any():
        _refuse(f"{low.numel()} elements are said to have changed, and chunks tell of {int(counts.sum())}")
    chunks = torch.arange(counts.numel(), device=counts.device)
    places = torch.repeat_interleave(chunks, counts) * CHUNK + (low.long() & (CHUNK - 1))
    if low.numel() and int(places.max()) >= count:
        _refuse(f"element {int(places.max())} of {count} is said to have changed")
    return places


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """Return a bit for each of a mask's booleans, filled up to a multiple of 8 bytes."""
    bits = torch.nn.functional.pad(mask.view(torch.uint8), (0, -mask.numel() % 64)).view(torch.int64)
    return ((bits * _GATHER) >> 56).to(torch.uint8)


def _unpacked(bits: torch.Tensor) -> torch.Tensor:
    """Return the booleans that were packed."""
    every = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).to(torch.uint8).view(torch.int64).squeeze(1)
    table = torch.empty_like(every)
    table[_packed(every.view(torch.bool)).long()] = every
    return table.to(bits.device)[bits.long()].view(torch.bool)

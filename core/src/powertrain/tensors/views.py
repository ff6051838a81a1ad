"""Parts of tensors without copies: a block of a storage, a range of a tensor, and what a plan's read takes of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from powertrain.interfaces.weights import Piece

if TYPE_CHECKING:
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights.plan import Block, Read


def device_of(weights: WeightSource | WeightSink) -> torch.device:
    """Return the device that a rank's weights are on; the CPU where it has none."""
    return next((tensor.device for tensor in weights.tensors().values()), torch.device("cpu"))


def block_view(storage: torch.Tensor, place: int, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return the block of `storage` that begins `place` elements after its first one."""
    return torch.as_strided(storage, size, stride, storage.storage_offset() + place)


def narrowed(tensor: torch.Tensor, origin: Sequence[int], start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return the range (start, size) of a tensor whose own first element stands at `origin`."""
    for axis, (own, at, n) in enumerate(zip(origin, start, size, strict=True)):
        tensor = tensor.narrow(axis, at - own, n)
    return tensor


def read_view(storage: torch.Tensor, read: Read) -> torch.Tensor:
    """Return what a read takes, in the storage of the trainer's rank that holds its block."""
    block = read.block
    ahead = sum((at - own) * n for at, own, n in zip(read.start, block.start, block.stride, strict=True))
    return block_view(storage, block.place + ahead, read.size, block.stride)


def pieces(reads: Iterable[Read], storage: Callable[[Block], torch.Tensor]) -> Iterator[Piece]:
    """Yield a piece for each read; storage: where a block lies."""
    for read in reads:
        yield Piece(read.name, read.start, read_view(storage(read.block), read))

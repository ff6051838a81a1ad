"""Messages of the transfer `p2p`: what one rank sends another of a bucket, and the order that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from powertrain.tensors import delta
from powertrain.weights.boxes import ITEM_SIZE

if TYPE_CHECKING:
    from powertrain.weights.plan import Read


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to another of one bucket: `reads` back to back, those of the larger elements first.

    So every one of them is aligned, and no byte is sent that is no weight. peer: the other rank's place in the groups.
    content: a number that messages of the same bytes have in common.
    """

    order: tuple[int, ...]
    peer: int
    reads: tuple[Read, ...]
    content: int = 0

    @property
    def layout(self) -> delta.Spans:
        """Bytes of elements, and bytes of all elements of that size."""
        return delta.spans((ITEM_SIZE[read.block.dtype], read.bytes) for read in self.reads)

    @property
    def bytes(self) -> int:
        """Bytes of the message."""
        return sum(read.bytes for read in self.reads)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[Read, torch.Tensor]]:
        """Yield each read with its place in the message."""
        place = 0
        for read in self.reads:
            part = buffer[place : place + read.bytes].view(getattr(torch, read.block.dtype))
            yield read, part.view(tuple(read.size))
            place += read.bytes


def messages(reads: Sequence[tuple[int, Read]], rank: int, world: int) -> list[Message]:
    """Return a rank's messages in their order; reads: (place of the other side's rank, read), in the plan's order.

    The order is by bucket, then so that ranks begin with different partners, and is the same for both ends.
    """
    table: dict[tuple[int, int], list[Read]] = {}
    for peer, read in reads:
        table.setdefault((read.block.bucket, peer), []).append(read)
    found, contents = [], dict[Any, int]()
    for (bucket, peer), some in table.items():
        low, high = min(rank, peer), max(rank, peer)  # the trainer's ranks come first, so low is the sender
        some.sort(key=lambda read: -ITEM_SIZE[read.block.dtype])
        content = tuple((read.block.rank, read.block.name, read.start, read.size) for read in some)
        number = contents.setdefault(content, len(contents))
        found.append(Message((bucket, (high - low) % world, low), peer, tuple(some), number))
    return sorted(found, key=lambda message: message.order)

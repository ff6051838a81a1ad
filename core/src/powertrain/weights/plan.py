"""The transfer plan: from both sides' manifests, who puts which block where, and who reads it. Pure data, torch-free.

Sources own disjoint blocks that together are each tensor exactly once (replicas take turns). Blocks are packed into
buckets of bounded size; sinks read the parts of blocks that fall into their boxes. `powertrain.weights.outline` works
it out; here is what comes of it, and the check that both sides fit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from powertrain.interfaces.wire import record
from powertrain.weights.boxes import ITEM_SIZE, Manifest
from powertrain.weights.patterns import EngineManifest

ALIGNMENT = 256
"""Bytes; every block begins at a multiple of it within its bucket."""

BUCKET_BYTES = 1 << 30
"""The most bytes of a bucket, where nothing else is said."""


@record(kw_only=False)
class Block:
    """A block of one tensor that one source rank puts into one bucket, row-major and contiguous there.

    name/dtype: the source's entry. start/size: range in the global tensor. rank: the source rank that holds it in
    `storage` at `place` (elements) with `stride`. bucket/offset: where it goes, in bytes, aligned.
    """

    name: str
    dtype: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    rank: int
    storage: str
    place: int
    stride: tuple[int, ...]
    bucket: int
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of the block's elements."""
        return prod(self.size) * ITEM_SIZE[self.dtype]


@record(kw_only=False)
class Read:
    """What one sink rank takes from a block: the range (start, size) of the tensor that the sink knows as `name`.

    The range is as the sender counts it, also where the sink transposes.
    """

    name: str
    block: Block
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes read."""
        return prod(self.size) * ITEM_SIZE[self.block.dtype]


@record(kw_only=False)
class TransferPlan:
    """Who sends what to whom. blocks: in bucket order. reads[engine][rank]: in bucket order. buckets: bytes of each.

    kind: "full" or "adapter", as the sources' manifests say. left_out: names of the sender that are no part of served
    weights (what an adapter's wrapper keeps beside them); all others are in `blocks`, unless they have no element.
    """

    kind: str
    blocks: tuple[Block, ...]
    reads: tuple[tuple[tuple[Read, ...], ...], ...]
    buckets: tuple[int, ...]
    left_out: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that leave the sources, each element once however many sinks read it."""
        return sum(block.bytes for block in self.blocks)

    def pairs(self) -> dict[tuple[int, int, int], int]:
        """Return bytes by (source rank, sink engine, sink rank)."""
        table: Counter[tuple[int, int, int]] = Counter()
        for number, engine in enumerate(self.reads):
            for rank, reads in enumerate(engine):
                for read in reads:
                    table[read.block.rank, number, rank] += read.bytes
        return dict(table)


def plan_transfer(
    sources: Sequence[Manifest] | EngineManifest,
    sinks: Sequence[Sequence[Manifest] | EngineManifest] | Sequence[Manifest],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferPlan:
    """Return the plan that moves all of `sources` (every rank of one engine) into `sinks`; equal input, equal plan.

    sinks: for each engine its ranks' manifests; a bare manifest stands for an engine of one rank. bucket_bytes: the
    most bytes of a bucket. An adapter is taken whole by every sink rank. Raises `Violations` with every fault: names
    that one side lacks (the receiver may lack none, the sender only frozen ones) or that become one, shapes or dtypes
    that do not fit, ranges that no source holds, that lie outside of their tensor, or that would be written twice.

    Every block and read of every rank is made; `powertrain.weights.outline.outline` tells the same of a large layout
    without that.
    """
    from powertrain.weights.outline import outline

    return outline(sources, sinks, bucket_bytes=bucket_bytes).expand()

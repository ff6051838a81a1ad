"""The transfer plan: from both sides' manifests, who puts which block where, and who reads it. Pure data, torch-free.

Sources own disjoint blocks that together are each tensor exactly once (replicas: the least loaded rank sends). Blocks
are packed into buckets of bounded size; sinks read the parts of blocks that fall into their boxes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod

from powertrain.errors import ConfigError, Violations
from powertrain.interfaces.wire import record
from powertrain.weights.boxes import ITEM_SIZE, Box, Entry, Manifest
from powertrain.weights.ranges import Range, left_of, overlap, split

ALIGNMENT = 256
"""Bytes; every block begins at a multiple of it within its bucket."""


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
    """What one sink rank takes from a block: the range (start, size) of the tensor that the sink knows as `name`."""

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

    kind: "full" or "adapter", as the sources' manifests say.
    """

    kind: str
    blocks: tuple[Block, ...]
    reads: tuple[tuple[tuple[Read, ...], ...], ...]
    buckets: tuple[int, ...]

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
    sources: Sequence[Manifest],
    sinks: Sequence[Sequence[Manifest]] | Sequence[Manifest],
    *,
    bucket_bytes: int = 1 << 30,
) -> TransferPlan:
    """Return the plan that moves all of `sources` (every rank of one engine) into `sinks`; equal input, equal plan.

    sinks: for each engine its ranks' manifests; a bare manifest stands for an engine of one rank. bucket_bytes: the
    most bytes of a bucket. An adapter is taken whole by every sink rank. Raises `Violations` with every fault: names
    that one side lacks (the receiver may lack none, the sender only frozen ones), shapes or dtypes that do not fit,
    ranges that no source holds.
    """
    if not sources or bucket_bytes < ALIGNMENT:
        message = (
            f"a plan needs a source ({len(sources)} given) and buckets of {ALIGNMENT} bytes or more, not {bucket_bytes}"
        )
        raise ConfigError(message)
    engines = [[engine] if isinstance(engine, Manifest) else list(engine) for engine in sinks]
    problems = _unequal(sources)
    offered = sources[0].by_name()
    owned = _owned(sources) if not problems else {}
    wanted = [[_matched(sources[0], sink, problems) for sink in engine] for engine in engines]
    if not problems:
        for boxes in chain.from_iterable(wanted):
            problems += [p for name, (own, dest) in boxes.items() for p in _uncovered(name, dest, owned[own])]
    if problems:
        raise Violations(list(dict.fromkeys(problems)), heading="the weights of both sides do not fit together:")
    blocks, sizes = _pack(offered, owned, bucket_bytes)
    table: defaultdict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        table[block.name].append(block)
    reads = tuple(tuple(_reads(boxes, table) for boxes in engine) for engine in wanted)
    return TransferPlan(sources[0].kind, tuple(blocks), reads, tuple(sizes))


def _unequal(sources: Sequence[Manifest]) -> list[str]:
    first = [(e.name, e.dtype, e.shape) for e in sources[0]]
    return [
        f"source rank {source.rank} lists other tensors, shapes or dtypes than rank {sources[0].rank}"
        for source in sources[1:]
        if [(e.name, e.dtype, e.shape) for e in source] != first
    ]


def _matched(source: Manifest, sink: Manifest, problems: list[str]) -> dict[str, tuple[str, list[Range]]]:
    """Return sink name -> (source name, wanted ranges); faults are appended to `problems`."""
    if source.kind == "adapter":
        return {e.name: (e.name, [((0,) * len(e.shape), e.shape)]) for e in source}
    offered, aliases = source.by_name(), _names_of(sink)
    matched: dict[str, tuple[str, list[Range]]] = {}
    taken: set[str] = set()
    for entry in sink:
        found = list(dict.fromkeys(n for n in (source.tied.get(a, a) for a in aliases[entry.name]) if n in offered))
        taken.update(found)
        if len(found) > 1:
            problems.append(f"{' and '.join(found)} would both be written to {entry.name}, which the receiver has tied")
        elif found:
            problems += _misfit(offered[found[0]], entry)
            matched[entry.name] = (found[0], [(box.start, box.size) for box in entry.boxes])
        elif not entry.frozen:
            problems.append(f"{entry.name} is wanted by the receiver and not sent; freeze it or send it")
    problems += [f"{name} is sent and the receiver has no such tensor" for name in offered if name not in taken]
    return matched


def _names_of(sink: Manifest) -> Mapping[str, list[str]]:
    """Return entry name -> all names of its storage, its own first."""
    names = {entry.name: [entry.name] for entry in sink}
    for alias, name in sorted(sink.tied.items()):
        if name in names and alias not in names:
            names[name].append(alias)
    return names


def _misfit(sent: Entry, entry: Entry) -> list[str]:
    shapes = f"has shape {list(sent.shape)} at the sender and {list(entry.shape)} at the receiver"
    dtypes = f"is {sent.dtype} at the sender; the receiver holds {entry.dtype} and does not cast"
    faults = {shapes: sent.shape != entry.shape, dtypes: sent.dtype not in (entry.dtype, *entry.accepts)}
    return [f"{entry.name} {fault}" for fault, found in faults.items() if found]


def _owned(sources: Sequence[Manifest]) -> dict[str, list[tuple[Range, Box, int]]]:
    """Return name -> disjoint (range, box that holds it, rank): each element once, loads of replicas evened out."""
    holders: dict[str, dict[Range, list[tuple[int, Box]]]] = {entry.name: {} for entry in sources[0]}
    for source in sources:
        for entry in source:
            for box in entry.boxes:
                if box.elements:
                    holders[entry.name].setdefault((box.start, box.size), []).append((source.rank, box))
    load: Counter[int] = Counter()
    owned: dict[str, list[tuple[Range, Box, int]]] = {name: [] for name in holders}
    for name, places in holders.items():
        for place in sorted(places):
            rank, box = min(places[place], key=lambda held: (load[held[0]], held[0]))
            for left in left_of(place, [part for part, _, _ in owned[name]]):
                owned[name].append((left, box, rank))
                load[rank] += prod(left[1])
    return owned


def _uncovered(name: str, wanted: Sequence[Range], owned: Sequence[tuple[Range, Box, int]]) -> Iterator[str]:
    for place in wanted:
        for start, size in left_of(place, [part for part, _, _ in owned]) if prod(place[1]) else ():
            text = ", ".join(f"{s}:{s + n}" for s, n in zip(start, size, strict=True))
            yield f"{name}[{text}] is wanted by the receiver and no source rank holds it"


def _pack(
    offered: Mapping[str, Entry], owned: Mapping[str, list[tuple[Range, Box, int]]], bucket_bytes: int
) -> tuple[list[Block], list[int]]:
    blocks: list[Block] = []
    sizes: list[int] = []
    for name, entry in offered.items():
        item = ITEM_SIZE[entry.dtype]
        for place, box, rank in owned[name]:
            for start, size in split(place, bucket_bytes // item):
                need = prod(size) * item
                offset = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else bucket_bytes
                if offset + need > bucket_bytes:
                    sizes.append(0)
                    offset = 0
                sizes[-1] = offset + need
                at = box.place(start)
                blocks.append(
                    Block(name, entry.dtype, start, size, rank, box.storage, at, box.stride, len(sizes) - 1, offset)
                )
    return blocks, sizes


def _reads(boxes: Mapping[str, tuple[str, list[Range]]], table: Mapping[str, list[Block]]) -> tuple[Read, ...]:
    reads = [
        Read(name, block, *common)
        for name, (own, ranges) in boxes.items()
        for block in table.get(own, ())
        for place in ranges
        if (common := overlap(place, (block.start, block.size)))
    ]
    return tuple(sorted(reads, key=lambda read: (read.block.bucket, read.block.offset)))

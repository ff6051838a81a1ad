"""A transfer plan in short: worked out once for each way in which tensors lie on both sides, drawn rank by rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from powertrain.errors import ConfigError, Violations
from powertrain.weights.boxes import ITEM_SIZE, Box, Manifest
from powertrain.weights.matching import matched
from powertrain.weights.memory import shared
from powertrain.weights.patterns import EngineManifest, Pattern, Tensor
from powertrain.weights.plan import ALIGNMENT, BUCKET_BYTES, Block, Read, TransferPlan
from powertrain.weights.ranges import Index, Range, left_of, split, text, twice

_MOST = 100
"""Faults that are told; of more than that the rest is counted."""


@dataclass(slots=True, eq=False)
class Group:
    """All tensors that lie in one pattern at the sender, and in the same ones at each distinct receiver.

    wanted: for each of those its patterns (two where it holds apart what the sender has tied). tensors: how many.
    pieces: what is sent of one tensor, cut to buckets: range, and which of `holders` could send it; those are ranks
    with their boxes, and the group's tensors take them in turns. offsets: where each piece begins and the last one
    ends, in bytes, when they stand one behind the other.
    """

    pattern: Pattern
    wanted: tuple[tuple[Pattern, ...], ...]
    tensors: int = 0
    holders: list[list[tuple[int, Box]]] = field(default_factory=list)
    pieces: list[tuple[Range, int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    _sizes: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    _reads: dict[int, dict[int, list[tuple[int, int, Range]]]] = field(default_factory=dict)

    @property
    def item(self) -> int:
        """Bytes of one element, as it is sent."""
        return ITEM_SIZE[self.pattern.entry.dtype]

    def own(self) -> None:
        """Find ranges that together are what the sender holds, each once, and who could send them."""
        places: dict[Range, list[tuple[int, Box]]] = {}
        for ranks, boxes in self.pattern.held:
            for box in boxes:
                if box.elements:
                    places.setdefault((box.start, box.size), []).extend((rank, box) for rank in ranks)
        disjoint = next(twice(list(places)), None) is None
        for place in sorted(places):
            for left in [place] if disjoint else left_of(place, [part for part, _ in self.pieces]):
                self.pieces.append((left, len(self.holders)))
                self.holders.append(places[place])

    def gaps(self, pattern: Pattern) -> Iterator[Range]:
        """Yield what a receiver wants and nobody holds."""
        index = Index([place for place, _ in self.pieces])
        for place in (place for _, places in pattern.ranges() for place in places):
            parts = [part for _, part in index.common(place)]
            if sum(prod(size) for _, size in parts) < prod(place[1]):
                yield from left_of(place, parts)

    def share(self, load: Counter[int]) -> None:
        """Put holders in the order of their turns, the least loaded rank first, and add to the loads."""
        for number, turns in enumerate(self.holders):
            turns = self.holders[number] = sorted(turns, key=lambda held: (load[held[0]], held[0]))
            size = self.bytes(number)
            for rank, count in self.turns(number):
                load[rank] += count * size

    def turns(self, piece: int) -> Iterator[tuple[int, int]]:
        """Yield (rank, how many tensors' `piece` it sends)."""
        turns = self.holders[self.pieces[piece][1]]
        rounds, rest = divmod(self.tensors, len(turns))
        yield from ((rank, rounds + (turn < rest)) for turn, (rank, _) in enumerate(turns) if rounds or turn < rest)

    def holder(self, piece: int, turn: int) -> tuple[int, Box]:
        """Return the rank, and its box, that sends a piece of the tensor of that number."""
        turns = self.holders[self.pieces[piece][1]]
        return turns[turn % len(turns)]

    def bytes(self, piece: int) -> int:
        """Return the bytes of a piece."""
        return prod(self.pieces[piece][0][1]) * self.item

    def cut(self, bucket_bytes: int) -> None:
        """Cut what is larger than a bucket, and lay the pieces out."""
        most = bucket_bytes // self.item
        self.pieces = [(part, number) for place, number in self.pieces for part in split(place, most)]
        self.offsets = [0]
        for piece in range(len(self.pieces)):
            self.offsets[-1] = _aligned(self.offsets[-1])
            self.offsets.append(self.offsets[-1] + self.bytes(piece))

    def reads(self, sink: int) -> dict[int, list[tuple[int, int, Range]]]:
        """Return for each rank of a distinct receiver (number in its `wanted`, piece, what it reads of that)."""
        if sink not in self._reads:
            index = Index([place for place, _ in self.pieces])
            found: dict[int, list[tuple[int, int, Range]]] = defaultdict(list)
            for number, pattern in enumerate(self.wanted[sink]):
                for ranks, places in pattern.ranges():
                    parts = [(number, *part) for place in places for part in index.common(place)]
                    for rank in ranks:
                        found[rank] += parts
            self._reads[sink] = dict(found)
        return self._reads[sink]

    def bytes_read(self, sink: int, piece: int) -> list[tuple[int, int]]:
        """Return (rank of a distinct receiver, bytes of a piece that it reads)."""
        if (sink, piece) not in self._sizes:
            for every in range(len(self.pieces)):
                self._sizes[sink, every] = []
            for rank, parts in self.reads(sink).items():
                for _, number, (_, size) in parts:
                    self._sizes[sink, number].append((rank, prod(size) * self.item))
        return self._sizes[sink, piece]


@dataclass(frozen=True, eq=False)
class Outline:
    """The plan of a transfer, of which any rank's part is there when asked for; `expand` makes all of it.

    engines: for each engine of the sinks its number in `distinct`, where equal ones stand once. names: for each
    distinct one, number of a source's tensor -> its own tensors. places: for each tensor of the source (group, number
    in that), None where nobody takes it. spots: (bucket, offset) of each of its pieces.
    """

    source: EngineManifest
    distinct: Sequence[EngineManifest]
    engines: Sequence[int]
    names: Sequence[Mapping[int, list[Tensor]]]
    groups: Sequence[Group]
    places: Sequence[tuple[Group, int] | None]
    spots: Sequence[Sequence[tuple[int, int]]]
    buckets: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes that leave the sources, each element once however many sinks read it."""
        return sum(group.bytes(piece) * group.tensors for group in self.groups for piece in range(len(group.pieces)))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the sender that are no part of the served weights."""
        return tuple(own.name for own, place in zip(self.source.tensors, self.places, strict=True) if place is None)

    def blocks(self, tensor: int) -> list[Block]:
        """Return the blocks of one tensor, by its number at the source."""
        own, place, made = self.source.tensors[tensor], self.places[tensor], []
        if place is not None:
            group, turn = place
            for piece, spot in enumerate(self.spots[tensor]):
                (start, size), (rank, held) = group.pieces[piece][0], group.holder(piece, turn)
                box = own.box(held)
                where = (rank, box.storage, box.place(start), box.stride)
                made.append(Block(own.name, group.pattern.entry.dtype, start, size, *where, *spot))
        return made

    def reads(self, engine: int, rank: int, blocks: Mapping[int, list[Block]] | None = None) -> tuple[Read, ...]:
        """Return what one rank of an engine reads, in bucket order. blocks: those already made, by tensor."""
        sink, found = self.engines[engine], []
        for tensor, wanted in self.names[sink].items():
            place = self.places[tensor]
            parts = place[0].reads(sink).get(rank, ()) if place else ()
            made = blocks[tensor] if blocks else self.blocks(tensor) if parts else []
            found += [Read(wanted[number].name, made[piece], *common) for number, piece, common in parts]
        return tuple(sorted(found, key=lambda read: (read.block.bucket, read.block.offset)))

    def expand(self) -> TransferPlan:
        """Return the plan with every block and read."""
        blocks = {tensor: self.blocks(tensor) for tensor in range(len(self.places))}
        reads = tuple(
            tuple(self.reads(engine, rank, blocks) for rank in range(self.distinct[sink].world))
            for engine, sink in enumerate(self.engines)
        )
        every = tuple(block for made in blocks.values() for block in made)
        return TransferPlan(self.source.kind, every, reads, self.buckets, self.left_out)

    def tables(self) -> list[tuple[list[int], Counter[tuple[int, int]]]]:
        """Return for each distinct receiver the engines equal to it, and bytes by (source rank, its own rank)."""
        found = []
        for sink in range(len(self.distinct)):
            table: Counter[tuple[int, int]] = Counter()
            for group in self.groups:
                for piece in range(len(group.pieces)):
                    for source, count in group.turns(piece):
                        for rank, read in group.bytes_read(sink, piece):
                            table[source, rank] += count * read
            found.append(([engine for engine, own in enumerate(self.engines) if own == sink], table))
        return found

    def sent(self) -> Counter[int]:
        """Return bytes by source rank, each element once."""
        table: Counter[int] = Counter()
        for group in self.groups:
            for piece in range(len(group.pieces)):
                for rank, count in group.turns(piece):
                    table[rank] += count * group.bytes(piece)
        return table

    def pairs(self) -> dict[tuple[int, int, int], int]:
        """Return bytes by (source rank, sink engine, sink rank)."""
        return {(s, e, r): n for engines, table in self.tables() for e in engines for (s, r), n in table.items()}

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes of one bucket that one source rank puts into it, and that one sink rank reads."""
        put: Counter[tuple[int, int]] = Counter()
        filled: Counter[tuple[int, Group, int]] = Counter()
        taken: Counter[tuple[int, int, int]] = Counter()
        for place, spots in zip(self.places, self.spots, strict=True):
            for group, turn in [place] if place else ():
                for piece, (bucket, _) in enumerate(spots):
                    put[bucket, group.holder(piece, turn)[0]] += group.bytes(piece)
                    filled[bucket, group, piece] += 1
        for (bucket, group, piece), count in filled.items():
            for sink in range(len(self.distinct)):
                for rank, read in group.bytes_read(sink, piece):
                    taken[bucket, sink, rank] += count * read
        return max(put.values(), default=0), max(taken.values(), default=0)


def outline(
    sources: Sequence[Manifest] | EngineManifest,
    sinks: Sequence[Sequence[Manifest] | EngineManifest | Manifest],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Outline:
    """Return the plan that `powertrain.weights.plan_transfer` makes, in short; arguments and errors as there.

    Costs what the distinct patterns and the ranks cost, and one look at each tensor.
    """
    if not sources or bucket_bytes < ALIGNMENT:
        message = f"a plan needs a source and buckets of {ALIGNMENT} bytes or more, not {bucket_bytes}"
        raise ConfigError(message)
    problems: list[str] = []
    source = sources if isinstance(sources, EngineManifest) else EngineManifest.of(sources, "source", problems)
    distinct, engines = _distinct(sinks, problems)
    names = [matched(source, sink, problems) for sink in distinct]
    groups, places = _grouped(source, names)
    for group in groups:
        group.own()
    _check(problems, source, distinct, names, places)
    load: Counter[int] = Counter()
    for group in sorted(groups, key=lambda group: any(len(turns) > 1 for turns in group.holders)):
        group.share(load)
    for group in groups:
        group.cut(bucket_bytes)
    spots, buckets = _pack(places, bucket_bytes)
    return Outline(source, distinct, engines, names, groups, places, spots, buckets)


def _distinct(
    sinks: Sequence[Sequence[Manifest] | EngineManifest | Manifest], problems: list[str]
) -> tuple[list[EngineManifest], list[int]]:
    """Return the engines that differ from one another, and for each engine which of them it equals."""
    kept: list[tuple[object, EngineManifest]] = []
    engines = []
    for sink in sinks:
        given = [sink] if isinstance(sink, Manifest) else sink
        same = next((i for i, (other, _) in enumerate(kept) if other is given or other == given), len(kept))
        if same == len(kept):
            if isinstance(given, EngineManifest):
                kept.append((given, given))
            else:
                kept.append((given, EngineManifest.of(given, "sink", problems)))
                problems += [line for one in given for line in _in_one_place(one)]
        engines.append(same)
    return [made for _, made in kept], engines


def _in_one_place(sink: Manifest) -> Iterator[str]:
    for (name, box), (other, there) in shared((entry.name, box) for entry in sink for box in entry.boxes):
        first, second = name + text((box.start, box.size)), other + text((there.start, there.size))
        yield f"{first} and {second} lie in the same memory of sink rank {sink.rank}, {box.storage!r}"


def _grouped(
    source: EngineManifest, names: Sequence[Mapping[int, list[Tensor]]]
) -> tuple[list[Group], list[tuple[Group, int] | None]]:
    groups: dict[tuple[int, ...], Group] = {}
    places: list[tuple[Group, int] | None] = []
    for number, tensor in enumerate(source.tensors):
        wanted = [names_of.get(number, ()) for names_of in names]
        if names and not any(wanted):
            places.append(None)
            continue
        # Patterns live as long as their engines' manifests, so that their identities tell them apart.
        key = (id(tensor.pattern), *(id(own.pattern) if own else 0 for sink in wanted for own in (*sink, None)))
        if key not in groups:
            groups[key] = Group(tensor.pattern, tuple(tuple(own.pattern for own in sink) for sink in wanted))
        places.append((groups[key], groups[key].tensors))
        groups[key].tensors += 1
    return list(groups.values()), places


def _check(
    problems: list[str],
    source: EngineManifest,
    distinct: Sequence[EngineManifest],
    names: Sequence[Mapping[int, list[Tensor]]],
    places: Sequence[tuple[Group, int] | None],
) -> None:
    """Raise `Violations` with all that does not fit together, each pattern looked at once."""
    known: dict[object, list[str]] = {}
    for side, engine in (("source", source), *(("sink", sink) for sink in distinct)):
        for tensor in engine.tensors:
            if id(tensor.pattern) not in known:
                known[id(tensor.pattern)] = list(tensor.pattern.faults(side))
            problems += [f"{tensor.name}{fault}" for fault in known[id(tensor.pattern)]]
    for own in [] if problems else names:
        for number, tensors in own.items():
            group = places[number][0]  # type: ignore[index] # somebody takes it
            for tensor in tensors:
                key = group, id(tensor.pattern)
                if key not in known:
                    known[key] = [text(gap) for gap in group.gaps(tensor.pattern)]
                lack = "is wanted by the receiver and no source rank holds it"
                problems += [f"{tensor.name}{gap} {lack}" for gap in known[key]]
    if problems:
        told = list(dict.fromkeys(problems))
        more = [f"and {len(told) - _MOST} more"] if len(told) > _MOST else []
        raise Violations(told[:_MOST] + more, heading="the weights of both sides do not fit together:")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _pack(
    places: Sequence[tuple[Group, int] | None], bucket_bytes: int
) -> tuple[list[list[tuple[int, int]]], tuple[int, ...]]:
    """Return (bucket, offset) of each tensor's pieces, in order, and the bytes of every bucket."""
    spots: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    for place in places:
        spots.append([])
        if place is None:
            continue
        group, begin = place[0], _aligned(sizes[-1]) if sizes else bucket_bytes
        if group.pieces and begin + group.offsets[-1] <= bucket_bytes:
            spots[-1] = [(len(sizes) - 1, begin + offset) for offset in group.offsets[:-1]]
            sizes[-1] = begin + group.offsets[-1]
            continue
        for piece in range(len(group.pieces)):
            need, begin = group.bytes(piece), _aligned(sizes[-1]) if sizes else bucket_bytes
            if begin + need > bucket_bytes:
                sizes.append(0)
                begin = 0
            spots[-1].append((len(sizes) - 1, begin))
            sizes[-1] = begin + need
    return spots, tuple(sizes)

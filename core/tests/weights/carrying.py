"""Carries a plan out in numpy on whole-number weights, and proves that every wanted element was written once."""

from math import prod

import numpy as np

from powertrain.weights import Box, Entry, Manifest, plan_transfer
from powertrain.weights.boxes import ITEM_SIZE

NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""How dtypes that numpy lacks are held here: their bits."""
EMPTY = -1
PADDING = -7


def kind(dtype):
    return np.dtype(NUMPY.get(dtype, dtype))


def rows(size):
    """Return the strides of a contiguous tensor."""
    return tuple(prod(size[axis + 1 :]) for axis in range(len(size)))


def box(start, size, storage="w", offset=0, stride=None):
    return Box(tuple(start), tuple(size), storage, offset, rows(size) if stride is None else tuple(stride))


def whole(name, shape, dtype="int64", **more):
    return Entry(name, dtype, tuple(shape), (box((0,) * len(shape), shape, name),), **more)


def iota(shapes):
    """Return int64 weights in which no two elements are equal."""
    weights, first = {}, 0
    for name, shape in shapes.items():
        weights[name] = np.arange(first, first + prod(shape), dtype=np.int64).reshape(shape)
        first += prod(shape)
    return weights


def place(array, one):
    """Return the box's view of a flat storage."""
    strides = [array.itemsize * stride for stride in one.stride]
    return np.lib.stride_tricks.as_strided(array[one.offset :], one.size, strides)


def within(start, size, origin):
    return tuple(slice(s - o, s - o + n) for s, o, n in zip(start, origin, size, strict=True))


def storages(manifest, fill):
    """Return the rank's memory: storage -> flat array, as long as the boxes in it reach and 3 elements more."""
    reach, dtypes = {}, {}
    for entry in manifest:
        for one in entry.boxes:
            last = one.offset + sum((n - 1) * stride for n, stride in zip(one.size, one.stride, strict=True))
            reach[one.storage] = max(reach.get(one.storage, 0), last + 4)
            dtypes[one.storage] = kind(entry.dtype)
    return {name: np.full(size, fill).astype(dtypes[name]) for name, size in reach.items()}


def held(manifest, weights):
    """Return a source rank's memory; what no box covers holds PADDING."""
    memory = storages(manifest, PADDING)
    for entry in manifest:
        for one in entry.boxes:
            place(memory[one.storage], one)[...] = weights[entry.name][
                within(one.start, one.size, (0,) * len(one.start))
            ]
    return memory


def staged(plan, memories):
    """Return the buckets as bytes, every block put in by the rank that the plan says."""
    buckets = [np.zeros(size, np.uint8) for size in plan.buckets]
    for b in plan.blocks:
        assert b.offset % 256 == 0
        data = place(memories[b.rank][b.storage], Box(b.start, b.size, b.storage, b.place, b.stride))
        assert data.itemsize == ITEM_SIZE[b.dtype]
        buckets[b.bucket][b.offset : b.offset + b.bytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return buckets


def pieces(plan, buckets, engine, rank):
    """Yield (read, values) of all that one rank of one engine reads."""
    for read in plan.reads[engine][rank]:
        b = read.block
        values = buckets[b.bucket][b.offset : b.offset + b.bytes].view(kind(b.dtype)).reshape(b.size)
        yield read, values[within(read.start, read.size, b.start)]


def write(manifest, arriving):
    """Return a sink rank's memory after its pieces have been written into its boxes, and how often each element was."""
    memory = storages(manifest, EMPTY)
    counts = {name: np.zeros(len(array), np.int64) for name, array in memory.items()}
    entries = manifest.by_name()
    for read, values in arriving:
        entry, turn = entries[read.name], -1 if entries[read.name].transform == "transpose" else 1
        start, size, values = read.start[::turn], read.size[::turn], values.T if turn < 0 else values
        for one in entry.boxes:
            low = tuple(map(max, start, one.start))
            high = tuple(min(s + n, t + m) for s, n, t, m in zip(start, size, one.start, one.size, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                common = tuple(b - a for a, b in zip(low, high, strict=True))
                target = within(low, common, one.start)
                place(memory[one.storage], one)[target] = values[within(low, common, start)]
                place(counts[one.storage], one)[target] += 1
    return memory, counts


def prove(weights, sources, engines, **more):
    """Plan, carry out, and check every element of every sink rank; returns the plan.

    Each wanted element is written exactly once and has its value, nothing else is touched, and each element of the
    weights leaves the sources once.
    """
    plan = plan_transfer(sources, engines, **more)
    buckets = staged(plan, [held(source, weights) for source in sources])
    for number, engine in enumerate(engines):
        for rank, sink in enumerate(engine):
            memory, counts = write(sink, pieces(plan, buckets, number, rank))
            for entry in sink:
                for one in entry.boxes:
                    data = weights[entry.name].T if entry.transform == "transpose" else weights[entry.name]
                    got = place(memory[one.storage], one)
                    assert (got == data[within(one.start, one.size, (0,) * len(one.start))]).all(), entry.name
                    place(counts[one.storage], one)[...] -= 1
            assert not any(count.any() for count in counts.values())
    sent = {name: np.zeros(value.shape, np.int64) for name, value in weights.items()}
    for b in plan.blocks:
        sent[b.name][within(b.start, b.size, (0,) * len(b.start))] += 1
    assert all((count == 1).all() for name, count in sent.items() if name in {e.name for e in sources[0]})
    return plan


def ranks(world, entries_of, **more):
    """Return the manifests of all ranks; entries_of(rank) gives a rank's entries."""
    return [Manifest(rank, world, tuple(entries_of(rank)), **more) for rank in range(world)]


def chunk(length, parts, rank):
    """Return (start, size) of a rank's part as torch.chunk deals: all of ceil(length / parts) but the last ones."""
    step = -(-length // parts)
    start = min(length, step * rank)
    return start, min(step, length - start)


def cut(name, shape, axis, parts, rank, storage=None, offset=0, dtype="int64"):
    """Return the entry of a rank that holds its chunk along one axis, contiguously."""
    at, n = chunk(shape[axis], parts, rank)
    start = tuple(at if i == axis else 0 for i in range(len(shape)))
    size = tuple(n if i == axis else length for i, length in enumerate(shape))
    boxes = (box(start, size, storage or name, offset),) if n else ()
    return Entry(name, dtype, tuple(shape), boxes)

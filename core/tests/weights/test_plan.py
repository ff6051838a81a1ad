"""The transfer plan: matching, cover, replicas, buckets."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.errors import ConfigError, Violations
from powertrain.weights import Box, Entry, Manifest, plan_transfer


def box(start, size, name="w"):
    stride = tuple(prod(size[i + 1 :]) for i in range(len(size)))
    return Box(tuple(start), tuple(size), name, 0, stride)


def entry(name, shape, boxes=None, dtype="float32", **more):
    boxes = [((0,) * len(shape), shape)] if boxes is None else boxes
    return Entry(name, dtype, tuple(shape), tuple(box(*b, name) for b in boxes), **more)


def manifest(*entries, rank=0, world=1, **more):
    return Manifest(rank, world, entries, **more)


def move(plan, sources, sinks):
    """Carry the plan out with numpy; sources[rank][storage] flat arrays, sinks: a dict of arrays per engine rank."""
    area = [np.zeros(size, dtype=np.uint8) for size in plan.buckets]
    view = np.lib.stride_tricks.as_strided
    for b in plan.blocks:
        data = view(sources[b.rank][b.storage][b.place :], b.size, [4 * s for s in b.stride])
        area[b.bucket][b.offset : b.offset + b.bytes] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    for engine, ranks in zip(plan.reads, sinks, strict=True):
        for reads, arrays in zip(engine, ranks, strict=True):
            for r in reads:
                b = r.block
                data = area[b.bucket][b.offset : b.offset + b.bytes].view(np.float32).reshape(b.size)
                own = tuple(slice(s - o, s - o + n) for s, o, n in zip(r.start, b.start, r.size, strict=True))
                place = tuple(slice(s, s + n) for s, n in zip(r.start, r.size, strict=True))
                arrays[r.name][place] += data[own]


def test_shards_are_put_together_at_every_engine():
    whole = np.arange(15, dtype=np.float32).reshape(5, 3)
    sources = [
        manifest(entry("w", (5, 3), [((0, 0), (3, 3))]), rank=0, world=2),
        manifest(entry("w", (5, 3), [((3, 0), (2, 3))]), rank=1, world=2),
    ]
    sink = manifest(entry("w", (5, 3)))
    plan = plan_transfer(sources, [sink, sink])
    got = [[{"w": np.zeros((5, 3), np.float32)}] for _ in range(2)]
    move(plan, [{"w": whole[:3].reshape(-1)}, {"w": whole[3:].reshape(-1)}], got)
    assert all((g[0]["w"] == whole).all() for g in got)
    assert plan.bytes == whole.nbytes
    assert plan.pairs() == {(0, 0, 0): 36, (0, 1, 0): 36, (1, 0, 0): 24, (1, 1, 0): 24}


def test_range_that_no_source_holds_is_named():
    source = manifest(entry("w", (5, 3), [((0, 0), (2, 3))]))
    with pytest.raises(Violations, match=r"w\[2:5, 0:3\].*no source rank holds"):
        plan_transfer([source], [manifest(entry("w", (5, 3)))])


def test_replicas_are_sent_once_and_shared_out():
    sources = [manifest(*(entry(f"w{i}", (4, 4)) for i in range(4)), rank=r, world=2) for r in range(2)]
    plan = plan_transfer(sources, [manifest(*(entry(f"w{i}", (4, 4)) for i in range(4)))])
    assert [b.rank for b in plan.blocks] == [0, 1, 0, 1]
    assert plan.bytes == 4 * 64


def test_partial_overlap_is_sent_once():
    sources = [
        manifest(entry("w", (6,), [((0,), (4,))]), rank=0, world=2),
        manifest(entry("w", (6,), [((2,), (4,))]), rank=1, world=2),
    ]
    plan = plan_transfer(sources, [manifest(entry("w", (6,)))])
    assert [(b.rank, b.start, b.size, b.place) for b in plan.blocks] == [(0, (0,), (4,), 0), (1, (4,), (2,), 2)]


@pytest.mark.parametrize(
    ("source", "sink", "words"),
    [
        (["a", "b"], ["a"], "b is sent and the receiver has no such tensor"),
        (["a"], ["a", "b"], "b is wanted by the receiver and not sent"),
    ],
)
def test_name_of_one_side_alone_is_an_error(source, sink, words):
    with pytest.raises(Violations, match=words):
        plan_transfer([manifest(*(entry(n, (2,)) for n in source))], [manifest(*(entry(n, (2,)) for n in sink))])


def test_frozen_tensor_of_the_receiver_may_be_missing():
    sink = manifest(entry("a", (2,)), entry("visual.patch", (2,), frozen=True))
    plan = plan_transfer([manifest(entry("a", (2,)))], [sink])
    assert [read.name for read in plan.reads[0][0]] == ["a"]


def test_all_faults_are_told_at_once():
    source = manifest(entry("a", (2,)), entry("b", (2,)), entry("c", (2,)))
    sink = manifest(entry("a", (3,)), entry("b", (2,), dtype="bfloat16"))
    with pytest.raises(Violations) as caught:
        plan_transfer([source], [sink])
    assert len(caught.value.problems) == 3
    assert "[2] at the sender and [3] at the receiver" in str(caught.value)


def test_dtype_that_the_sink_accepts_passes():
    sink = manifest(entry("a", (2,), dtype="bfloat16", accepts=("float32",)))
    assert plan_transfer([manifest(entry("a", (2,)))], [sink]).bytes == 8


@pytest.mark.parametrize("sender_alias", ["head", "embed"])
@pytest.mark.parametrize("receiver_alias", ["head", "embed"])
def test_tied_weight_travels_once_whichever_name_each_side_lists(sender_alias, receiver_alias):
    names = {"head": "embed", "embed": "head"}
    source = manifest(entry(names[sender_alias], (2,)), tied={sender_alias: names[sender_alias]})
    sink = manifest(entry(names[receiver_alias], (2,)), tied={receiver_alias: names[receiver_alias]})
    plan = plan_transfer([source], [sink])
    assert plan.bytes == 8
    assert [read.name for read in plan.reads[0][0]] == [names[receiver_alias]]


def test_tied_sender_fills_both_of_an_untied_receiver():
    source = manifest(entry("embed", (2,)), tied={"head": "embed"})
    plan = plan_transfer([source], [manifest(entry("embed", (2,)), entry("head", (2,)))])
    assert plan.bytes == 8
    assert sorted(read.name for read in plan.reads[0][0]) == ["embed", "head"]


def test_untied_sender_into_tied_receiver_is_refused():
    source = manifest(entry("embed", (2,)), entry("head", (2,)))
    with pytest.raises(Violations, match="embed and head would both be written"):
        plan_transfer([source], [manifest(entry("embed", (2,)), tied={"head": "embed"})])


def test_blocks_are_aligned_and_buckets_bounded():
    source = manifest(entry("a", (3, 5)), entry("row", (2, 300)), entry("b", (7,)))
    plan = plan_transfer([source], [source], bucket_bytes=512)
    assert max(plan.buckets) <= 512
    assert all(block.offset % 256 == 0 and block.bytes <= 512 for block in plan.blocks)
    assert sum(block.bytes for block in plan.blocks) == plan.bytes == 4 * (3 * 5 + 2 * 300 + 7)
    spans = sorted((b.bucket, b.offset, b.offset + b.bytes) for b in plan.blocks)
    assert all(x[0] != y[0] or x[2] <= y[1] for x, y in itertools.pairwise(spans))


def test_adapter_goes_whole_to_every_rank():
    source = manifest(entry("base_model.model.q.lora_A.weight", (8, 64)), kind="adapter")
    sinks = [[manifest(entry("q.weight", (64, 64), [((32 * r, 0), (32, 64))]), rank=r, world=2) for r in range(2)]]
    plan = plan_transfer([source], sinks)
    assert plan.kind == "adapter"
    assert [read.size for ranks in plan.reads[0] for read in ranks] == [(8, 64), (8, 64)]


def test_bucket_smaller_than_the_alignment_is_refused():
    source = manifest(entry("a", (2,)))
    with pytest.raises(ConfigError, match="255"):
        plan_transfer([source], [source], bucket_bytes=255)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_sharding_moves_every_element_once(data):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    cuts = sorted(data.draw(st.sets(st.integers(0, shape[0]), max_size=3)) | {0, shape[0]})
    whole = np.arange(1, prod(shape) + 1, dtype=np.float32).reshape(shape)
    parts = list(itertools.pairwise(cuts))
    sources = [
        manifest(entry("w", shape, [((a, *[0] * (len(shape) - 1)), (b - a, *shape[1:]))]), rank=r, world=len(parts))
        for r, (a, b) in enumerate(parts)
    ]
    wide = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(1, shape[wide]))
    halves = [(0, cut), (cut, shape[wide])] if cut < shape[wide] else [(0, cut)]
    ranges = [
        (
            tuple(a if i == wide else 0 for i in range(len(shape))),
            tuple(b - a if i == wide else n for i, n in enumerate(shape)),
        )
        for a, b in halves
    ]
    sinks = [[manifest(entry("w", shape, [r]), rank=i, world=len(ranges)) for i, r in enumerate(ranges)]]
    plan = plan_transfer(sources, sinks, bucket_bytes=data.draw(st.sampled_from([256, 512, 1 << 20])))
    got = [[{"w": np.zeros(shape, np.float32)} for _ in ranges]]
    move(plan, [{"w": np.ascontiguousarray(whole[a:b]).reshape(-1)} for a, b in parts], got)
    for (start, size), arrays in zip(ranges, got[0], strict=True):
        place = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
        assert (arrays["w"][place] == whole[place]).all()
        assert arrays["w"].sum() == whole[place].sum()
    assert plan == plan_transfer(sources, sinks, bucket_bytes=plan_bytes(plan))


def plan_bytes(plan):
    """Return a bucket bound under which the same plan comes out."""
    return max(256, max(plan.buckets))

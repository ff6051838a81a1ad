"""Plans of every kind of layout, carried out on weights in which no two elements are equal."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))
from carrying import box, cut, held, iota, prove, ranks, staged, whole

from powertrain.errors import Violations
from powertrain.weights import Entry, Manifest, plan_transfer

HEAD, HIDDEN = 3, 5


def interleaved(heads, kv, tp, rank):
    """One fused storage in which each query group's heads are followed by its key and value head."""
    per, groups = heads // kv, kv // tp
    sizes = {"q": (heads * HEAD, HIDDEN), "k": (kv * HEAD, HIDDEN), "v": (kv * HEAD, HIDDEN)}
    boxes = {name: [] for name in sizes}
    for local in range(groups):
        group = rank * groups + local
        row = local * (per + 2) * HEAD
        for name, first, count in (("q", 0, per), ("k", per, 1), ("v", per + 1, 1)):
            start, size = (group * count * HEAD, 0), (count * HEAD, HIDDEN)
            boxes[name].append(box(start, size, "qkv", (row + first * HEAD) * HIDDEN))
    return [Entry(name, "int64", sizes[name], tuple(boxes[name])) for name in sizes]


def blocks(heads, kv, tp, rank):
    """One fused storage: all query heads of the rank, then its key heads, then its value heads; kv < tp: replicas."""
    own_kv, own = max(1, kv // tp), heads // tp
    first = rank * kv // tp
    places = {"q": (rank * own, own, heads), "k": (first, own_kv, kv), "v": (first, own_kv, kv)}
    entries, row = [], 0
    for name, (start, count, of) in places.items():
        one = box((start * HEAD, 0), (count * HEAD, HIDDEN), "qkv", row * HIDDEN)
        entries.append(Entry(name, "int64", (of * HEAD, HIDDEN), (one,)))
        row += count * HEAD
    return entries


FUSED = {"interleaved": interleaved, "blocks": blocks}


@pytest.mark.parametrize(("sender", "receiver"), list(itertools.product(FUSED, FUSED)))
@pytest.mark.parametrize(("heads", "kv", "sends", "takes"), [(8, 4, 2, 4), (8, 2, 1, 2), (6, 2, 2, 1), (4, 4, 4, 2)])
def test_grouped_query_heads_arrive_in_either_order(sender, receiver, heads, kv, sends, takes):
    shapes = {"q": (heads * HEAD, HIDDEN), "k": (kv * HEAD, HIDDEN), "v": (kv * HEAD, HIDDEN)}
    sources = ranks(sends, lambda rank: FUSED[sender](heads, kv, sends, rank))
    prove(iota(shapes), sources, [ranks(takes, lambda rank: FUSED[receiver](heads, kv, takes, rank))])


@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("way", ["to", "from"])
def test_key_heads_are_replicated_where_tensor_parallel_exceeds_them(tp, way):
    heads, kv = 8, 2
    shapes = {"q": (heads * HEAD, HIDDEN), "k": (kv * HEAD, HIDDEN), "v": (kv * HEAD, HIDDEN)}
    wide = ranks(tp, lambda rank: blocks(heads, kv, tp, rank))
    narrow = ranks(2, lambda rank: interleaved(heads, kv, 2, rank))
    sources, sinks = (narrow, wide) if way == "to" else (wide, narrow)
    plan = prove(iota(shapes), sources, [sinks])
    assert plan.bytes == 8 * sum(np.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize(("sends", "takes"), [(1, 2), (4, 2), (2, 3)])
def test_gate_and_up_are_fused_on_both_sides(sends, takes):
    shapes = {"gate": (12, HIDDEN), "up": (12, HIDDEN), "down": (HIDDEN, 12)}

    def fused(tp):
        return lambda rank: [
            cut("gate", (12, HIDDEN), 0, tp, rank, "gate_up"),
            cut("up", (12, HIDDEN), 0, tp, rank, "gate_up", 12 // tp * HIDDEN),
            cut("down", (HIDDEN, 12), 1, tp, rank),
        ]

    prove(iota(shapes), ranks(sends, fused(sends)), [ranks(takes, fused(takes))])


def test_fused_projections_of_latent_attention():
    rank_q, rank_kv = 6, 4
    shapes = {"q_a": (rank_q, HIDDEN), "kv_a": (rank_kv, HIDDEN), "kv_b": (8, rank_kv)}

    def apart(rank):
        return [cut(name, shape, 0, 4, rank) for name, shape in shapes.items()]

    def fused(rank):
        both = [
            Entry("q_a", "int64", shapes["q_a"], (box((0, 0), shapes["q_a"], "qkv_a"),)),
            Entry("kv_a", "int64", shapes["kv_a"], (box((0, 0), shapes["kv_a"], "qkv_a", rank_q * HIDDEN),)),
        ]
        return [*both, cut("kv_b", shapes["kv_b"], 0, 2, rank)]

    prove(iota(shapes), ranks(4, apart), [ranks(2, fused)] * 2)


def vocabulary(padded, of):
    """Rows of an embedding that is padded to a multiple and cut evenly; boxes end where the vocabulary does."""

    def entries(tp):
        def of_rank(rank):
            per = padded // tp
            start, size = min(of, rank * per), max(0, min(of, (rank + 1) * per) - rank * per)
            boxes = (box((start, 0), (size, HIDDEN), "embed"),) if size else ()
            return [Entry("embed", "int64", (of, HIDDEN), boxes)]

        return of_rank

    return entries


@pytest.mark.parametrize(("sends", "takes"), [(2, 4), (4, 2), (8, 1)])
def test_padding_of_a_vocabulary_is_never_sent(sends, takes):
    sources = ranks(sends, vocabulary(32, 19)(sends))
    plan = prove(iota({"embed": (19, HIDDEN)}), sources, [ranks(takes, vocabulary(24, 19)(takes))])
    assert plan.bytes == 19 * HIDDEN * 8


def test_box_that_takes_padding_along_is_refused():
    source = Manifest(0, 1, (Entry("embed", "int64", (19, HIDDEN), (box((0, 0), (24, HIDDEN), "embed"),)),))
    with pytest.raises(Violations, match=r"embed\[19:24, 0:5\] of source rank 0 lies outside of shape \[19, 5\]"):
        plan_transfer([source], [Manifest(0, 1, (whole("embed", (19, HIDDEN)),))])


EXPERTS = {f"experts.{e}.{name}": shape for e in range(8) for name, shape in {"up": (6, 4), "down": (4, 6)}.items()}


def by_expert(parts, *, storage="apart"):
    """Experts dealt over ranks by their global number, in one storage for all of a kind or each in its own."""

    def of_rank(rank):
        for name, shape in EXPERTS.items():
            number, short = int(name.split(".")[1]), name.split(".")[2]
            at = number - rank * 8 // parts
            mine = 0 <= at < 8 // parts
            where = (short, at * shape[0] * shape[1]) if storage == "stacked" else (name, 0)
            yield Entry(name, "int64", shape, (box((0, 0), shape, *where),) if mine else ())

    return of_rank


def by_row(parts):
    """All experts on all ranks, stacked, each cut along its inner dimension."""

    def of_rank(rank):
        for name, shape in EXPERTS.items():
            number, short = int(name.split(".")[1]), name.split(".")[2]
            entry = cut(name, shape, 0 if short == "up" else 1, parts, rank)
            one = entry.boxes[0]
            yield Entry(name, "int64", shape, (box(one.start, one.size, short, number * 24 // parts),))

    return of_rank


@pytest.mark.parametrize(
    ("sources", "sinks"),
    [
        (ranks(4, by_expert(4)), ranks(2, by_row(2))),
        (ranks(4, by_expert(4)), ranks(2, by_expert(2, storage="stacked"))),
        (ranks(2, by_row(2)), ranks(8, by_expert(8, storage="stacked"))),
    ],
    ids=["expert to tensor parallel", "expert to expert parallel", "tensor to expert parallel"],
)
def test_experts_keep_their_global_numbers(sources, sinks):
    prove(iota(EXPERTS), sources, [sinks])


def staged_layers(counts):
    """Layers dealt over pipeline stages, which hold different numbers of them."""
    firsts = list(itertools.accumulate(counts, initial=0))

    def of_rank(rank):
        mine = range(firsts[rank], firsts[rank + 1])
        boxes = {i: (box((0, 0), (3, 2), f"local.{i - firsts[rank]}"),) for i in mine}
        return [Entry(f"layers.{i}", "int64", (3, 2), boxes.get(i, ())) for i in range(firsts[-1])]

    return ranks(len(counts), of_rank)


@pytest.mark.parametrize(("sends", "takes"), [((3, 4, 4, 2), (13,)), ((7, 6), (5, 4, 4)), ((13,), (1, 12))])
def test_pipeline_stages_of_different_length(sends, takes):
    prove(iota({f"layers.{i}": (3, 2) for i in range(13)}), staged_layers(sends), [staged_layers(takes)])


@pytest.mark.parametrize("shape", [(7,), (7, 3), (5, 7), (3, 5, 7)])
@pytest.mark.parametrize(("sends", "takes"), [(2, 3), (4, 1), (3, 5)])
def test_uneven_chunks_of_any_dimension(shape, sends, takes):
    for out, into in itertools.product(range(len(shape)), repeat=2):
        sources = ranks(sends, lambda rank, axis=out: [cut("w", shape, axis, sends, rank)])
        prove(iota({"w": shape}), sources, [ranks(takes, lambda rank, axis=into: [cut("w", shape, axis, takes, rank)])])


def test_tied_weight_is_sent_once_and_written_once():
    source = Manifest(0, 1, (whole("embed", (6, 4)),), {"head": "embed"})
    plan = prove(iota({"embed": (6, 4)}), [source], [[Manifest(0, 1, (whole("embed", (6, 4)),), {"head": "embed"})]])
    assert plan.bytes == 6 * 4 * 8


def test_strided_storage_on_both_sides():
    shapes = {"a": (4, 3), "b": (4, 2)}
    columns = (Entry("a", "int64", (4, 3), (box((0, 0), (4, 3), "ab", 0, (5, 1)),)),)
    columns += (Entry("b", "int64", (4, 2), (box((0, 0), (4, 2), "ab", 3, (5, 1)),)),)
    turned = (Entry("a", "int64", (4, 3), (box((0, 0), (4, 3), "a", 0, (1, 4)),)), whole("b", (4, 2)))
    prove(iota(shapes), [Manifest(0, 1, columns)], [[Manifest(0, 1, turned)]])
    prove(iota(shapes), [Manifest(0, 1, turned)], [[Manifest(0, 1, columns)]])


def test_sink_that_transposes_is_given_the_senders_ranges():
    shape = (6, 4)
    sinks = ranks(2, lambda rank: [Entry("w", "int64", (4, 6), (box((2 * rank, 0), (2, 6)),), transform="transpose")])
    sources = ranks(3, lambda rank: [cut("w", shape, 0, 3, rank)])
    plan = prove(iota({"w": shape}), sources, [sinks])
    assert [(read.start, read.size) for read in plan.reads[0][1]] == [((2 * i, 2), (2, 2)) for i in range(3)]


def test_shape_that_fits_neither_way_is_refused_by_a_sink_that_transposes():
    sink = Manifest(0, 1, (whole("w", (6, 4), transform="transpose"),))
    with pytest.raises(Violations, match=r"\[6, 4\] at the sender and \[6, 4\] at the receiver, which it transposes"):
        plan_transfer([Manifest(0, 1, (whole("w", (6, 4)),))], [sink])


@st.composite
def partition(draw, shape):
    """Cut a tensor into boxes by straight cuts, each of which goes on in one part alone."""
    parts = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 5))):
        start, size = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        parts.append((start, tuple(at if i == axis else n for i, n in enumerate(size))))
        moved = tuple(s + at if i == axis else s for i, s in enumerate(start))
        parts.append((moved, tuple(n - at if i == axis else n for i, n in enumerate(size))))
    return parts


def dealt(name, shape, parts, owners, world):
    """Return each rank's entry: parts dealt by `owners` (a set of ranks for each), one behind the other in memory."""

    def of_rank(rank):
        boxes, offset = [], 0
        for (start, size), mine in zip(parts, owners, strict=True):
            if rank in mine:
                boxes.append(box(start, size, name, offset))
                offset += int(np.prod(size))
        return Entry(name, "int64", shape, tuple(boxes))

    return [of_rank(rank) for rank in range(world)]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_boxes_on_both_sides_whatever_the_bucket_and_the_order(data):
    names = ["a", "b", "c"]
    shapes = {n: data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), n) for n in names}
    rows, sinks = [], []
    for name, shape in shapes.items():
        out, into = data.draw(partition(shape)), data.draw(partition(shape))
        owner = st.sets(st.integers(0, 2), min_size=1)
        rows.append(dealt(name, shape, out, [data.draw(owner) for _ in out], 3))
        sinks.append(dealt(name, shape, into, [{data.draw(st.integers(0, 1))} for _ in into], 2))
    for order in (names, data.draw(st.permutations(names))):
        picked = [names.index(name) for name in order]
        sources = ranks(3, lambda rank, picked=picked: [rows[i][rank] for i in picked])
        engine = ranks(2, lambda rank: [row[rank] for row in sinks])
        prove(iota(shapes), sources, [engine, engine], bucket_bytes=data.draw(st.sampled_from([256, 512, 1 << 30])))


def test_replicas_share_the_sending_and_equal_engines_the_plan():
    shapes = {f"w{i}": (4, 4) for i in range(8)}
    sources = ranks(4, lambda rank: [whole(name, shape) for name, shape in shapes.items()])
    sinks = [ranks(2, lambda rank: [cut(name, (4, 4), 0, 2, rank) for name in shapes]) for _ in range(3)]
    plan = prove(iota(shapes), sources, sinks)
    assert {rank: sum(b.bytes for b in plan.blocks if b.rank == rank) for rank in range(4)} == dict.fromkeys(
        range(4), 256
    )
    assert plan.reads[0] == plan.reads[1] == plan.reads[2]


def test_bytes_of_a_bucket_are_those_of_its_blocks():
    weights = iota({"a": (7, 5), "b": (300,), "c": (2, 2)})
    source = Manifest(0, 1, tuple(whole(name, value.shape) for name, value in weights.items()))
    plan = plan_transfer([source], [source], bucket_bytes=1024)
    assert max(plan.buckets) <= 1024
    ends = [max(b.offset + b.bytes for b in plan.blocks if b.bucket == i) for i in range(len(plan.buckets))]
    assert ends == list(plan.buckets) == [len(bucket) for bucket in staged(plan, [held(source, weights)])]

"""What a plan refuses: each fault names the tensor, the range and the rank."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from carrying import box, cut, ranks, whole

from powertrain.errors import ConfigError, Violations
from powertrain.weights import Entry, Manifest, plan_transfer

SHAPE = (6, 4)


def one(*entries, **more):
    return Manifest(0, 1, entries, **more)


def entry(*boxes, name="w", shape=SHAPE):
    return Entry(name, "int64", shape, boxes)


def refused(sources, sinks):
    with pytest.raises(Violations) as caught:
        plan_transfer(sources, sinks)
    return caught.value.problems


def test_range_in_two_boxes_of_a_sink_rank_is_named():
    sinks = ranks(2, lambda rank: [entry(box((0, 0), (4, 4), "a"), box((3, 1), (3, 3), "b"))])
    assert refused([one(whole("w", SHAPE))], [sinks]) == ("w[3:4, 1:4] is held twice by sink rank 0",)


def test_range_in_two_boxes_of_a_source_rank_is_named():
    source = one(entry(box((0, 0), (4, 4), "a"), box((2, 0), (4, 4), "b")))
    assert refused([source], [one(whole("w", SHAPE))]) == ("w[2:4, 0:4] is held twice by source rank 0",)


def test_box_beyond_its_tensor_is_named():
    assert refused([one(whole("w", SHAPE))], [one(entry(box((4, 0), (4, 4))))]) == (
        "w[6:8, 0:4] of sink rank 0 lies outside of shape [6, 4]",
    )


def test_box_of_other_dimensions_is_named():
    assert refused([one(entry(box((0,), (24,))))], [one(whole("w", SHAPE))]) == (
        "w has shape [6, 4] and at source rank 0 a box [24] in it",
    )


def test_range_that_is_missing_is_named_for_each_part():
    sources = ranks(2, lambda rank: [entry(box((3 * rank, 0), (2, 4)))])
    lack = "is wanted by the receiver and no source rank holds it"
    assert refused(sources, [one(whole("w", SHAPE))]) == (f"w[2:3, 0:4] {lack}", f"w[5:6, 0:4] {lack}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (box((0, 0), SHAPE, "m"), box((0, 0), SHAPE, "m", 23)),
        (box((0, 0), SHAPE, "m", 0, (8, 1)), box((0, 0), SHAPE, "m", 3, (8, 1))),
        (box((0, 0), SHAPE, "m", 0, (8, 1)), box((0, 0), SHAPE, "m", 4, (1, 6))),
        (box((0, 0), SHAPE, "m", 0, (2, 12)), box((0, 0), SHAPE, "m", 46)),
    ],
    ids=["end on start", "columns", "rows on columns", "last element"],
)
def test_tensors_in_the_same_memory_of_a_sink_are_named(first, second):
    source = one(whole("w", SHAPE), whole("v", SHAPE))
    [problem] = refused([source], [one(entry(first), entry(second, name="v"))])
    assert problem.endswith("[0:6, 0:4] lie in the same memory of sink rank 0, 'm'")
    assert {"w[0:6, 0:4]", "v[0:6, 0:4]"} <= {problem.split(" and ")[0], problem.split(" and ")[1].split(" lie")[0]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (box((0, 0), SHAPE, "m"), box((0, 0), SHAPE, "m", 24)),
        (box((0, 0), SHAPE, "m", 0, (8, 1)), box((0, 0), SHAPE, "m", 4, (8, 1))),
        (box((0, 0), SHAPE, "m", 0, (2, 12)), box((0, 0), SHAPE, "m", 1, (2, 12))),
    ],
    ids=["one behind the other", "columns", "every other"],
)
def test_tensors_that_only_interleave_are_taken(first, second):
    source = one(whole("w", SHAPE), whole("v", SHAPE))
    assert plan_transfer([source], [one(entry(first), entry(second, name="v"))]).bytes == 2 * 24 * 8


def test_ranks_that_list_other_tensors_are_named():
    sources = [one(whole("w", SHAPE)), Manifest(1, 2, (whole("w", (6, 5)),))]
    told = "source rank 1 lists other tensors, shapes or dtypes than rank 0"
    assert refused(sources, [one(whole("w", SHAPE))])[0] == told
    assert "sink rank 1 lists other" in refused([one(whole("w", SHAPE))], [sources])[0]


def test_very_many_faults_are_counted():
    source = one(*(whole(f"w{i}", SHAPE) for i in range(250)))
    problems = refused([source], [one(*(whole(f"w{i}", (6, 5)) for i in range(250)))])
    assert (len(problems), problems[-1]) == (101, "and 150 more")


def test_plan_without_a_source_is_refused():
    with pytest.raises(ConfigError, match="needs a source"):
        plan_transfer([], [one(whole("w", SHAPE))])


FP8 = "float8_e4m3fn"
BLOCK = {"transform": "fp8_block", "scales": ("weight_scale_inv",)}


def fp8(**more):
    scale = Entry("up.weight_scale_inv", "float32", (1, 1), (box((0, 0), (1, 1), "s"),))
    return one(whole("up.weight", SHAPE, FP8, **more), scale)


def test_bfloat16_into_fp8_is_refused_without_a_transform():
    source = one(whole("up.weight", SHAPE, "bfloat16"))
    said = "up.weight is bfloat16 at the sender; the receiver holds float8_e4m3fn"
    assert refused([source], [fp8()])[0] == f"{said} and does not cast"
    cast = refused([source], [fp8(accepts=("bfloat16",))])
    assert cast[0] == f"{said} and names no transform that makes its scales"
    assert cast[1].startswith("up.weight_scale_inv is wanted by the receiver and not sent")


def test_bfloat16_into_fp8_with_a_transform_is_sent_as_it_is_and_its_scales_are_made():
    plan = plan_transfer([one(whole("up.weight", SHAPE, "bfloat16"))], [fp8(accepts=("bfloat16",), **BLOCK)])
    assert [(read.name, read.bytes) for read in plan.reads[0][0]] == [("up.weight", 48)]


def test_fp8_into_fp8_takes_the_scales_along():
    plan = plan_transfer([fp8()], [fp8(accepts=("bfloat16",), **BLOCK)])
    assert [read.name for read in plan.reads[0][0]] == ["up.weight", "up.weight_scale_inv"]
    alone = one(whole("up.weight", SHAPE, FP8))
    assert refused([alone], [fp8(accepts=("bfloat16",), **BLOCK)])[0] == (
        "up.weight_scale_inv is not sent, though it belongs to the values of up.weight, which is sent as float8_e4m3fn"
    )


def test_scales_of_the_sender_are_refused_where_the_receiver_makes_its_own():
    scale = Entry("up.weight_scale_inv", "float32", (1, 1), (box((0, 0), (1, 1), "s"),))
    source = one(whole("up.weight", SHAPE, "bfloat16"), scale)
    assert (
        "sent, though the receiver makes it of up.weight" in refused([source], [fp8(accepts=("bfloat16",), **BLOCK)])[0]
    )


def test_plain_cast_needs_no_transform():
    source = one(whole("w", SHAPE, "float32"))
    assert plan_transfer([source], [one(whole("w", SHAPE, "bfloat16", accepts=("float32",)))]).bytes == 96


def test_unevenly_cut_tensor_that_lacks_its_last_rank_is_named():
    sources = ranks(3, lambda rank: [cut("w", (7, 2), 0, 4, rank)])
    assert refused(sources, [one(whole("w", (7, 2)))]) == (
        "w[6:7, 0:2] is wanted by the receiver and no source rank holds it",
    )

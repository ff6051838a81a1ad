"""Cases reported of other programs: a tensor larger than a bucket, mixed dtypes in one, and names in wrappers."""

import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
from carrying import held, iota, pieces, prove, staged, whole, write

from powertrain.errors import Violations
from powertrain.weights import Manifest, plan_transfer
from powertrain.weights.boxes import ITEM_SIZE
from powertrain.weights.names import canonical_name, match_names

SHAPES = {"a": (10, 10), "big": (3, 300), "b": (16, 16), "c": (), "d": (0, 8)}


def one(shapes, dtype="float32", **more):
    return Manifest(0, 1, tuple(whole(name, shape, dtype) for name, shape in shapes.items()), **more)


def test_b17_row_larger_than_the_bucket_is_split():
    source = one(SHAPES)
    plan = plan_transfer([source], [source], bucket_bytes=1024)
    assert plan.bytes == 5028
    assert max(plan.buckets) <= 1024
    assert all(size > 0 for size in plan.buckets)
    names = [block.name for block in plan.blocks]
    assert list(dict.fromkeys(names)) == ["a", "big", "b", "c"]
    assert names.count("big") >= 4
    [b] = [block for block in plan.blocks if block.name == "b"]
    assert (b.bytes, b.offset) == (1024, 0)
    weights = {name: value.astype(np.float32) for name, value in iota(SHAPES).items()}
    memory, counts = write(source, pieces(plan, staged(plan, [held(source, weights)]), 0, 0))
    for name, shape in SHAPES.items():
        assert (memory[name][: prod(shape)] == weights[name].reshape(-1)).all()
        assert (counts[name][: prod(shape)] == 1).all()


@pytest.mark.parametrize("bucket_bytes", [256, 264, 1000, 1024, 4096, 1 << 30])
def test_b17_every_element_arrives_whatever_the_bucket(bucket_bytes):
    source = one(SHAPES, "int64")
    prove(iota(SHAPES), [source], [[source]], bucket_bytes=bucket_bytes)


def test_b19_mixed_dtypes_stand_aligned_and_arrive_bit_by_bit():
    values = {
        "s": ("uint8", np.array([1, 2, 3], np.uint8)),
        "w": ("bfloat16", np.array([0x3F80, 0x4000, 0x4040], np.uint16)),
        "g": ("float32", np.array([0.1, -0.1], np.float32)),
        "r": ("float64", np.array([1 / 3])),
    }
    source = Manifest(0, 1, tuple(whole(name, value.shape, dtype) for name, (dtype, value) in values.items()))
    plan = plan_transfer([source], [source])
    assert len(plan.buckets) == 1
    assert plan.bytes == 25
    assert all(block.offset % ITEM_SIZE[block.dtype] == 0 for block in plan.blocks)
    assert [block.dtype for block in plan.blocks] == [dtype for dtype, _ in values.values()]
    buckets = staged(plan, [held(source, {name: value for name, (_, value) in values.items()})])
    memory, _ = write(source, pieces(plan, buckets, 0, 0))
    for name, (_, value) in values.items():
        assert memory[name].dtype == value.dtype
        assert memory[name][: len(value)].tobytes() == value.tobytes()


SENT = {
    "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight": 1,
    "_orig_mod.model.norm.weight": 2,
    "module.model.embed_tokens.weight": 3,
    "base_model.model.lm_head.original_module.weight": 0,
    "base_model.model.lm_head.modules_to_save.default.weight": 5,
    "base_model.model.lm_head.modules_to_save.ref.weight": 9,
}
ARRIVES = {
    "model.layers.0.mlp.up_proj.weight": 1,
    "model.norm.weight": 2,
    "model.embed_tokens.weight": 3,
    "lm_head.weight": 5,
}
LEFT_OUT = (
    "base_model.model.lm_head.original_module.weight",
    "base_model.model.lm_head.modules_to_save.ref.weight",
)


def shapes(names):
    return dict.fromkeys(names, (2,))


def receiver(root):
    frozen = (whole("visual.patch.weight", (2,), frozen=True),) if root else ()
    return Manifest(0, 1, (*(whole(root + name, (2,), "int64") for name in ARRIVES), *frozen))


@pytest.mark.parametrize("root", ["", "language_model."])
def test_b35_wrapped_names_reach_the_receiver(root):
    source, sink = one(shapes(SENT), "int64"), receiver(root)
    plan = plan_transfer([source], [sink])
    weights = {name: np.full(2, value) for name, value in SENT.items()}
    memory, counts = write(sink, pieces(plan, staged(plan, [held(source, weights)]), 0, 0))
    assert {name: int(memory[root + name][0]) for name in ARRIVES} == ARRIVES
    assert all((counts[root + name][:2] == 1).all() for name in ARRIVES)
    assert not counts.get("visual.patch.weight", np.zeros(1)).any()
    assert plan.left_out == LEFT_OUT
    assert len(SENT) == len(plan.blocks) + len(plan.left_out)


@pytest.mark.parametrize("root", ["", "language_model."])
def test_b35_module_that_only_looks_like_a_wrapper_is_unmatched_under_its_full_name(root):
    names = [*SENT, "module_list.0.weight"]
    match = match_names(names, [entry.name for entry in receiver(root)])
    assert match.unmatched == ("module_list.0.weight",)
    assert len(names) == len(match.names) + len(match.unmatched) + len(match.left_out)
    with pytest.raises(
        Violations, match=r"^the weights.*\nmodule_list\.0\.weight is sent and the receiver has no such"
    ):
        plan_transfer([one(shapes(names), "int64")], [receiver(root)])


def test_b35_two_names_that_become_one_are_refused():
    names = [*SENT, "model.norm.weight"]
    with pytest.raises(
        Violations, match=r"_orig_mod.model.norm.weight and model.norm.weight would both become model.norm"
    ):
        plan_transfer([one(shapes(names), "int64")], [receiver("")])


def test_b35_nothing_matched_is_no_success():
    with pytest.raises(Violations) as caught:
        plan_transfer([one(shapes(["model"]), "int64")], [receiver("")])
    assert len(caught.value.problems) == 1 + len(ARRIVES)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("module.module.model.norm.weight", "model.norm.weight"),
        ("model.module.weight", "model.module.weight"),
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("base_model.encoder.weight", "base_model.encoder.weight"),
        ("module_list.0.weight", "module_list.0.weight"),
        ("lm_head.modules_to_save.weight", "lm_head.modules_to_save.weight"),
        ("base_model.model.q.lora_A.default.weight", "q.lora_A.default.weight"),
        ("module", "module"),
    ],
)
def test_wrappers_go_only_where_they_are_wrappers(name, short):
    assert canonical_name(name) == short


def test_name_that_the_receiver_has_is_left_as_it_is():
    match = match_names(["module.weight", "module.bias"], ["module.weight", "module.bias"])
    assert match.names == {"module.weight": "module.weight", "module.bias": "module.bias"}


def test_pairs_of_an_adapter_are_no_part_of_full_weights():
    names = ["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.default.weight"]
    with pytest.raises(Violations, match=r"lora_A\.default\.weight is sent and the receiver has no such tensor"):
        plan_transfer([one(shapes(names), "int64")], [one(shapes(["q.weight"]), "int64")])


def test_another_adapters_modules_are_taken_when_it_is_the_one():
    match = match_names(SENT, ARRIVES, adapter="ref")
    assert match.names["base_model.model.lm_head.modules_to_save.ref.weight"] == "lm_head.weight"

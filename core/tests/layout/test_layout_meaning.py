"""What layouts mean: worlds, instances, cards, ranks, expert sizes, pairs (reports B09, B23, B25, B33)."""

import copy
import pickle

import pytest

from powertrain.errors import ConfigError, DeviceError, LayoutError
from powertrain.layout import Expert, Layout, Place
from powertrain.specs import AxisSpec, BackendSpec


def test_design_examples_keep_their_text(parse):
    texts = [
        "fsdp:d4",
        "fsdp:d2|vllm:d2",
        "megatron:d2t4p2+sglang:d4t2",
        "sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4",
        "vllm[r1]:d2+vllm[r2]:d1t2+fsdp[actor]:d4",
        "fsdp:d2|vllm:d2?gpu_memory_utilization=0.6 via ipc",
    ]
    assert [str(parse(text)) for text in texts] == texts


def test_instances_come_from_the_serving_side(parse):  # B33
    layout = parse("megatron:d2t4p2+sglang:d4t2")
    train, infer = layout.parts
    assert (train.world, train.instances, train.cards_per_instance) == (16, 1, 16)
    assert (infer.world, infer.instances, infer.cards_per_instance) == (8, 4, 2)
    assert layout.cards == 24
    assert [infer.place(j).instance for j in range(8)] == [j // 2 for j in range(8)]
    assert [infer.place(j).coordinates["t"] for j in range(8)] == [j % 2 for j in range(8)]
    assert [infer.place(j).card for j in range(8)] == list(range(16, 24))


def test_instances_on_shared_cards_are_contiguous(parse):  # B33
    layout = parse("fsdp:d8|vllm:d2t2p2")
    infer = layout.part("vllm")
    assert (layout.cards, infer.instances, infer.cards_per_instance) == (8, 2, 4)
    assert [infer.place(rank).card for rank in range(8) if infer.place(rank).instance == 0] == [0, 1, 2, 3]
    assert [infer.place(rank).card for rank in range(8) if infer.place(rank).instance == 1] == [4, 5, 6, 7]


def test_each_data_rank_serves_alone(parse):  # B33
    (part,) = parse("vllm:d8").parts
    assert (part.instances, part.cards_per_instance) == (8, 1)


def test_instance_axis_is_slowest_whatever_the_spec_says(parse, catalogue):
    odd = BackendSpec(name="odd", role="infer", engine="nowhere:E", axes=("t", "d"))
    part = parse("odd:d2t2", registry=catalogue([odd])).parts[0]
    assert [part.place(j).instance for j in range(4)] == [0, 0, 1, 1]
    assert [part.place(j).coordinates for j in range(4)] == [{"d": d, "t": t} for d in (0, 1) for t in (0, 1)]


def test_ranks_follow_the_spec_order(parse):
    (part,) = parse("megatron:d2t2p2").parts
    assert part.place(5) == Place(5, 0, 5, {"p": 1, "d": 0, "c": 0, "t": 1})
    assert list(part.place(5).coordinates) == ["p", "d", "c", "t"]


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_outside_the_part_is_refused(parse, rank):
    with pytest.raises(ConfigError, match=f"ranks 0 to 3, not {rank}"):
        parse("fsdp:d4").parts[0].place(rank)


def test_inference_before_training_takes_the_first_cards(parse):
    layout = parse("vllm:d1t2+fsdp:d2")
    assert [list(part.cards) for part in layout.parts] == [[0, 1], [2, 3]]


def test_colocated_parts_have_the_same_cards(parse):  # B25
    layout = parse("fsdp:d4|vllm:d4")
    assert layout.cards == 4
    assert [part.cards for part in layout.parts] == [range(4), range(4)]
    layout.check_cluster(cards=4)


def test_separate_parts_share_no_card(parse):  # B25
    layout = parse("megatron:d2t1+sglang:d1t2")
    assert layout.cards == 4
    assert not set(layout.parts[0].cards) & set(layout.parts[1].cards)
    layout.check_cluster(cards=4)


def test_too_small_cluster_tells_the_sum(parse):  # B25
    with pytest.raises(DeviceError, match=r"needs 8 cards \(4 \+ 4\), the cluster has 4 \(1 x 4\);"):
        parse("megatron:d2t2+sglang:d2t2").check_cluster(cards=4, nodes=1)


def test_cluster_counts_all_nodes(parse):  # B25
    layout = parse("megatron:d2t4p2+sglang:d4t2")
    layout.check_cluster(cards=8, nodes=4)
    with pytest.raises(DeviceError, match=r"needs 24 cards \(16 \+ 8\), the cluster has 16 \(2 x 8\)"):
        layout.check_cluster(cards=8, nodes=2)


def test_colocated_sizes_must_be_equal(faults):  # B25
    ((at, message),) = faults("fsdp:d4|vllm:d2")
    assert at == 8
    assert "'fsdp' has 4 cards, 'vllm' has 2" in message


def test_expert_tensor_size_is_one_unless_given(parse):  # B09 (a)
    (part,) = parse("megatron:d1t4e4").parts
    assert (part.world, part.expert) == (4, Expert(ep=4, etp=1, dp=1))


def test_too_few_ranks_for_experts_are_refused(faults):  # B09 (b)
    ((at, message),) = faults("megatron:d4p2e8")
    assert at == 13
    assert "2*1*8 = 16" in message
    assert "world 8" in message


def test_expert_data_size_follows(parse):  # B09 (c)
    (part,) = parse("megatron:t2p2d4e4").parts
    assert (part.world, part.axes["d"], part.expert) == (16, 4, Expert(ep=4, etp=1, dp=2))


def test_given_expert_tensor_size_counts(parse, faults):
    assert parse("megatron:d4t4e4?etp=2").parts[0].expert == Expert(ep=4, etp=2, dp=2)
    assert "1*4*2 = 8" in faults("megatron:d4e2?etp=4")[0][1]
    assert faults("megatron:d4?etp=3") == [
        (16, "expert layers need p*etp*e = 1*3*1 = 3 cards or a multiple; the world 4 is not")
    ]


def test_sections_lay_experts_out_apart(parse):
    (part,) = parse("megatron:(attn:d1p12t4|ffn:d1p12e4)").parts
    assert part.world == 48
    assert part.expert == Expert(ep=4, etp=1, dp=1)
    assert part.expert_axes == {"p": 12, "d": 1, "t": 1, "e": 4}
    assert str(part) == "megatron:(attn:d1t4p12|ffn:d1p12e4)"


def test_section_tensor_size_is_the_experts(parse):
    (part,) = parse("megatron:(attn:d2c2t2p2|ffn:d2t2e2p2)").parts
    assert (part.world, part.expert) == (16, Expert(ep=2, etp=2, dp=2))


def test_default_expert_tensor_size_does_not_contradict_a_section(parse):
    (part,) = parse("megatron:(attn:d2t2|ffn:t2e2)?etp=1").parts
    assert part.expert == Expert(ep=2, etp=2, dp=1)


def test_experts_lie_within_one_instance(parse, faults):
    assert parse("sglang:d2t4e4").parts[0].expert == Expert(ep=4, etp=1, dp=1)
    assert "instance of 2 cards" in faults("sglang:d4t2e4")[0][1]


def test_third_party_axis_multiplies_the_world(parse):
    (part,) = parse("acme:x3d2ring4pair2s6").parts
    assert (part.world, part.axes["x"], part.axes["s"]) == (48, 3, 6)
    assert part.place(47).coordinates == {"x": 2, "d": 1, "ring": 3, "pair": 1}


def test_third_party_instance_axis_counts_engines(parse):
    assert (lambda p: (p.world, p.instances))(parse("nine:n4t3").parts[0]) == (12, 4)


def test_axis_of_expert_layers_only_does_not_multiply_the_world(parse, catalogue):
    spec = BackendSpec(
        name="moe", role="train", engine="nowhere:E", axes=("d", "e", AxisSpec("g", "expert groups", section="ffn"))
    )
    assert parse("moe:d4g2", registry=catalogue([spec])).parts[0].world == 4
    assert parse("moe:(attn:d8|ffn:d2e2g2)", registry=catalogue([spec])).parts[0].world == 8


def test_leading_zeros_and_ones_mean_the_same(parse):
    assert parse("fsdp:d04t1") == parse("fsdp:d4")
    assert hash(parse("fsdp:d04t1")) == hash(parse("fsdp:d4"))


def test_blanks_around_operators_do_not_matter(parse):
    assert parse(" fsdp [ a ] : d2 ? lr=1 & note=x  via shm\n|\thf : d2 ") == parse(
        "fsdp[a]:d2?note=x&lr=1 via shm|hf:d2"
    )


def test_options_are_typed(parse):
    (part,) = parse("fsdp:d1?lr=1e-4&names=a,b&extra='{\"k\": [1, null]}'&note='it''s | a + b'&frozen=yes").parts
    assert part.options == {
        "lr": 1e-4,
        "names": ["a", "b"],
        "extra": {"k": [1, None]},
        "note": "it's | a + b",
        "frozen": True,
    }
    assert part.frozen
    assert "frozen" not in part.engine_options


def test_quoted_null_is_text(parse):
    options = [parse(f"fsdp:d1?note={value}").parts[0].options["note"] for value in ("null", "'null'", "''")]
    assert options == [None, "null", ""]


def test_core_options_reach_every_backend(parse):
    (part,) = parse("hf:d1?python='/env with blank/bin/python'&inline=false").parts
    assert (part.python, part.inline, part.frozen) == ("/env with blank/bin/python", False, False)


def test_unsaid_core_options_have_defaults(parse):
    (part,) = parse("hf:d1").parts
    assert (part.python, part.inline, part.frozen, part.options) == (None, None, False, {})


@pytest.mark.parametrize(
    "text", ["fsdp:d2|vllm:d2 via shm", "fsdp:d2 via shm|vllm:d2", "fsdp:d2 via shm+vllm:d2 via shm"]
)
def test_via_names_the_transfer_of_the_pair(parse, text):
    (pair,) = parse(text).pairs
    assert (pair.train.label, pair.infer.label, pair.via) == ("fsdp", "vllm", "shm")
    assert pair.colocated == ("+" not in text)


def test_via_behind_each_receiver_differs(parse):
    layout = parse("fsdp:d2|vllm[r1]:d2 via ipc+vllm[r2]:d2 via p2p")
    assert [(pair.infer.name, pair.via, pair.colocated) for pair in layout.pairs] == [
        ("r1", "ipc", True),
        ("r2", "p2p", False),
    ]


def test_frozen_parts_are_in_no_pair(parse):
    layout = parse("fsdp[actor]:d2+fsdp[ref]:d1?frozen=true+vllm[rollout]:d2+hf[judge]:d1?frozen=true")
    assert [(pair.train.name, pair.infer.name, pair.via) for pair in layout.pairs] == [("actor", "rollout", None)]


def test_part_is_found_by_label(parse):
    layout = parse("fsdp[actor]:d2|hf:d2")
    assert layout.part("actor").backend == "fsdp"
    assert layout.part("hf").role == "infer"
    assert layout.role("train") == (layout.part("actor"),)
    with pytest.raises(ConfigError, match=r"no part 'acter' \(did you mean 'actor'\?\); it has: actor, hf"):
        layout.part("acter")


def test_layout_survives_pickle_and_copy(parse):
    layout = parse("megatron:(attn:d2t2|ffn:e4)?etp=1+sglang:d2")
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.deepcopy(layout) == layout


def test_layout_error_is_a_value_error():
    assert issubclass(LayoutError, ValueError)


def test_mapping_is_plain(parse):
    assert parse("fsdp[a]:t2?note=x|hf:d2 via shm").to_mapping() == {
        "groups": [
            [
                {"backend": "fsdp", "name": "a", "axes": {"d": 1, "t": 2}, "options": {"note": "x"}},
                {"backend": "hf", "axes": {"d": 2}, "via": "shm"},
            ]
        ]
    }


def test_handwritten_mapping_is_read(parse, registry):
    mapping = {"groups": [[{"backend": "megatron", "name": None, "axes": {"d": 2}, "expert_axes": {"e": 2}}]]}
    assert Layout.from_mapping(mapping, registry=registry) == parse("megatron:(attn:d2|ffn:e2)")


def test_actor_alone_feeds_inference(parse):
    layout = parse("fsdp[actor]:d4|fsdp[critic]:d4+sglang[rollout]:d2")
    assert [(pair.train.label, pair.infer.label) for pair in layout.pairs] == [("actor", "rollout")]

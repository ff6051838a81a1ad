"""Plans between static manifests, carried out on weights in which no two elements are equal."""

import sys
from math import prod
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "core" / "tests" / "weights"))
from carrying import iota, prove

from powertrain.errors import ConfigError
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.tensors.checkpoint import parameters
from powertrain.weights.outline import outline

SIZES = {"vocab_size": 150, "hidden_size": 8, "num_hidden_layers": 5, "intermediate_size": 24, "dtype": "int64"}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 3, "q_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": 1, "v_head_dim": 2}
CONFIGS = {
    "llama": SIZES | HEADS | {"model_type": "llama", "tie_word_embeddings": True},
    "llama biased": SIZES | HEADS | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3": SIZES | HEADS | {"model_type": "qwen3"},
    "qwen3_moe": SIZES | HEADS | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [1]},
    "deepseek_v3": SIZES
    | {"model_type": "deepseek_v3", "num_attention_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1}
    | LATENT
    | EXPERTS,
}
CONFIGS["deepseek_v3 of one query projection"] = CONFIGS["deepseek_v3"] | {"q_lora_rank": None}
DENSE = [
    "megatron:d2t2p2+sglang:d2t4",
    "megatron:t4+vllm:d1t2p3",
    "megatron:d1c2p3+sglang:d1t2p4",
    "megatron:p5t2+vllm:d1t8",
    "megatron:d2p5|vllm:d5t2?dtype=auto",
]
SPARSE = [
    "megatron:d2t2p2e4+sglang:d1t4",
    "megatron:d4e2?etp=2+sglang:d1t4e2",
    "megatron:(attn:d2t2p2|ffn:d1t1p2e4)+vllm:d2t4e4",
    "megatron:d2p5e2+vllm:d1t2",
]
STACKED = ["fsdp:d3+hf:d1", "fsdp:d5+sglang:d1t4e2", "fsdp:d9+vllm:d1t4e4", "megatron:d2t2p2e4+hf:d2"]
PLAIN = ["fsdp:d1+hf:d2", "fsdp:d3+vllm:d1t2p2", "fsdp:d2|sglang:d1t2", "megatron:t2p2+hf:d1"]
"""One side is transformers, with the experts of a layer stacked."""


def made(text, config):
    """Return the static manifests of both sides, one for each engine of the second."""
    registry, layout = Registry(), parse_layout(text)
    train, infer = layout.parts
    source = registry.load_class(train.spec, "manifest")(config, train)
    return source, [registry.load_class(infer.spec, "manifest")(config, infer)] * infer.instances


def each_rank(engine):
    return [engine.rank(rank) for rank in range(engine.world)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [(text, kind) for kind in CONFIGS for text in (DENSE if "moe" not in kind and "deep" not in kind else SPARSE)],
)
def test_every_element_arrives_once(text, kind):
    config = CONFIGS[kind]
    source, sinks = made(text, config)
    shapes = {own.name: own.shape for own in parameters(config)}
    plan = prove(iota(shapes), each_rank(source), [each_rank(sink) for sink in sinks], bucket_bytes=512)
    assert plan.bytes == sum(prod(own.shape) * (4 if own.dtype else 8) for own in parameters(config))
    assert {block.name for block in plan.blocks} == set(shapes)


@pytest.mark.parametrize(
    ("text", "kind"),
    [(text, kind) for kind in CONFIGS for text in (STACKED if "experts" in str(CONFIGS[kind]) else PLAIN)],
)
def test_transformers_on_one_side_knows_the_same_names(text, kind):
    """In float64, which holds these whole numbers as they are, since it keeps some routers in float32."""
    config = CONFIGS[kind] | {"dtype": "float64"}
    source, sinks = made(text, config)
    shapes = {own.name: own.shape for own in parameters(config)}
    plan = prove(iota(shapes), each_rank(source), [each_rank(sink) for sink in sinks], bucket_bytes=512)
    assert {block.name for block in plan.blocks} == set(shapes)


@pytest.mark.parametrize("text", SPARSE)
@pytest.mark.parametrize("bucket_bytes", [512, 4096, 1 << 30])
def test_outline_tells_what_the_whole_plan_does(text, bucket_bytes):
    source, sinks = made(text, CONFIGS["deepseek_v3"])
    short = outline(source, sinks, bucket_bytes=bucket_bytes)
    plan = short.expand()
    assert (short.bytes, short.buckets, short.pairs()) == (plan.bytes, plan.buckets, plan.pairs())
    for engine, ranks in enumerate(plan.reads):
        for rank, reads in enumerate(ranks):
            assert short.reads(engine, rank) == reads
    put, taken = {}, {}
    for block in plan.blocks:
        put[block.bucket, block.rank] = put.get((block.bucket, block.rank), 0) + block.bytes
    for engine, ranks in enumerate(plan.reads):
        for rank, reads in enumerate(ranks):
            for read in reads:
                key = read.block.bucket, engine, rank
                taken[key] = taken.get(key, 0) + read.bytes
    assert short.peaks() == (max(put.values()), max(taken.values()))


def test_ranks_of_a_pipeline_hold_their_layers_alone():
    source, [sink] = made("megatron:p3+sglang:d1t1p4", CONFIGS["qwen3"])
    for engine, counts in ((source, [2, 2, 1]), (sink, [1, 1, 1, 2])):
        layers = [
            {e.name.split(".")[2] for e in rank if e.boxes and ".layers." in e.name} for rank in each_rank(engine)
        ]
        assert [len(of_rank) for of_rank in layers] == counts


def test_virtual_stages_take_turns():
    source, _ = made("megatron:p2?vpp=2+sglang:d1", CONFIGS["qwen3"] | {"num_hidden_layers": 8})
    name = "self_attn.o_proj.weight"
    where = [
        {
            entry.name.split(".")[2]: entry.boxes[0].storage
            for entry in rank
            if entry.boxes and entry.name.endswith(name)
        }
        for rank in each_rank(source)
    ]
    assert [sorted(of_rank) for of_rank in where] == [["0", "1", "4", "5"], ["2", "3", "6", "7"]]
    assert where[1]["7"] == "chunk1.decoder.layers.1.self_attention.linear_proj.weight"


def test_layout_of_fused_rows_is_the_engines():
    """Two groups of two query heads a rank: Megatron keeps each group together, SGLang all queries in front."""
    source, [sink] = made("megatron:t2+sglang:d1t2", CONFIGS["qwen3"])
    places = {}
    for side, engine in (("megatron", source), ("sglang", sink)):
        entries = engine.rank(1).by_name()
        boxes = [
            (box.offset // 8, letter, box.start[0] // 2, box.size[0] // 2)
            for letter in "qkv"
            for box in entries[f"model.layers.0.self_attn.{letter}_proj.weight"].boxes
        ]
        places[side] = sorted(boxes)
    assert places == {
        "megatron": [(0, "q", 4, 2), (4, "k", 2, 1), (6, "v", 2, 1), (8, "q", 6, 2), (12, "k", 3, 1), (14, "v", 3, 1)],
        "sglang": [(0, "q", 4, 4), (8, "k", 2, 2), (12, "v", 2, 2)],
    }


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("megatron:t8+sglang:d1t1", "qwen3", "part 'megatron': 4 key heads cannot be dealt evenly over 8"),
        ("megatron:t1+sglang:d1t3", "qwen3", "part 'sglang': 192 rows|cannot be dealt evenly over 3"),
        ("megatron:t1+vllm:d1t4e2", "qwen3_moe", "over all 4 ranks of t or over none, not over e2"),
        ("megatron:d3e3+vllm:d1", "qwen3_moe", "part 'megatron': 8 experts cannot be dealt evenly over 3"),
        ("megatron:t1+vllm:d1?quantization=fp8", "qwen3", "part 'vllm' quantises its weights"),
    ],
)
def test_what_cannot_be_dealt_is_refused(text, kind, words):
    with pytest.raises(ConfigError, match=words):
        made(text, CONFIGS[kind])

"""A manifest that is made from config and layout alone equals the running engine's, entry by entry and box by box."""

import json
from pathlib import Path

import pytest
import torch

import powertrain
from powertrain.interfaces.build import OptimSpec
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.tensors.checkpoint import read_config

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = LATENT | EXPERTS | {"n_routed_experts": 5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 4, "head_dim": 20}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe tied": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "num_experts": 3, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "num_experts": 5, "mlp_only_layers": [1]}),
    "deepseek_v3": ("DeepseekV3", ROUTED | {"q_lora_rank": 20}),
    "deepseek_v3 tied": ("DeepseekV3", ROUTED | {"q_lora_rank": 20, "tie_word_embeddings": True}),
    "deepseek_v3 of one query projection": ("DeepseekV3", ROUTED | {"q_lora_rank": None, "n_shared_experts": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that writes a tiny model of one of `MODELS` and returns its folder."""
    made = {}

    def write(kind):
        if kind not in made:
            import transformers

            from powertrain.tensors.models import quietly

            name, more = MODELS[kind]
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**SIZES | more)
            model = getattr(transformers, f"{name}ForCausalLM")(config)
            made[kind] = tmp_path_factory.mktemp("model")
            with quietly():
                model.save_pretrained(made[kind])
        return made[kind]

    return write


def static(engine, folder, dtype):
    [part] = parse_layout(engine).parts
    make = Registry().load_class(part.spec, "manifest")
    made = make(read_config(folder) | {"dtype": dtype}, part)
    return [made.rank(rank) for rank in range(part.cards_per_instance)]


def same(made, running):
    """Compare what a plan is made of; `meta` is the engine's own."""
    assert [(one.rank, one.world, one.kind, dict(one.tied)) for one in made] == [
        (one.rank, one.world, one.kind, dict(one.tied)) for one in running
    ]
    for mine, other in zip(made, running, strict=True):
        assert [entry.name for entry in mine] == [entry.name for entry in other]
        assert list(mine) == list(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_hf(kind, dtype, folder):
    with powertrain.open_engine("hf:d1", model=str(folder(kind)), device="cpu", dtype=dtype) as engine:
        [running] = engine.manifests()
    same(static("hf:d1", folder(kind), dtype), running)


@pytest.mark.parametrize("kind", MODELS)
def test_fsdp_of_one_rank(kind, folder):
    with powertrain.open_engine("fsdp:d1", model=str(folder(kind)), device="cpu", dtype="bfloat16") as engine:
        running = engine.manifests()
    same(static("fsdp:d1", folder(kind), "bfloat16"), running)


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("fsdp:d2", "llama tied"),
        ("fsdp:d2?master_dtype=float32", "deepseek_v3"),
        ("fsdp:d2", "qwen2"),
        ("fsdp:d2", "qwen3_moe"),
        ("fsdp:d4", "qwen3_moe"),
        ("fsdp:d3", "deepseek_v3 tied"),
        ("fsdp:d1?shard=always&master_dtype=float32", "qwen3"),
    ],
)
def test_fsdp_in_shards(engine, kind, folder):
    more = {"dtype": "bfloat16", "optim": OptimSpec(lr=1e-4)}
    with powertrain.open_engine(engine, model=str(folder(kind)), device="cpu", **more) as running:
        same(static(engine, folder(kind), "bfloat16"), running.manifests())


@pytest.mark.parametrize("kind", MODELS)
def test_names_and_shapes_are_those_of_the_checkpoint(kind, folder):
    from powertrain.tensors.checkpoint import parameters

    header = (Path(folder(kind)) / "model.safetensors").read_bytes()
    table = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    table.pop("__metadata__", None)
    told = {own.name: list(own.shape) for own in parameters(read_config(folder(kind)))}
    assert told == {name: one["shape"] for name, one in table.items()}

"""Tiny random models on disk, batches, and several ranks without paying for imports each time."""

import multiprocessing
import os
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from powertrain.interfaces.build import EngineSpec, OptimSpec
from powertrain.interfaces.data import TrainBatch

SCENARIOS = Path(__file__).with_name("scenarios.py")
VOCAB = 61
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


def _model(kind, tied, layers=2, **extra):
    import transformers

    config_name, model_name, more = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
        "deepseek": ("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
        "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.5}),
    }[kind]
    config_class, model_class = getattr(transformers, config_name), getattr(transformers, model_name)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    model = model_class(config_class(**(sizes | more), **extra))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_()
    return model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A function (kind, tied) -> folder of a tiny model with a tokenizer; each made once."""
    made = {}

    def make(kind="llama", tied=True):
        if (kind, tied) not in made:
            from tokenizers import Tokenizer
            from tokenizers.models import WordLevel
            from transformers import PreTrainedTokenizerFast

            folder = tmp_path_factory.mktemp(f"{kind}{tied}")
            _model(kind, tied).save_pretrained(folder)
            words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
            PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages }}").save_pretrained(folder)
            made[kind, tied] = str(folder)
        return made[kind, tied]

    return make


@pytest.fixture
def make_spec(model_folder):
    """A function that fills an EngineSpec with small defaults."""

    def make(kind="llama", tied=True, **changes):
        values = {
            "backend": "fsdp",
            "role": "train",
            "model": model_folder(kind, tied),
            "optim": OptimSpec(lr=1e-3, eps=1e-5, weight_decay=0.1, clip=0.5),
            "options": {"microbatch_tokens": 24},
            "timeout": 60.0,
        }
        return EngineSpec(**(values | changes))

    return make


def batch_of(seed=0, owners=(0, 0, 0, 1, 1, 2, 0)):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, VOCAB, n).tolist() for n in (5, 1, 9)]
    completions = [rng.integers(1, VOCAB, int(n)).tolist() for n in rng.integers(1, 8, len(owners))]
    batch = TrainBatch.from_sequences(
        [prompts[o] for o in owners],
        completions,
        token_fields={"advantages": [rng.normal(size=len(c)).tolist() for c in completions]},
        sample_fields={"scale": rng.uniform(0.5, 1.5, len(owners)).tolist()},
        groups=owners,
        meta={"turn": list(owners)},
    )
    batch.weights[:] *= rng.uniform(0.5, 1.5, len(batch.weights)).astype(np.float32)
    return batch


@pytest.fixture
def few_batches():
    """A batch of one sequence, and one that fills two ranks unevenly."""
    return [batch_of(5, owners=(0,)), batch_of(6, owners=(0, 1, 2, 2, 0))]


@pytest.fixture
def batches():
    return [batch_of(seed) for seed in range(3)]


@pytest.fixture
def run_ranks(tmp_path):
    """A function (scenario, world, **arguments) -> results in rank order, from forked children of a warm server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "powertrain_fsdp.engine",
            "peft",
            "transformers.models.llama.modeling_llama",
            "transformers.models.qwen3.modeling_qwen3",
        ]
    )
    count = iter(range(100))

    def run(scenario, world, **arguments):
        folder = tmp_path / f"ranks{next(count)}"
        folder.mkdir()
        children = []
        for rank in range(world):
            given = {"SCENARIO": scenario, "RANK": rank, "WORLD": world, "FOLDER": str(folder), "ARGUMENTS": arguments}
            children.append(context.Process(target=runpy.run_path, args=(str(SCENARIOS), given), daemon=True))
        for child in children:
            child.start()
        for child in children:
            child.join(timeout=120)
        codes = [child.exitcode for child in children]
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()
        assert codes == [0] * world, [p.read_text() for p in sorted(folder.glob("error-*"))] or codes
        return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(world)]

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run

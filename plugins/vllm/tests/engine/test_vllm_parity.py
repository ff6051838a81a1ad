"""Log-probs of vLLM beside a plain float32 forward of transformers on the same weights, before and after updates."""

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from powertrain import EngineSpec, GenerateRequest, SamplingParams
from powertrain.interfaces.weights import Piece
from powertrain.tensors.models import quietly
from powertrain.testing.tensors.reference import replay
from powertrain.weights import Update, WeightVersion
from powertrain_vllm.engine import VllmEngine
from powertrain_vllm.worker import derive, deriving

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # with the next the only sizes that vLLM has a kernel for on a CPU
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
ROUTED = {
    "topk_method": "noaux_tc",  # vLLM reads it and the next, transformers takes both for granted
    "scoring_func": "sigmoid",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-one-key-head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 1})),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False)),
    "qwen3-moe-tied": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=True)),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | LATENT | ROUTED)),
}
PROMPT = (3, 1, 4, 1, 5)


def model(kind, seed, folder):
    from safetensors.torch import load_file

    torch.manual_seed(seed)
    made = MAKERS[kind]().float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else None
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    with quietly():
        made.save_pretrained(folder)
    return made, load_file(folder / "model.safetensors")


def apart(made, completion):
    return float(np.abs(completion.logprobs_t1 - replay(made, PROMPT, completion.tokens)).max())


async def ask(engine, name):
    sampling = SamplingParams(max_tokens=24, n=4)
    request = GenerateRequest(request_id=name, prompt=np.asarray(PROMPT), sampling=sampling)
    return (await engine.generate(request)).completions


async def update(engine, tensors, counter):
    await engine.pause("wait")
    sink = engine.weights()
    sink.begin(Update(version=WeightVersion(1, counter)))
    sink.apply([Piece(entry.name, (0,) * len(entry.shape), tensors[entry.name]) for entry in sink.manifest()])
    sink.finish()
    await engine.resume(f"1.{counter}")


@pytest.mark.parametrize("kind", MAKERS)
async def test_logprobs_are_those_of_the_model_after_each_of_20_updates(kind, tmp_path):
    old, old_tensors = model(kind, 0, tmp_path / "old")
    new, new_tensors = model(kind, 1, tmp_path / "new")
    engine = VllmEngine()
    engine.prepare({})
    options = {"max_model_len": 128}
    await engine.build(EngineSpec(backend="vllm", role="infer", model=str(tmp_path / "old"), options=options))
    try:
        await engine.resume("1.1")
        assert max(apart(old, one) for one in await ask(engine, "first")) < 1e-4
        for counter in range(2, 22):
            now, tensors = (new, new_tensors) if counter % 2 == 0 else (old, old_tensors)
            await update(engine, tensors, counter)
            answers = await ask(engine, f"r{counter}")
            assert max(apart(now, one) for one in answers) < 1e-4
            assert {segment.version for one in answers for segment in one.segments} == {f"1.{counter}"}
    finally:
        await engine.close()


async def test_experts_of_a_compiled_model_take_updates_too(tmp_path):
    old, _ = model("qwen3-moe", 0, tmp_path / "old")
    new, new_tensors = model("qwen3-moe", 1, tmp_path / "new")
    engine = VllmEngine()
    engine.prepare({})
    options = {"max_model_len": 128, "enforce_eager": False}
    await engine.build(EngineSpec(backend="vllm", role="infer", model=str(tmp_path / "old"), options=options))
    try:
        await engine.resume("1.1")
        assert max(apart(old, one) for one in await ask(engine, "first")) < 1e-4
        await update(engine, new_tensors, 2)
        assert max(apart(new, one) for one in await ask(engine, "second")) < 1e-4
    finally:
        await engine.close()


def test_what_attention_derives_from_weights_is_made_anew_where_it_lay():
    class Absorbing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
            self.process_weights_after_loading(torch.float32)

        def process_weights_after_loading(self, act_dtype):
            self.turned = self.weight.t().to(act_dtype).contiguous()

    module = Absorbing()
    address = module.turned.data_ptr()
    module.weight.fill_(2.0)
    derive(deriving(torch.nn.Sequential(module, torch.nn.Linear(2, 2))))
    assert torch.equal(module.turned, torch.full((3, 2), 2.0))
    assert module.turned.data_ptr() == address

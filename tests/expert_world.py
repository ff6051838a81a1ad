"""Tiny random models with experts, on disk, and a trainer and a sampler that are held against each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from powertrain.interfaces.data import GenerateRequest, LossSpec, SamplingParams, TrainBatch

PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 4]]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
ROUTED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
KINDS = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "head_dim": 8, "num_key_value_heads": 2}),
    "deepseek_v3": ("DeepseekV3", LATENT | ROUTED | {"n_routed_experts": 8}),
}


def write(folder: Any, kind: str, **more: Any) -> str:
    """Write a model of one of `KINDS` in HF format, 8 experts a layer, and return its folder."""
    import torch
    import transformers

    from powertrain.tensors.models import quietly

    name, own = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | own | more)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            buffer.normal_(std=0.1)
    with quietly():
        model.save_pretrained(folder)
    return str(folder)


async def train(driver: Any) -> None:
    """Take one step with `fsdp`."""
    batch = TrainBatch.from_sequences(PROMPTS, [[5, 6, 7, 8], [9, 9, 3], [4, 4]], groups=[0, 0, 0])
    await driver.train["fsdp"].train_step(batch, LossSpec(name="powertrain.tensors.loss:cross_entropy"))


async def gap(driver: Any, adapter: str | None = None) -> float:
    """Return the largest |log-prob of hf - log-prob of fsdp| on what hf generates now."""
    params = SamplingParams(n=2, max_tokens=6)
    requests = [
        GenerateRequest(request_id=f"r{i}", prompt=np.array(p), sampling=params, adapter=adapter)
        for i, p in enumerate(PROMPTS)
    ]
    results = await driver.infer["hf"].generate_batch(requests)
    pairs = [(p, c) for p, result in zip(PROMPTS, results, strict=True) for c in result.completions]
    batch = TrainBatch.from_sequences([p for p, _ in pairs], [c.tokens.tolist() for _, c in pairs])
    told = np.concatenate([np.concatenate([np.zeros(len(p)), c.logprobs_t1]) for p, c in pairs])
    return float(np.abs(await driver.train["fsdp"].logprobs(batch) - told)[batch.weights > 0].max())

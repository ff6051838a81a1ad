"""Tiny random models, requests, and the hand that holds a decode step: what several test modules need."""

import asyncio
import contextlib
import threading

import numpy as np
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from powertrain import GenerateRequest, SamplingParams
from powertrain.interfaces.weights import Piece
from powertrain.weights import Update, WeightVersion

logging.disable_progress_bar()
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
MAKERS = {
    "window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "linear": lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
    "mixed": lambda: FalconH1ForCausalLM(FalconH1Config(**SIZES, **MAMBA, head_dim=16)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
}


class Models:
    """Models by (kind, seed), in memory and on disk."""

    def __init__(self, root):
        self.root, self.made = root, {}

    def model(self, kind="llama", seed=0):
        if (kind, seed) not in self.made:
            torch.manual_seed(seed)
            model = MAKERS[kind]().float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3.0) if parameter.dim() > 1 else None  # sharper than the tiny default
            self.made[kind, seed] = model
            model.save_pretrained(self.root / f"{kind}-{seed}")
        return self.made[kind, seed]

    def folder(self, kind="llama", seed=0):
        self.model(kind, seed)
        return str(self.root / f"{kind}-{seed}")


def request(name="r0", prompt=(3, 1, 4, 1, 5), adapter=None, **sampling):
    """Return a request with small defaults."""
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return GenerateRequest(request_id=name, prompt=np.asarray(prompt), sampling=params, adapter=adapter)


def replay(model, prompt, completion, temperature=1.0):
    """Return float64 log-probs of a completion's tokens by one plain forward of `model`."""
    ids = torch.tensor([[*prompt, *completion.tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].numpy()


def write(engine, model, counter):
    """Write a model's weights into a paused engine's sink, up to `finish`."""
    sink = engine.weights()
    sink.begin(Update(version=WeightVersion(1, counter)))
    named = dict(model.named_parameters())
    sink.apply([Piece(entry.name, (0,) * len(entry.shape), named[entry.name]) for entry in sink.manifest()])
    sink.finish()


@contextlib.asynccontextmanager
async def held_at(engine, step):
    """Hold the compute thread after its `step`-th decode step until the body says go; the body begins requests."""
    loop = asyncio.get_running_loop()
    reached, gate, count = asyncio.Event(), threading.Event(), 0
    original = engine._machine.step

    def counted(chunk):
        nonlocal count
        original(chunk)
        count += 1
        if count == step:
            loop.call_soon_threadsafe(reached.set)
            assert gate.wait(30)

    engine._machine.step = counted

    async def go():
        gate.set()
        await asyncio.sleep(0)

    try:
        yield reached, go
    finally:
        gate.set()
        engine._machine.step = original

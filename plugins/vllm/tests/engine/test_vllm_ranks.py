"""Engines of several cards, in workers that the driver starts: log-probs, updates, requests in flight, a dead rank."""

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from powertrain import EngineSpec, GenerateRequest, SamplingParams
from powertrain.errors import ConfigError, PowertrainError, StateError, WorkerError
from powertrain.interfaces.build import OptimSpec, RankSpec
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.weights import WeightVersion

_found = importlib.util.spec_from_file_location("vllm_models", Path(__file__).with_name("test_vllm_parity.py"))
parity = importlib.util.module_from_spec(_found)
_found.loader.exec_module(parity)

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


@pytest.fixture
def opened(tmp_path):
    """Return a function that makes a driver: the trainer has other weights than the engines begin with."""

    def make(kind, layout, **options):
        old, _ = parity.model(kind, 0, tmp_path / "old")
        new, _ = parity.model(kind, 1, tmp_path / "new")
        place, registry = RankSpec(device="cpu"), Registry()
        optim = OptimSpec(lr=1e-2)
        specs = {
            "fsdp": EngineSpec(
                backend="fsdp", role="train", model=str(tmp_path / "new"), place=place, optim=optim, timeout=60.0
            ),
            "vllm": EngineSpec(
                backend="vllm",
                role="infer",
                model=str(tmp_path / "old"),
                place=place,
                options={"max_model_len": 256, **options},
                timeout=60.0,
            ),
        }
        layout = parse_layout(layout, registry=registry)
        specs = {part.label: specs[part.label] for part in layout.parts}
        limits = {"start": 150.0, "update": 60.0, "generate": 60.0}
        folder = {"disk": {"folder": str(tmp_path / "weights")}}
        made = Driver(
            layout, specs, registry=registry, run_dir=tmp_path, inline="auto", timeouts=limits, transfer_options=folder
        )
        return made, old, new

    return make


def request(name, prompt, *, max_tokens=16, n=2, **more):
    sampling = SamplingParams(max_tokens=max_tokens, n=n)
    return GenerateRequest(request_id=name, prompt=np.asarray(prompt), sampling=sampling, **more)


async def apart(pool, model, name):
    """Return the largest difference of what is generated now from a plain forward of the model."""
    results = await pool.generate_batch([request(f"{name}-{i}", prompt) for i, prompt in enumerate(PROMPTS)])
    return max(
        np.abs(one.logprobs_t1 - parity.replay(model, prompt, one.tokens)).max()
        for prompt, result in zip(PROMPTS, results, strict=True)
        for one in result.completions
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3-moe-tied", "fsdp:d1+vllm:d2t2e2 via p2p"),
        ("qwen3-tied", "fsdp:d1+vllm:t2p2 via disk"),
        ("deepseek-v3", "fsdp:d1+vllm:t2 via shm"),
    ],
)
async def test_every_rank_takes_its_part_of_an_update(kind, layout, opened):
    driver, old, new = opened(kind, layout)
    async with driver:
        pool = driver.infer["vllm"]
        await pool.resume("1.1")
        assert await apart(pool, old, "old") < 1e-4
        for counter in (2, 3):  # the second time by a plan that is there already
            await driver.push("fsdp", "vllm", WeightVersion(1, counter))
            assert await apart(pool, new, f"new{counter}") < 1e-4

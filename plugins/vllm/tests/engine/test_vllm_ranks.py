"""Engines of several cards, in workers that the driver starts: log-probs, updates, requests in flight, a dead rank."""

import asyncio
import copy
import importlib.util
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from powertrain import EngineSpec, GenerateRequest, SamplingParams
from powertrain.errors import ConfigError, StateError, WorkerError
from powertrain.interfaces.build import OptimSpec, RankSpec
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.weights import WeightVersion


def beside(name):
    """Return a module that lies beside this one."""
    found = importlib.util.spec_from_file_location(f"vllm_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


parity, world = beside("test_vllm_parity"), beside("ranks_world")

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


async def test_stages_hold_their_layers(opened, tmp_path):
    driver, old, new = opened("qwen3-tied", "fsdp:d1+vllm:p2 via disk")
    async with driver:
        pool = driver.infer["vllm"]
        await pool.resume("1.1")
        assert await apart(pool, old, "old") < 1e-4
        await as_planned(pool, "vllm:p2", tmp_path / "old")
        for counter in (2, 3):  # the second time by a plan that is there already
            await driver.push("fsdp", "vllm", WeightVersion(1, counter))
            assert await apart(pool, new, f"new{counter}") < 1e-4


async def test_two_engines_of_two_ranks_and_one_rank_that_dies(opened, tmp_path):
    driver, old, new = opened("qwen3-moe-tied", "fsdp:d1+vllm:d2t2e2 via p2p")
    async with driver:
        pool = driver.infer["vllm"]
        await pool.resume("1.1")
        assert await apart(pool, old, "old") < 1e-4
        await as_planned(pool, "vllm:t2e2", tmp_path / "old")
        await driver.push("fsdp", "vllm", WeightVersion(1, 2))
        assert await apart(pool, new, "new") < 1e-4
        first, second = driver.handles["vllm/0"], driver.handles["vllm/1"]
        long = asyncio.create_task(first.call("generate", request("long", PROMPTS[0], max_tokens=200), deadline=30.0))
        await asyncio.sleep(0.5)
        [pid] = [status.pid for status in driver._launcher.status() if status.name == "vllm-0-r1"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rank 1 .*\(process \d+\) ended"):
            await long
        with pytest.raises(WorkerError, match="rank 1"):
            await first.call("generate", request("later", PROMPTS[0]), deadline=30.0)
        [result, _] = await second.call("generate", request("spared", PROMPTS[0]), deadline=30.0)
        assert len(result.completions) == 2


async def test_requests_in_flight_of_an_engine_of_two_ranks(opened, tmp_path):
    kind = "llama-one-key-head"  # both ranks have it
    driver, old, new = opened(kind, "fsdp:d1+vllm:t2 via shm", enable_lora=True, max_lora_rank=8, max_adapters=1)
    async with driver:
        pool, [engine] = driver.infer["vllm"], driver.infer["vllm"].handles
        await pool.resume("1.1")
        assert await apart(pool, old, "old") < 1e-4
        await refusals(pool, engine)
        await crowd(pool, old)

        frozen = asyncio.create_task(pool.generate(request("frozen", PROMPTS[0], max_tokens=200)))
        await running(pool)
        await driver.push("fsdp", "vllm", WeightVersion(1, 2), pause_mode="keep")
        for completion in (await frozen).completions:
            assert [segment.version for segment in completion.segments] == ["1.1", "1.2"]
            cut = completion.segments[1].start
            told, tokens = completion.logprobs_t1, completion.tokens
            assert np.abs(told[:cut] - parity.replay(old, PROMPTS[0], tokens)[:cut]).max() < 1e-4
            assert np.abs(told[cut:] - parity.replay(new, PROMPTS[0], tokens)[cut:]).max() < 1e-4

        unwanted = asyncio.create_task(pool.generate(request("unwanted", PROMPTS[0], max_tokens=200)))
        await running(pool)
        await pool.abort(["unwanted"])
        assert {one.finish for one in (await unwanted).completions} == {"abort"}
        cancelled = asyncio.create_task(pool.generate(request("again", PROMPTS[1], max_tokens=200)))
        await running(pool)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await pool.pause()
        await pool.resume(None)
        assert len((await pool.generate(request("again", PROMPTS[1]))).completions) == 2

        await adapters(pool, new, tmp_path)
        await pool.release_memory()
        await pool.resume_memory()
        await pool.resume(None)
        assert await apart(pool, new, "new") < 1e-4
        assert engine.failed == ""


async def as_planned(pool, layout, folder):
    """What every rank holds is what the static manifest says."""
    for manifests in await pool.manifests():
        assert [world.difference(layout, folder, one, rank) for rank, one in enumerate(manifests)] == ["", ""]


async def crowd(pool, model):
    """Many requests of all lengths, some ended early, across pauses: one rank out of step would draw nonsense."""
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(0, 97, numbers.integers(1, 100)).tolist() for _ in range(24)]
    asked = [
        asyncio.create_task(pool.generate(request(f"crowd-{i}", prompt, max_tokens=int(numbers.integers(1, 80)), n=3)))
        for i, prompt in enumerate(prompts)
    ]
    for turn, mode in enumerate(("keep", "wait", "keep")):
        await asyncio.sleep(0.3)
        await pool.abort([f"crowd-{i}" for i in range(turn, 24, 7)])
        await pool.pause(mode)
        await pool.resume(None)
    for prompt, result in zip(prompts, await asyncio.gather(*asked), strict=True):
        for one in result.completions:
            assert np.abs(one.logprobs_t1 - parity.replay(model, prompt, one.tokens)).max(initial=0.0) < 1e-4


async def running(pool):
    """Wait until rows are running."""
    async with asyncio.timeout(10.0):
        while not (await pool.health())[0]["rows"]:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def refusals(pool, engine):
    """What rank 0 refuses, all refuse, and the engine goes on."""
    with pytest.raises(ConfigError, match=r"may need 305 tokens.*built for 256"):
        await pool.generate(request("much", PROMPTS[0], max_tokens=300))
    with pytest.raises(ConfigError, match="no adapter 'none@1'"):
        await pool.generate(request("unknown", PROMPTS[0], adapter="none@1"))
    with pytest.raises(ConfigError, match="freeze"):
        await pool.pause("freeze")
    twice = asyncio.create_task(pool.generate(request("twice", PROMPTS[0], max_tokens=100)))
    await running(pool)
    with pytest.raises(StateError, match="in flight already"):
        await pool.generate(request("twice", PROMPTS[0]))
    with pytest.raises(StateError, match="while requests run"):
        await pool.release_memory()
    assert len((await twice).completions[0].tokens) == 100
    assert engine.failed == ""


async def adapters(pool, model, folder):
    """Adapters come and go on both ranks; one that is in use stays."""
    merged = adapter(model, folder / "one", 0)
    adapter(model, folder / "two", 1)
    await pool.load_adapter("one@1.2", str(folder / "one"))
    using = asyncio.create_task(pool.generate(request("using", PROMPTS[0], max_tokens=150, adapter="one@1.2")))
    await running(pool)
    with pytest.raises(StateError, match="all 1 places are used"):
        await pool.load_adapter("two@1.2", str(folder / "two"))
    with pytest.raises(StateError, match="in use by 1 requests"):
        await pool.unload_adapter("one@1.2")
    for completion in (await using).completions:
        assert np.abs(completion.logprobs_t1 - parity.replay(merged, PROMPTS[0], completion.tokens)).max() < 1e-4
    await pool.load_adapter("two@1.2", str(folder / "two"))
    assert (await pool.health())[0]["adapters"] == ["two@1.2"]
    with pytest.raises(ConfigError, match="was dropped"):
        await pool.generate(request("late", PROMPTS[0], adapter="one@1.2"))
    await pool.unload_adapter("two@1.2")


def adapter(model, folder, seed):
    """Write a PEFT adapter, and return a copy of the model that has it in its weights."""
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "k_proj", "down_proj")):
            out, into = module.weight.shape
            a, b = (torch.randn(shape, generator=generator) * 0.1 for shape in ((4, into), (out, 4)))
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += 2.0 * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "k_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged

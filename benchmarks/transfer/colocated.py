"""Colocated update on one card: trainer and inference engine in two processes, weights of Qwen3-1.7B's shape.

    python benchmarks/transfer/colocated.py OUT.json [--tiny] [--repeats 30]

Real engines (`fsdp`, `hf`) in workers, `Driver.push` timed from its call to its return, all phases, the engine idle.
In the same run: a plain device copy of the same bytes, an empty call to the inference worker, and the transfer `shm`.
After the updates: log-probs of the engine's own greedy tokens under the trainer's weights, and a checksum of both
sides. A second part changes the weights by a training step just before each push, without waiting for the device.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from powertrain.interfaces.build import EngineSpec, OptimSpec, RankSpec
from powertrain.interfaces.data import GenerateRequest, LossSpec, SamplingParams, TrainBatch
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.weights import WeightVersion

PACKAGES = ("torch", "triton", "transformers", "numpy", "pyzmq", "powertrain")
CROSS_ENTROPY = LossSpec(name="powertrain.tensors.loss:cross_entropy")


def write_model(folder: Path, device: str, *, tiny: bool) -> int:
    """Write random weights of Qwen3-1.7B's shape, untied, bfloat16; returns bytes."""
    from transformers import Qwen3Config

    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    full = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    heads = (
        {"num_attention_heads": 4, "num_key_value_heads": 2}
        if tiny
        else {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    )
    return save_random(
        Qwen3Config(**(small if tiny else full), **heads, tie_word_embeddings=False, eos_token_id=0), folder, device
    )


def save_random(config: object, folder: Path, device: str) -> int:
    """Write a model of random weights in bfloat16; returns bytes."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="8GB")
    return sum(tensor.nbytes for tensor in model.parameters())


def make_driver(model: str, device: str, run_dir: str, transfer: str) -> Driver:
    """Return the driver of both engines in workers on one card."""
    same = {"model": model, "place": RankSpec(device=device), "dtype": "bfloat16", "deterministic": False}
    specs = {
        "fsdp": EngineSpec(backend="fsdp", role="train", optim=OptimSpec(lr=1e-4), **same),
        "hf": EngineSpec(backend="hf", role="infer", **same),
    }
    registry = Registry()
    layout = parse_layout(f"fsdp:d1|hf:d1 via {transfer}", registry=registry)
    return Driver(layout, specs, registry=registry, run_dir=run_dir, inline="never")


def plain_copy(size: int, repeats: int) -> list[float]:
    """Return milliseconds on the device of one copy of `size` bytes, each time."""
    if not torch.cuda.is_available():
        return []
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return found[3:]


def device_part(model: str, repeats: int) -> list[float]:
    """Return milliseconds on the device of the copies that a sink of the model's shapes runs, each time."""
    if not torch.cuda.is_available():
        return []
    from safetensors import safe_open

    from powertrain.tensors.copies import CopyProgram

    pairs = []
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                source = torch.empty(tensors.get_slice(name).get_shape(), dtype=torch.bfloat16, device="cuda")
                pairs.append((torch.empty_like(source), source))
    program, found = CopyProgram(pairs), []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        program.run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return found[3:]


def free_memory() -> int:
    """Return the card's free bytes, whoever uses the rest."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


async def timed(work) -> tuple[float, object]:
    """Await work; returns milliseconds and its result."""
    begun = time.perf_counter()
    result = await work
    return (time.perf_counter() - begun) * 1e3, result


async def gaps(driver: Driver, infer: str, vocabulary: int) -> np.ndarray:
    """Return |log-prob of the inference part - log-prob of fsdp| of greedy tokens."""
    rng = np.random.default_rng(0)
    params = SamplingParams(n=1, max_tokens=16, temperature=0.0)
    requests = [
        GenerateRequest(request_id=f"g{i}", prompt=rng.integers(1, vocabulary, 20), sampling=params) for i in range(4)
    ]
    results = await driver.infer[infer].generate_batch(requests)
    pairs = [(r.prompt.tolist(), x.completions[0]) for r, x in zip(requests, results, strict=True)]
    batch = TrainBatch.from_sequences([p for p, _ in pairs], [c.tokens.tolist() for _, c in pairs])
    told = np.concatenate([np.concatenate([np.zeros(len(p)), c.logprobs_t1]) for p, c in pairs])
    return np.abs(await driver.train["fsdp"].logprobs(batch) - told)[batch.weights > 0]


async def gap(driver: Driver, vocabulary: int) -> float:
    """Return the largest of `gaps` between hf and fsdp."""
    return float((await gaps(driver, "hf", vocabulary)).max())


def some_batch(vocabulary: int) -> TrainBatch:
    """Return what a training step gets."""
    rng = np.random.default_rng(1)
    return TrainBatch.from_sequences(
        [rng.integers(1, vocabulary, 8).tolist()] * 2, [rng.integers(1, vocabulary, 24).tolist() for _ in range(2)]
    )


async def idle_pushes(push, pool, repeats: int) -> dict[str, object]:
    """Push `repeats` times, the engine idle in between, with an empty call beside each; returns what was seen."""
    pushes, phases, calls = [], [], []
    for _ in range(repeats):
        milliseconds, report = await timed(push())
        pushes.append(milliseconds)
        phases.append({name: seconds * 1e3 for name, seconds in report.seconds.items()})
        calls.append((await timed(pool.health()))[0])
    return {
        "push_ms": pushes,
        "push_median_ms": statistics.median(pushes),
        "phases_median_ms": {name: statistics.median(row[name] for row in phases) for name in phases[0]},
        "empty_call_median_ms": statistics.median(calls),
        "bytes": report.bytes,
    }


async def measure(model: str, device: str, transfer: str, repeats: int, vocabulary: int) -> dict[str, object]:
    """Push `repeats` times over one transfer and return what was seen."""
    batch = some_batch(vocabulary)
    with tempfile.TemporaryDirectory() as run_dir:
        async with make_driver(model, device, run_dir, transfer) as driver:
            await driver.infer["hf"].resume("1.0")
            count = 0

            async def push():
                nonlocal count
                count += 1
                return await driver.push("fsdp", "hf", WeightVersion(1, count))

            free = free_memory()
            first, _ = await timed(push())
            await push()
            taken = free - free_memory()
            idle = await idle_pushes(push, driver.infer["hf"], repeats)
            before = await gap(driver, vocabulary)
            after = []
            for _ in range(5):  # a step, and at once the push: the fence has something to wait for
                await driver.train["fsdp"].train_step(batch, CROSS_ENTROPY)
                await push()
                after.append(await gap(driver, vocabulary))
    return {
        "first_ms": first,
        "device_memory_taken_by_updates": taken,
        **idle,
        "largest_log_prob_gap": before,
        "largest_log_prob_gap_after_steps": after,
    }


def main() -> None:
    """Run all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--transfers", default="ipc,shm")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, object] = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": os.environ.get("COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "device": torch.cuda.get_device_name(0) if device == "cuda" else platform.processor(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in PACKAGES if name != "triton" or device == "cuda"
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), device, tiny=args.tiny)
        vocabulary = 512 if args.tiny else 151936
        if device == "cuda":
            torch.cuda.empty_cache()
        copies = plain_copy(size, args.repeats)
        torch.cuda.empty_cache()
        parts = device_part(folder, args.repeats)
        result |= {
            "model_bytes": size,
            "plain_copy_ms": copies,
            "plain_copy_median_ms": statistics.median(copies or [0.0]),
        }
        if device == "cuda":
            torch.cuda.empty_cache()
        for transfer in args.transfers.split(","):
            result[transfer] = asyncio.run(measure(folder, device, transfer, args.repeats, vocabulary))
    if device == "cuda":
        plain = statistics.median(copies)
        result["ratios"] = {
            "device_part_to_plain_copy": statistics.median(parts) / plain,
            **{
                f"{name}_push_to_plain_copy": result[name]["push_median_ms"] / plain
                for name in args.transfers.split(",")
            },
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "plain_copy_ms"}, indent=1))


if __name__ == "__main__":
    main()

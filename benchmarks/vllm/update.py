"""Colocated update of a real vLLM on one card: trainer and engine in two processes, beside vLLM's own way.

    python benchmarks/vllm/update.py OUT.json [--shape dense|moe] [--tiny] [--repeats 30] [--vllm-python PYTHON]

`fsdp` and `vllm` in workers, `Driver.push` timed from its call to its return, with all phases, the engine idle. In the
same run: a plain device copy of the same bytes, an empty call to the inference worker, and vLLM's own weight transfer
engine `ipc` between two processes (`own_ipc.py`), plain and packed. The first update and the first one after a
training step are verified: both sides' checksums are compared before their version is published. A training step is
followed at once by a push, without waiting for the device; then log-probs of the engine's greedy tokens are compared
with the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "transfer"))
from colocated import CROSS_ENTROPY, gaps, idle_pushes, plain_copy, save_random, some_batch, timed  # noqa: E402
from setting import head, write  # noqa: E402

from powertrain.interfaces.build import EngineSpec, OptimSpec, RankSpec  # noqa: E402
from powertrain.layout import parse_layout  # noqa: E402
from powertrain.registry import Registry  # noqa: E402
from powertrain.runtime.driver import Driver  # noqa: E402
from powertrain.weights import WeightVersion  # noqa: E402

VOCABULARY = {"dense": 151936, "moe": 32768}


def config_of(shape: str, *, tiny: bool) -> object:
    """Return a model's config: Qwen3-1.7B's shape, or three layers of Qwen3-30B-A3B's with a smaller vocabulary."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    same = {"tie_word_embeddings": False, "eos_token_id": 0, "max_position_embeddings": 2048}
    if shape == "dense":
        full = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128}
        full |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": VOCABULARY[shape]}
        return Qwen3Config(**(small if tiny else full), **same)
    full = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 3, "head_dim": 128}
    full |= {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": VOCABULARY[shape]}
    experts = {"moe_intermediate_size": 32 if tiny else 768, "num_experts": 8 if tiny else 128}
    experts |= {"num_experts_per_tok": 2 if tiny else 8, "norm_topk_prob": True}
    return Qwen3MoeConfig(**(small if tiny else full), **experts, **same)


def write_model(folder: Path, device: str, shape: str, *, tiny: bool) -> int:
    """Write random weights in bfloat16; returns bytes."""
    torch.manual_seed(0)
    return save_random(config_of(shape, tiny=tiny), folder, device)


def make_driver(model: str, device: str, run_dir: str, args: argparse.Namespace) -> Driver:
    """Return the driver of both engines in workers on one card."""
    same = {"model": model, "place": RankSpec(device=device), "dtype": "bfloat16" if device == "cuda" else "float32"}
    options = {"max_model_len": 512, "enforce_eager": True}
    if device == "cuda":
        options["gpu_memory_utilization"] = 0.25
    specs = {
        "fsdp": EngineSpec(backend="fsdp", role="train", optim=OptimSpec(lr=1e-4), **same),
        "vllm": EngineSpec(backend="vllm", role="infer", options=options, **same),
    }
    registry = Registry()
    via = "ipc" if device == "cuda" else "shm"
    apart = f"?python={args.vllm_python}" if args.vllm_python else ""
    layout = parse_layout(f"fsdp:d1|vllm:d1{apart} via {via}", registry=registry)
    verify = {via: {"verify": args.repeats + 12}}
    return Driver(layout, specs, registry=registry, run_dir=run_dir, inline="never", transfer_options=verify)


async def gap(driver: Driver, vocabulary: int) -> dict[str, float]:
    """Return how far the engine's log-probs of greedy tokens lie from the trainer's: largest and mean."""
    apart = await gaps(driver, "vllm", vocabulary)
    return {"largest": float(apart.max()), "mean": float(apart.mean())}


async def measure(model: str, device: str, vocabulary: int, args: argparse.Namespace) -> dict[str, object]:
    """Push `repeats` times and return what was seen."""
    batch = some_batch(vocabulary)
    with tempfile.TemporaryDirectory() as run_dir:
        async with make_driver(model, device, run_dir, args) as driver:
            await driver.infer["vllm"].resume("1.0")
            count = 0

            async def push():
                nonlocal count
                count += 1
                return await driver.push("fsdp", "vllm", WeightVersion(1, count))

            first, _ = await timed(push())
            await push()
            idle = await idle_pushes(push, driver.infer["vllm"], args.repeats)
            before = await gap(driver, vocabulary)
            answered = []
            for _ in range(10):  # the engine has answered in between, so its prefix cache has something to forget
                answered.append((await timed(push()))[0])
                await gap(driver, vocabulary)
            after = []
            for _ in range(5):  # a step, and at once the push: the fence has something to wait for
                await driver.train["fsdp"].train_step(batch, CROSS_ENTROPY)
                await push()
                after.append(await gap(driver, vocabulary))
    return {
        "first_ms": first,
        **idle,
        "push_after_requests_ms": answered,
        "push_after_requests_median_ms": statistics.median(answered),
        "verified_updates": [1, args.repeats + 13],
        "log_prob_gap": before,
        "log_prob_gap_after_steps": after,
    }


def own_ipc(folder: str, args: argparse.Namespace) -> dict[str, object]:
    """Run vLLM's own way in two other processes; returns what it wrote."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "own.json"
        command = [args.vllm_python or sys.executable, str(HERE / "own_ipc.py"), folder, str(out)]
        subprocess.run([*command, "--repeats", str(max(5, args.repeats // 3))], check=True, timeout=400)
        return json.loads(out.read_text())


def main() -> None:
    """Run all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=tuple(VOCABULARY), default="dense")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-own", action="store_true", help="leave vLLM's own way out")
    parser.add_argument("--vllm-python", default="", help="interpreter in whose environment vLLM is")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, object] = {**head(), "shape": args.shape}
    if device == "cuda":
        result["device"] = torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), device, args.shape, tiny=args.tiny)
        copies = plain_copy(size, args.repeats)
        if device == "cuda":
            torch.cuda.empty_cache()
        result |= {"model_bytes": size, "plain_copy_median_ms": statistics.median(copies or [0.0])}
        vocabulary = 512 if args.tiny else VOCABULARY[args.shape]
        result["powertrain"] = asyncio.run(measure(folder, device, vocabulary, args))
        write(args.out, result)  # what there is, should the rest break off
        if device == "cuda" and not args.no_own:
            result["vllm_own_ipc"] = own_ipc(folder, args)
    if device == "cuda":
        push, own = result["powertrain"]["push_median_ms"], result.get("vllm_own_ipc", {})
        result["ratios"] = {
            "push_to_plain_copy": push / result["plain_copy_median_ms"],
            **{f"own_ipc_{way}_to_push": own[way]["median_ms"] / push for way in own},
        }
    write(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""What only a card can show of the backend `vllm`: batch invariance, memory given back, captured graphs, parity, LoRA.

    PYTHON benchmarks/vllm/checks.py OUT.json [--tiny] [--cases batch_on,batch_off,...]

PYTHON: of an environment with vLLM. Each case runs in a process of its own, since what it sets is read when vLLM is
imported. Models are random, of the shapes that stand in the result; without a card the cases run on the CPU.

batch_*: 100 requests of mixed lengths, all at once and one after another; how many differ in a token, and how many in a
bit of a log-prob. on/off: the run's `deterministic`, which is vLLM's batch-invariant mode. uncached: without prefix
caching. memory: bytes free on the card before and after `release_memory`, graphs captured; the sleeper is woken by an
update, and answers with the new weights. parity_*: float32 log-probs beside transformers' after each of 4 updates.
lora: bfloat16 log-probs of an adapter beside PEFT's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "transfer")]
CASES = ("batch_on", "batch_off", "batch_on_uncached", "memory", "parity_dense", "parity_moe", "lora")


class World:
    """A model's folder and a vLLM engine on it."""

    def __init__(self, shape: str, *, tiny: bool, layers: int = 8, dtype: str = "bfloat16", **options: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from update import config_of

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = dtype if self.device == "cuda" else "float32"
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        config = config_of(shape, tiny=tiny)
        fewer = min(layers, config.num_hidden_layers)
        config = type(config)(**{**config.to_dict(), "num_hidden_layers": fewer, "layer_types": None})
        self.vocabulary = config.vocab_size
        self.shape = f"{config.model_type}, hidden {config.hidden_size}, {config.num_hidden_layers} layers"
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype)).eval()
        self.model.requires_grad_(requires_grad=False)
        self.model.save_pretrained(self.folder)
        self.options = {"max_model_len": 512, **options}
        if self.device == "cuda":
            self.options.setdefault("gpu_memory_utilization", 0.3)

    async def start(self, *, deterministic: bool = False) -> Any:
        """Start the engine at version 1.0."""
        from powertrain.interfaces.build import EngineSpec, RankSpec
        from powertrain_vllm.engine import VllmEngine
        from powertrain_vllm.environment import environment

        spec = EngineSpec(
            backend="vllm",
            role="infer",
            model=self.folder,
            dtype=self.dtype,
            deterministic=deterministic,
            options=self.options,
            place=RankSpec(device=self.device),
        )
        engine = VllmEngine()
        engine.prepare(environment({}, spec))
        await engine.build(spec)
        await engine.resume("1.0")
        return engine

    def scramble(self, seed: int) -> None:
        """Give the reference model other weights."""
        import torch

        generator = torch.Generator(self.device).manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05, generator=generator)

    async def update(self, engine: Any, counter: int) -> None:
        """Give the engine the reference model's weights, by the names of a checkpoint."""
        import torch
        from safetensors.torch import load_file

        from powertrain.interfaces.weights import Piece
        from powertrain.weights import Update, WeightVersion

        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            tensors: dict[str, torch.Tensor] = {}
            for file in Path(folder).glob("*.safetensors"):
                tensors |= load_file(file, device=self.device)
        await engine.pause("wait")
        sink = engine.weights()
        sink.begin(Update(version=WeightVersion(1, counter)))
        sink.apply([Piece(entry.name, (0,) * len(entry.shape), tensors[entry.name]) for entry in sink.manifest()])
        sink.finish()
        await engine.resume(f"1.{counter}")

    def requests(self, count: int, most: int, tag: str, *, temperature: float = 1.0, adapter: str | None = None) -> Any:
        """Return requests of mixed lengths, the same ones for every tag but for their ids."""
        import numpy as np

        from powertrain.interfaces.data import GenerateRequest, SamplingParams

        rng = np.random.default_rng(0)
        sampling = [SamplingParams(max_tokens=most, temperature=temperature, seed=i) for i in range(count)]
        lengths = rng.integers(8, 200, count)
        return [
            GenerateRequest(
                request_id=f"{tag}{i}",
                prompt=rng.integers(1, self.vocabulary, n),
                sampling=sampling[i],
                adapter=adapter,
            )
            for i, n in enumerate(lengths)
        ]

    def replay(self, prompt: Sequence[int], tokens: Sequence[int], model: Any = None) -> Any:
        """Return the reference model's float32 log-probs of the tokens."""
        import torch

        ids = torch.tensor([[*map(int, prompt), *map(int, tokens)]], device=self.device)
        with torch.no_grad():
            logits = (model or self.model)(ids).logits[0, len(prompt) - 1 : -1].float()
        told = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        return told.cpu().numpy()

    def apart(self, requests: Any, results: Any, model: Any = None) -> float:
        """Return the largest difference of log-probs from the reference's."""
        import numpy as np

        found = [(r, a.completions[0]) for r, a in zip(requests, results, strict=True)]
        return max(float(np.abs(c.logprobs_t1 - self.replay(r.prompt, c.tokens, model)).max()) for r, c in found)


async def batch(*, deterministic: bool, tiny: bool, **options: Any) -> dict[str, Any]:
    """Answer 100 requests at once and one after another, and compare."""
    import numpy as np

    world = World("dense", tiny=tiny, layers=6, max_num_seqs=128, **options)
    engine = await world.start(deterministic=deterministic)
    count, most = (12, 8) if tiny else (100, 32)
    together = await engine.generate_batch(world.requests(count, most, "r"))
    alone = [await engine.generate(request) for request in world.requests(count, most, "r")]
    pairs = [(a.completions[0], b.completions[0]) for a, b in zip(alone, together, strict=True)]
    both = [(x.logprobs_t1[: len(y.tokens)], y.logprobs_t1[: len(x.tokens)]) for x, y in pairs]
    found = {
        "model": world.shape,
        "requests": count,
        "tokens_each": most,
        "differ_in_a_token": sum(not np.array_equal(x.tokens, y.tokens) for x, y in pairs),
        "differ_in_a_bit_of_a_log_prob": sum(not np.array_equal(x.logprobs_t1, y.logprobs_t1) for x, y in pairs),
        "first_log_prob_differs": sum(bool(x[0] != y[0]) for x, y in both),
    }
    await engine.close()
    return found


async def memory(*, tiny: bool) -> dict[str, Any]:
    """Let the engine sleep, and wake it by an update."""
    import torch

    world = World("dense", tiny=tiny, layers=6, enforce_eager=tiny)
    engine = await world.start()

    def free() -> int:
        return torch.cuda.mem_get_info()[0] if world.device == "cuda" else 0

    requests = world.requests(8, 16, "m", temperature=0.0)
    before = await engine.generate_batch(requests)
    awake = free()
    begun = time.perf_counter()
    await engine.release_memory()
    slept, asleep = time.perf_counter() - begun, free()
    begun = time.perf_counter()
    await engine.resume_memory()
    woke = time.perf_counter() - begun
    await engine.resume()
    again = await engine.generate_batch(world.requests(8, 16, "n", temperature=0.0))
    same = all((a.completions[0].tokens == b.completions[0].tokens).all() for a, b in zip(before, again, strict=True))
    await engine.release_memory()
    world.scramble(1)
    await world.update(engine, 1)
    after = world.requests(8, 16, "u", temperature=0.0)
    found = {
        "model": world.shape,
        "weights_bytes": sum(tensor.nbytes for tensor in world.model.parameters()),
        "given_back_bytes": asleep - awake,
        "sleep_seconds": slept,
        "wake_seconds": woke,
        "awake_again_bytes": free() - awake,
        "same_greedy_tokens_after_waking": bool(same),
        "log_prob_gap_after_an_update_that_woke_it": world.apart(after, await engine.generate_batch(after)),
    }
    await engine.close()
    return found


async def parity(shape: str, *, tiny: bool) -> dict[str, Any]:
    """Compare float32 log-probs before and after updates."""
    world = World(shape, tiny=True, dtype="float32", enforce_eager=True)
    engine = await world.start()
    requests = world.requests(8, 16, "p0")
    gaps = [world.apart(requests, await engine.generate_batch(requests))]
    for counter in range(1, 5):
        world.scramble(counter)
        await world.update(engine, counter)
        requests = world.requests(8, 16, f"p{counter}-")
        gaps.append(world.apart(requests, await engine.generate_batch(requests)))
    await engine.close()
    return {"model": world.shape, "dtype": world.dtype, "log_prob_gaps": gaps}


async def lora(*, tiny: bool) -> dict[str, Any]:
    """Load an adapter and compare."""
    import torch
    from peft import LoraConfig, get_peft_model

    world = World("dense", tiny=tiny, layers=4, enforce_eager=True, enable_lora=True, max_lora_rank=8)
    engine = await world.start()
    base = world.requests(4, 16, "b")
    base_gap = world.apart(base, await engine.generate_batch(base))
    peft = get_peft_model(world.model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"]))
    generator = torch.Generator(world.device).manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        peft.save_pretrained(folder)
        await engine.load_adapter("policy@1.1", folder)
        requests = world.requests(4, 16, "l", adapter="policy@1.1")
        results = await engine.generate_batch(requests)
    gaps = {"adapter_to_peft": world.apart(requests, results, peft)}
    with peft.disable_adapter():
        gaps["adapter_to_base"] = world.apart(requests, results, peft)
    await engine.close()
    return {"model": world.shape, "base_gap": base_gap, **gaps}


async def run(case: str, *, tiny: bool) -> dict[str, Any]:
    """Run one case."""
    if case.startswith("batch"):
        cached = not case.endswith("uncached")
        return await batch(deterministic="_on" in case, tiny=tiny, enable_prefix_caching=cached)
    if case.startswith("parity"):
        return await parity(case.partition("_")[2], tiny=tiny)
    return await {"memory": memory, "lora": lora}[case](tiny=tiny)


def main() -> None:
    """Run all cases and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", help="for its own processes: run this one here")
    args = parser.parse_args()
    if args.case:
        args.out.write_text(json.dumps(asyncio.run(run(args.case, tiny=args.tiny))))
        return
    import importlib.metadata

    import torch
    from setting import head, write

    result = head()
    result["versions"]["vllm"] = importlib.metadata.version("vllm")
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name(0)
    for case in args.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out, words = Path(folder) / "case.json", ["--tiny"] * args.tiny
            command = [sys.executable, __file__, str(out), "--case", case, *words]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=400, check=False)
            result[case] = json.loads(out.read_text()) if out.exists() else {"failed": done.stderr[-1500:]}
        print(case, json.dumps(result[case]), flush=True)
        write(args.out, result)


if __name__ == "__main__":
    main()

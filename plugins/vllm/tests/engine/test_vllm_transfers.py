"""Updates through the driver into a real vLLM by each transfer, log-probs beside transformers of the new weights."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
from flying import CLOSE, ask, gap, with_adapter

from powertrain import EngineSpec
from powertrain.errors import ConfigError
from powertrain.interfaces.build import LoraSpec, OptimSpec
from powertrain.interfaces.data import LossSpec, TrainBatch
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.tensors.lora import adapter_config
from powertrain.testing.tensors.models import plain_model, tiny_model
from powertrain.weights import WeightVersion

LORA = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
PROMPT = [3, 1, 4, 1, 5]
FAR = 1e-2
LAYOUTS = {
    "local": ("fsdp:d1|vllm:d1 via local", "auto"),
    "shm": ("fsdp:d1|vllm:d1 via shm", "never"),
    "p2p": ("fsdp:d1+vllm:d1 via p2p", "never"),
    "disk": ("fsdp:d1|vllm:d1 via disk", "auto"),
}


def driver(layout, folder, inline, *, lora=None):
    registry = Registry()
    same = {"model": tiny_model(), "lora": lora}
    specs = {
        "fsdp": EngineSpec(backend="fsdp", role="train", optim=OptimSpec(lr=5e-2), **same),
        "vllm": EngineSpec(backend="vllm", role="infer", options={"max_model_len": 128}, **same),
    }
    parsed = parse_layout(layout, registry=registry)
    timeouts = {"start": 280.0, "update": 60.0}
    return Driver(parsed, specs, registry=registry, run_dir=folder, inline=inline, timeouts=timeouts)


async def train(running):
    batch = TrainBatch.from_sequences([[3, 4, 5], [6, 7]], [[5, 6, 7, 8], [9, 9, 3]], groups=[0, 0])
    await running.train["fsdp"].train_step(batch, LossSpec(name="powertrain.tensors.loss:cross_entropy"))


async def answered(running, **more):
    """Return a request and its completions."""
    request = ask(PROMPT, n=3, max_tokens=24, **more)
    return request, (await running.infer["vllm"].generate(request)).completions


def furthest(model, request, completions):
    return max(gap(model, request, one) for one in completions)


@pytest.mark.parametrize("name", LAYOUTS)
async def test_update_by_each_transfer(name, tmp_path):
    layout, inline = LAYOUTS[name]
    async with driver(layout, tmp_path / "run", inline) as running:
        await running.infer["vllm"].resume("1.0")
        first = await answered(running)
        assert furthest(plain_model(tiny_model()), *first) < CLOSE
        for counter in (1, 2):
            await train(running)
            report = await running.push("fsdp", "vllm", WeightVersion(1, counter))
        await running.train["fsdp"].export(str(tmp_path / "trained"))
        trained = plain_model(str(tmp_path / "trained"))
        after = await answered(running)
        assert furthest(trained, *after) < CLOSE
        assert furthest(plain_model(tiny_model()), *after) > FAR
        assert {segment.version for one in after[1] for segment in one.segments} == {"1.2"}
        assert report.transfer == name


async def test_adapter_of_our_trainer_answers_and_loads_from_its_folder(tmp_path):
    """Of LoRA nothing is said to vLLM: places and rank follow from the run."""
    async with driver("fsdp:d1|vllm:d1 via local", tmp_path / "run", "auto", lora=LORA) as running:
        pool, trainer = running.infer["vllm"], running.train["fsdp"]
        await pool.resume("1.0")
        seen = {}
        for counter in (1, 2):
            await train(running)
            version = WeightVersion(1, counter)
            name = version.adapter_name(LORA.name)
            how = {"kind": "adapter", "adapter": name, "adapter_config": adapter_config(LORA)}
            await running.push("fsdp", "vllm", version, **how)
            folder = str(tmp_path / f"adapter-{counter}")
            await trainer.export(folder)
            seen[name] = with_adapter(tiny_model(), folder)
            request, completions = await answered(running, adapter=name)
            assert furthest(seen[name], request, completions) < CLOSE
            assert furthest(plain_model(tiny_model()), request, completions) > 1e-3
            assert {segment.version for one in completions for segment in one.segments} == {str(version)}
            told = np.concatenate([np.concatenate([np.zeros(len(PROMPT)), one.logprobs_t1]) for one in completions])
            batch = TrainBatch.from_sequences([PROMPT] * 3, [one.tokens.tolist() for one in completions])
            assert np.abs(await trainer.logprobs(batch) - told)[batch.weights > 0].max() < CLOSE
        for name, model in seen.items():  # the earlier version goes on answering by its own weights
            assert furthest(model, *await answered(running, adapter=name)) < CLOSE
        assert furthest(plain_model(tiny_model()), *await answered(running)) < CLOSE
        await pool.load_adapter("from-a-folder", str(tmp_path / "adapter-2"))
        assert furthest(seen["policy-v1.2"], *await answered(running, adapter="from-a-folder")) < CLOSE
        with pytest.raises(ConfigError, match=r"no adapter 'policy-v1\.3' is loaded \(did you mean"):
            await answered(running, adapter="policy-v1.3")

"""Tiny random models on disk, and engines over them."""

import copy
import sys
from pathlib import Path

import pytest
import torch

from powertrain import EngineSpec
from powertrain_hf.engine import HfEngine

sys.path.append(str(Path(__file__).parent))
from hf_world import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def start(models):
    """Return a function that builds an engine; all are closed at the end."""
    engines = []

    async def build(kind="llama", *, options=None, version="1.1", **more):
        engine = HfEngine()
        engine.prepare({})
        engines.append(engine)
        await engine.build(
            EngineSpec(backend="hf", role="infer", model=models.folder(kind), options=options or {}, **more)
        )
        await engine.resume(version)
        return engine

    yield build
    for engine in engines:
        await engine.close()


@pytest.fixture
def adapters(models, tmp_path):
    """Return a function that makes a random PEFT adapter: (folder, model with it)."""

    def make(seed, kind="llama", targets=("q_proj", "v_proj", "down_proj"), rank=4):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=16, target_modules=list(targets), task_type="CAUSAL_LM")
        model = get_peft_model(copy.deepcopy(models.model(kind)), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
        folder = tmp_path / f"adapter-{seed}"
        model.save_pretrained(folder)
        return folder, model

    return make

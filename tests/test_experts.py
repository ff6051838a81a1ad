"""Models whose experts transformers stacks travel by the names of their checkpoints, whoever is at the other end."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "core" / "tests" / "weights"))
from carrying import iota, prove
from expert_world import KINDS, gap, train, write

import powertrain
from powertrain.errors import ConfigError
from powertrain.interfaces.build import EngineSpec, LoraSpec, OptimSpec, RankSpec
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.weights import WeightVersion

LORA = LoraSpec(rank=4, alpha=8.0, targets=("q_b_proj", "o_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that writes a model of a kind, once, and returns its folder."""
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = write(tmp_path_factory.mktemp("experts") / "model", kind)
        return made[kind]

    return make


def make_driver(model, run_dir, layout, *, inline="never", lora=None, **options):
    place, registry = RankSpec(device="cpu"), Registry()
    specs = {
        "fsdp": EngineSpec(backend="fsdp", role="train", model=model, place=place, optim=OptimSpec(lr=1e-2), lora=lora),
        "hf": EngineSpec(backend="hf", role="infer", model=model, place=place),
    }
    made = parse_layout(layout, registry=registry)
    return Driver(made, specs, registry=registry, run_dir=run_dir, inline=inline, transfer_options=options)


def names_on_disk(folder):
    header = (Path(folder) / "model.safetensors").read_bytes()
    table = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    return {name: tuple(one["shape"]) for name, one in table.items() if name != "__metadata__"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 3])
def test_every_element_of_every_expert_is_written_once(kind, world, folder):
    """The running engines' own manifests, carried out on whole numbers of which no two are equal."""
    with powertrain.open_engine(f"fsdp:d{world}", model=folder(kind), device="cpu") as engine:
        sources = [whole_numbers(one) for one in engine.manifests()]
    with powertrain.open_engine("hf:d1", model=folder(kind), device="cpu") as engine:
        [[sink]] = engine.manifests()
    sink = whole_numbers(sink)
    shapes = {entry.name: entry.shape for entry in sink}
    assert shapes == names_on_disk(folder(kind))
    prove(iota(shapes), sources, [[sink]], bucket_bytes=4096)


def whole_numbers(manifest):
    entries = tuple(dataclasses.replace(entry, dtype="int64", accepts=()) for entry in manifest)
    return dataclasses.replace(manifest, entries=entries)


@pytest.mark.parametrize(
    ("kind", "layout", "transfer"),
    [
        ("deepseek_v3", "fsdp:d1+hf:d1", "shm"),
        ("qwen3_moe", "fsdp:d2+hf:d1", "p2p"),
        ("deepseek_v3", "fsdp:d3+hf:d1", "p2p"),
        ("qwen3_moe", "fsdp:d3+hf:d1", "shm"),
    ],
)
async def test_what_is_sampled_is_what_was_trained(kind, layout, transfer, folder, tmp_path):
    """`verify` compares the bytes of every range on both sides, found by each side's own manifest."""
    async with make_driver(folder(kind), tmp_path, f"{layout} via {transfer}", **{transfer: {"verify": 1}}) as driver:
        await driver.infer["hf"].resume("1.0")
        for counter in (1, 2):
            await train(driver)
            assert await gap(driver) > 1e-3
            await driver.push("fsdp", "hf", WeightVersion(1, counter))
            assert await gap(driver) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
async def test_stacked_experts_are_shared_in_one_process(kind, folder, tmp_path):
    options = {"local": {"share": "yes", "synchronous": True}}
    async with make_driver(folder(kind), tmp_path, "fsdp:d1|hf:d1 via local", inline="auto", **options) as driver:
        await driver.infer["hf"].resume("1.0")
        for counter in (1, 2):
            await train(driver)
            report = await driver.push("fsdp", "hf", WeightVersion(1, counter))
            assert report.bytes == 0
            assert await gap(driver) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_a_trainer_has_the_names_that_it_sends(kind, folder, tmp_path):
    with powertrain.open_engine("fsdp:d2", model=folder(kind), device="cpu") as engine:
        engine.export(str(tmp_path / "out"))
        [one, _] = engine.manifests()
    assert names_on_disk(tmp_path / "out") == names_on_disk(folder(kind)) == {e.name: e.shape for e in one}


async def test_adapter_beside_experts_moves_as_elsewhere(folder, tmp_path):
    made = make_driver(folder("deepseek_v3"), tmp_path, "fsdp:d1|hf:d1 via local", inline="auto", lora=LORA)
    async with made as driver:
        await driver.infer["hf"].resume("1.0")
        await train(driver)
        [sent] = await driver.train["fsdp"].manifests()
        more = {"kind": "adapter", "adapter": "policy-v1.1", "adapter_config": sent.meta["adapter_config"]}
        await driver.push("fsdp", "hf", WeightVersion(1, 1), **more)
        assert await gap(driver, adapter="policy-v1.1") < 1e-5
        assert await gap(driver) > 1e-3


@pytest.mark.parametrize(
    ("kind", "targets", "words"),
    [
        ("qwen3_moe", ("q_proj", "gate_proj"), "'gate_proj' are projections of experts.*it can on: k_proj, o_proj"),
        ("deepseek_v3", ("shared_experts.up_proj",), "'shared_experts.up_proj' are projections of experts"),
        ("deepseek_v3", ("mlp.experts",), "PEFT cannot put an adapter on 'mlp.experts'"),
    ],
)
def test_adapter_on_experts_is_refused(kind, targets, words, folder):
    with (
        pytest.raises(ConfigError, match=rf"lora.targets: {words}"),
        powertrain.open_engine("fsdp:d1", model=folder(kind), device="cpu", lora=LoraSpec(targets=targets)),
    ):
        pass

"""Transfers p2p and disk under the driver, between real fsdp and hf workers: what is sampled is what is trained."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "core" / "tests" / "tensors"))
from faults_world import small_disk
from transfer_world import inline_sink, inline_source, pair

from powertrain.errors import TransferError
from powertrain.interfaces.build import EngineSpec, OptimSpec, RankSpec
from powertrain.interfaces.data import GenerateRequest, LossSpec, SamplingParams, TrainBatch
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.tensors.disk import DiskTransfer
from powertrain.testing.tensors.models import character_model
from powertrain.weights import Update, WeightVersion

PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 4]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transfers") / "model"
    character_model(folder)
    return str(folder)


def make_driver(model, run_dir, layout, *, update=60.0, **options):
    place, registry = RankSpec(device="cpu"), Registry()
    specs = {
        "fsdp": EngineSpec(backend="fsdp", role="train", model=model, place=place, optim=OptimSpec(lr=1e-2)),
        "hf": EngineSpec(backend="hf", role="infer", model=model, place=place),
    }
    return Driver(
        parse_layout(layout, registry=registry),
        specs,
        registry=registry,
        run_dir=run_dir,
        inline="never",
        transfer_options=options,
        timeouts={"update": update},
    )


async def gap(driver):
    """Return the largest |log-prob of hf - log-prob of fsdp| on what hf generates now."""
    sampling = SamplingParams(n=2, max_tokens=6)
    requests = [
        GenerateRequest(request_id=f"r{i}", prompt=np.array(p), sampling=sampling) for i, p in enumerate(PROMPTS)
    ]
    results = await driver.infer["hf"].generate_batch(requests)
    pairs = [(p, c) for p, result in zip(PROMPTS, results, strict=True) for c in result.completions]
    batch = TrainBatch.from_sequences([p for p, _ in pairs], [c.tokens.tolist() for _, c in pairs])
    told = np.concatenate([np.concatenate([np.zeros(len(p)), c.logprobs_t1]) for p, c in pairs])
    return np.abs(await driver.train["fsdp"].logprobs(batch) - told)[batch.weights > 0].max()


async def train(driver):
    batch = TrainBatch.from_sequences(PROMPTS, [[5, 6, 7, 8], [9, 9, 3], [4, 4]], groups=[0, 0, 0])
    await driver.train["fsdp"].train_step(batch, LossSpec(name="powertrain.tensors.loss:cross_entropy"))


@pytest.mark.parametrize("transfer", ["p2p", "disk"])
async def test_two_trainer_ranks_update_two_engines_in_workers(model, tmp_path, transfer):
    options = {transfer: {"verify": 1, **({"folder": str(tmp_path / "weights")} if transfer == "disk" else {})}}
    async with make_driver(model, tmp_path, f"fsdp:d2+hf:d2 via {transfer}", **options) as driver:
        await driver.infer["hf"].resume("1.0")
        for counter in (1, 2):
            await train(driver)
            assert await gap(driver) > 1e-3
            report = await driver.push("fsdp", "hf", WeightVersion(1, counter))
            assert await gap(driver) < 1e-5
        sums = driver.transfer("fsdp", "hf")._made[1]
        assert report.bytes == sum(sums.pairs().values())
        assert report.transfer == transfer
    assert len(list(tmp_path.glob("weights/*/version-1.2"))) == (transfer == "disk")


@pytest.mark.parametrize("transfer", ["p2p", "disk"])
async def test_changes_alone_bring_real_engines_to_the_trainers_weights(model, tmp_path, transfer):
    options = {transfer: {"delta": "host", **({"folder": str(tmp_path / "weights")} if transfer == "disk" else {})}}
    async with make_driver(model, tmp_path, f"fsdp:d2+hf:d2 via {transfer}", **options) as driver:
        await driver.infer["hf"].resume("1.0")
        whole = await driver.push("fsdp", "hf", WeightVersion(1, 1))
        assert whole.details == {"delta": 0.0}
        for counter in (2, 4):
            await train(driver)
            stepped = await driver.push("fsdp", "hf", WeightVersion(1, counter))
            assert await gap(driver) < 1e-5
            again = await driver.push("fsdp", "hf", WeightVersion(1, counter + 1))
            assert await gap(driver) < 1e-5
            assert stepped.details["changed"] > 0.1
            assert again.details["changed"] == 0.0
            assert again.details["delta"] > 0.9
            assert again.bytes < whole.bytes / 10


async def test_stopped_trainer_rank_is_named_over_p2p(model, tmp_path):
    async with make_driver(model, tmp_path, "fsdp:d2+hf:d1 via p2p", update=6.0) as driver:
        await driver.infer["hf"].resume("1.0")
        await driver.push("fsdp", "hf", WeightVersion(1, 1))
        [pid] = [status.pid for status in driver._launcher.status() if status.name == "fsdp-r1"]
        os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(TransferError, match=r"fsdp rank 1 did not come along: it is stopped, dead or cut off"):
                await driver.push("fsdp", "hf", WeightVersion(1, 2))
            assert time.monotonic() - begun < 12.0
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [handle.version for handle in driver.infer["hf"].handles] == ["1.1"]


@pytest.fixture
def disk(tmp_path):
    """Return a small file system of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    yield from small_disk(folder, "64k")


async def test_full_disk_leaves_the_old_version_and_room_heals_it(disk):
    sink = inline_sink()
    transfer = pair(DiskTransfer("disk", {"folder": str(disk), "keep": 1}), inline_source(), [sink])
    await transfer.push(Update(version=WeightVersion(1, 1)), deadline=30.0)
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(TransferError, match=r"No space left on device.*every engine kept its old version"):
        await transfer.push(Update(version=WeightVersion(1, 2)), deadline=30.0)
    assert (sink.ranks[0].weights.state, sink.ranks[0].weights.version) == ("steady", "1.1")
    (disk / "ballast").unlink()
    await transfer.push(Update(version=WeightVersion(1, 3)), deadline=30.0)
    assert sink.ranks[0].weights.version == "1.3"
    await transfer.close()

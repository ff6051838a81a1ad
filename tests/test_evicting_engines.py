"""`on_sink_failure: evict` with real fsdp and hf workers: one engine dies, the others are updated, it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")

sys.path.append(str(Path(__file__).parent))
from test_transfers_driver import gap, make_driver, train

from powertrain.testing.tensors.models import character_model
from powertrain.weights import WeightVersion


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evicting") / "model"
    character_model(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("transfer", "number"), [("shm", signal.SIGSTOP), ("p2p", signal.SIGKILL), ("disk", signal.SIGKILL)]
)
async def test_the_others_are_updated_and_it_comes_back(model, tmp_path, transfer, number):
    options = {transfer: {"folder": str(tmp_path / "weights")}} if transfer == "disk" else {}
    async with make_driver(model, tmp_path, f"fsdp:d2+hf:d2 via {transfer}", update=10.0, **options) as driver:
        pool = driver.infer["hf"]
        await driver.push("fsdp", "hf", WeightVersion(1, 1), on_sink_failure="evict")
        lost = next(status for status in driver._launcher.status() if status.name == "hf-1-r0")
        os.kill(lost.pid, number)
        await train(driver)
        report = await driver.push("fsdp", "hf", WeightVersion(1, 2), on_sink_failure="evict")
        assert (report.details["evicted"], report.sinks, pool.out, pool.version) == (1, 1, {"hf/1"}, "1.2")
        assert await gap(driver) < 1e-5
        await asyncio.wait_for(driver._restarts["hf/1"], 90)
        await train(driver)
        report = await driver.push("fsdp", "hf", WeightVersion(1, 3), on_sink_failure="evict")
        assert (report.details["evicted"], report.sinks, pool.out, pool.version) == (0, 2, set(), "1.3")
        assert await gap(driver) < 1e-5
        assert [handle.name for handle in pool.serving] == ["hf/0", "hf/1"]

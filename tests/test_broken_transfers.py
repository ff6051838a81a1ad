"""Updates over shm, p2p and disk between real fsdp and hf workers, asleep, stopped and cancelled: all end clean."""

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

from powertrain.errors import TransferError
from powertrain.testing.tensors.models import character_model
from powertrain.weights import WeightVersion

pytestmark = pytest.mark.timeout(180)
TRANSFERS = ["shm", "p2p", "disk"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "model"
    character_model(folder)
    return str(folder)


def started(model, tmp_path, transfer, layout="fsdp:d2+hf:d2", **more):
    options = {"disk": {"folder": str(tmp_path / "weights")}} if transfer == "disk" else {}
    return make_driver(model, tmp_path, f"{layout} via {transfer}", **options, **more)


async def push(driver, counter):
    return await driver.push("fsdp", "hf", WeightVersion(1, counter))


def pids(driver):
    return {status.name: status.pid for status in driver._launcher.status()}


@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_weights_that_sleep_are_woken_by_an_update(model, tmp_path, transfer):
    async with started(model, tmp_path, transfer) as driver:
        pool = driver.infer["hf"]
        await pool.resume("1.0")
        for counter in (1, 2):
            await train(driver)
            await pool.release_memory()
            assert {health["state"] for health in await pool.health()} == {"asleep"}
            await push(driver, counter)
            assert {health["state"] for health in await pool.health()} == {"ready"}
            assert await gap(driver) < 1e-5


@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_an_engine_or_a_trainers_rank_that_was_stopped_goes_on_with_the_next_update(model, tmp_path, transfer):
    async with started(model, tmp_path, transfer, update=5.0) as driver:
        await driver.infer["hf"].resume("1.0")
        await push(driver, 1)
        for counter, (worker, rank, failed) in enumerate(
            [("hf-1-r0", "hf/1 rank 0", ("hf/1",)), ("fsdp-r1", "fsdp rank 1", ())], 1
        ):
            await train(driver)
            pid = pids(driver)[worker]
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(TransferError, match=f"failed in phase '.*{rank}") as info:
                    await push(driver, 2 * counter)
                assert info.value.failed == failed
            finally:
                os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(30):
                while driver.train["fsdp"].handle.quiet() or any(h.quiet() for h in driver.infer["hf"].handles):
                    await asyncio.sleep(0.1)
            await push(driver, 2 * counter + 1)
            assert driver.infer["hf"].version == f"1.{2 * counter + 1}"
            assert await gap(driver) < 1e-5


@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_a_cancel_in_any_phase_ends_clean_and_the_next_update_works(model, tmp_path, transfer):
    async with started(model, tmp_path, transfer) as driver:
        pool = driver.infer["hf"]
        await pool.resume("1.0")
        await push(driver, 1)
        counter, published = 1, "1.1"
        for phase in ("endpoint.call", "pause", "series", "weights.finish", "resume"):
            await train(driver)
            counter, met, tasks = counter + 1, [], []
            calls = {handle: handle.call for handle in pool.handles}

            def striking(call, phase=phase, met=met, tasks=tasks):
                async def struck(method, *args, deadline):
                    if method == phase and not met:
                        met.append(method)
                        asyncio.get_running_loop().call_later(0.005, tasks[0].cancel)
                    return await call(method, *args, deadline=deadline)

                return struck

            for handle, call in calls.items():
                handle.call = striking(call)
            tasks.append(task := asyncio.ensure_future(push(driver, counter)))
            await asyncio.wait([task], timeout=60)
            for handle, call in calls.items():
                handle.call = call
            assert task.done()
            if task.cancelled() or task.exception() is None:
                assert {handle.version for handle in pool.handles} <= {published, f"1.{counter}"}
            else:
                pytest.fail(repr(task.exception()))
            counter += 1
            await push(driver, counter)
            published = f"1.{counter}"
            assert pool.version == published
            assert await gap(driver) < 1e-5

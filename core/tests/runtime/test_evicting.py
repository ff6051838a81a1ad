"""`on_sink_failure`: an engine that fails in an update fails it, or is taken out, started again and healed."""

import asyncio
import os
import signal

import pytest

from powertrain.errors import TransferError, WorkerError
from powertrain.weights import WeightVersion

pytestmark = pytest.mark.timeout(90)
ENGINES = "toytrain:d1+toyinfer:d3"


def versions(results):
    return [result.completions[0].segments[0].version for result in results]


async def pids(driver):
    return {
        handle.name: (await handle.call("health", deadline=10))[0]["pid"] for handle in driver.infer["toyinfer"].handles
    }


async def started_again(driver):
    """Wait until whatever was taken out has been started, or has failed to."""
    await asyncio.wait(driver._restarts.values(), timeout=60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_an_engine_that_fails_is_taken_out_and_comes_back(make_driver, number, ask, batch, order):
    limits = {"start": 60.0, "step": 30.0, "generate": 30.0, "update": 3.0}
    async with make_driver(ENGINES, timeouts=limits) as driver:
        pool = driver.infer["toyinfer"]
        first = await pids(driver)
        await driver.push("toytrain", "toyinfer", WeightVersion(1, 1), on_sink_failure="evict")
        os.kill(first["toyinfer/1"], number)
        await driver.train["toytrain"].train_step(batch, order("ok"))
        report = await driver.push("toytrain", "toyinfer", WeightVersion(1, 2), on_sink_failure="evict")
        assert (report.details["evicted"], report.metrics()["transfer/evicted"], report.sinks) == (1, 1, 2)
        assert (pool.out, pool.version) == ({"toyinfer/1"}, "1.2")
        asked = [ask(f"r{i}") for i in range(5)]
        answers = await pool.generate_batch(asked)
        assert [answer.request_id for answer in answers] == ["r0@0", "r1@2", "r2@0", "r3@2", "r4@0"]
        assert versions(answers) == ["1.2"] * 5
        await started_again(driver)
        assert versions(await pool.generate_batch(asked)) == ["1.2"] * 5  # it has the weights of its start: not yet
        report = await driver.push("toytrain", "toyinfer", WeightVersion(1, 3), on_sink_failure="evict")
        assert (report.details["evicted"], report.sinks, pool.out, pool.version) == (0, 3, set(), "1.3")
        answers = await pool.generate_batch(asked)
        assert [answer.request_id for answer in answers] == ["r0@0", "r1@1", "r2@2", "r3@0", "r4@1"]
        assert versions(answers) == ["1.3"] * 5
        healths = [(await handle.call("health", deadline=10))[0] for handle in pool.handles]
        assert [health["w"] for health in healths] == [1.0] * 3
        now = await pids(driver)
        assert [now[name] == first[name] for name in sorted(first)] == [True, False, True]
        assert (driver._logs / "toyinfer-1-r0.1.log").exists()


async def test_unless_asked_for_the_update_fails(make_driver, ask):
    async with make_driver(ENGINES) as driver:
        os.kill((await pids(driver))["toyinfer/1"], signal.SIGKILL)
        with pytest.raises(TransferError, match="toyinfer/1 rank 0") as info:
            await driver.push("toytrain", "toyinfer", WeightVersion(1, 1))
        assert info.value.failed == ("toyinfer/1",)
        assert driver.infer["toyinfer"].out == set()


async def test_the_last_engine_is_not_taken_out(make_driver):
    async with make_driver("toytrain:d1|toyinfer:d1", inline="never") as driver:
        os.kill((await pids(driver))["toyinfer"], signal.SIGKILL)
        with pytest.raises(TransferError, match="toyinfer rank 0"):
            await driver.push("toytrain", "toyinfer", WeightVersion(1, 1), on_sink_failure="evict")
        assert driver.infer["toyinfer"].out == set()


async def test_a_trainer_that_fails_takes_no_engine_out(make_driver):
    async with make_driver(ENGINES, inline="never") as driver:
        pid = (await driver.train["toytrain"].health())[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TransferError, match="toytrain rank 0"):
            await driver.push("toytrain", "toyinfer", WeightVersion(1, 1), on_sink_failure="evict")
        assert driver.infer["toyinfer"].out == set()


@pytest.mark.parametrize("how", ["evict", "fail"])
async def test_a_request_that_a_taken_out_engine_lost_is_asked_of_another(make_driver, ask, how):
    async with make_driver(ENGINES) as driver:
        pool, transfer = driver.infer["toyinfer"], driver.transfer("toytrain", "toyinfer")
        first, move, asked = await pids(driver), transfer.move, []

        async def meddled(*args, **kwargs):
            if not asked:
                asked.append(asyncio.ensure_future(pool.generate_batch([ask(f"r{i}") for i in range(3)])))
                await asyncio.sleep(0.2)  # they stand in the paused engines
                os.kill(first["toyinfer/1"], signal.SIGKILL)
            await move(*args, **kwargs)

        transfer.move = meddled
        pushed = driver.push("toytrain", "toyinfer", WeightVersion(1, 1), on_sink_failure=how)
        if how == "fail":
            with pytest.raises(TransferError):
                await pushed
            with pytest.raises(WorkerError, match="toyinfer/1 rank 0"):
                await asked[0]
        else:
            await pushed
            answers = await asyncio.wait_for(asked[0], 20)
            assert [answer.request_id[:3] for answer in answers] == ["r0@", "r1@", "r2@"]
            assert answers[1].request_id != "r1@1"
            # An engine that was not written yet goes on with the old version between the two tries, and says so.
            assert versions(answers) in (["1.1", "1.1", "0.0"], ["1.1"] * 3)


async def test_an_engine_that_cannot_be_started_again_is_tried_with_each_update(make_driver, monkeypatch):
    async with make_driver(ENGINES) as driver:
        pool, launch = driver.infer["toyinfer"], driver._launch
        os.kill((await pids(driver))["toyinfer/1"], signal.SIGKILL)

        async def no(*args):
            message = "no more processes on this host"
            raise WorkerError(message)

        monkeypatch.setattr(driver, "_launch", no)
        for counter in (1, 2):
            report = await driver.push("toytrain", "toyinfer", WeightVersion(1, counter), on_sink_failure="evict")
            assert (report.details["evicted"], pool.version) == (1, f"1.{counter}")
            await started_again(driver)
        monkeypatch.setattr(driver, "_launch", launch)
        await driver.push("toytrain", "toyinfer", WeightVersion(1, 3), on_sink_failure="evict")
        await started_again(driver)
        report = await driver.push("toytrain", "toyinfer", WeightVersion(1, 4), on_sink_failure="evict")
        assert (report.details["evicted"], pool.version) == (0, "1.4")


async def test_closing_while_an_engine_is_started_again_leaves_nothing(make_driver, segments):
    async with make_driver(ENGINES) as driver:
        os.kill((await pids(driver))["toyinfer/1"], signal.SIGKILL)
        await driver.push("toytrain", "toyinfer", WeightVersion(1, 1), on_sink_failure="evict")
        launcher = driver._launcher
    assert [status.name for status in launcher.status() if status.code is None] == []
    assert segments() == []

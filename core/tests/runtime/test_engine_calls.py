"""Engines of one rank: the same behaviour in the driver's process and in a worker."""

from __future__ import annotations

import asyncio
import math
import os

import numpy as np
import pytest
import pytest_asyncio

from powertrain.errors import ConfigError, DeadlineError, StateError, TransferError, UnfitError, WorkerError
from powertrain.interfaces.data import TrainBatch
from powertrain.weights import WeightVersion

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def train(shared, where):
    return (await shared("toytrain:d1", where)).train["toytrain"]


@pytest_asyncio.fixture(loop_scope="module")
async def infer(shared, where):
    return (await shared("toyinfer:d1", where)).infer["toyinfer"]


async def fact(client, name):
    return (await client.health())[0][name]


async def test_a_step_gives_the_ranks_result(train, batch, order, where):
    result = await train.train_step(batch, order("ok"))
    assert (result.tokens, result.step) == (6, 1)
    assert math.isnan(result.loss)
    assert math.isinf(result.grad_norm)
    assert (await fact(train, "pid") == os.getpid()) == (where == "auto")


async def test_large_arrays_cross_and_leave_no_segment(train, segments):
    big = TrainBatch.from_sequences([[1]], [list(range(50_000))])
    found = await train.logprobs(big, 2.0)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, big.tokens * 2.0)
    await train.health()  # by now the answer's segment has been given back
    assert segments() == []


async def test_neither_side_sees_the_others_later_changes(train, batch, order):
    before = batch.tokens.copy()
    await train.train_step(batch, order("scribble"))
    np.testing.assert_array_equal(batch.tokens, before)
    (await train.logprobs(batch))[:] = 7
    np.testing.assert_array_equal(await train.logprobs(batch), before)


async def test_a_known_error_comes_back_as_its_class_and_the_engine_goes_on(train, batch, order):
    with pytest.raises(ConfigError, match=r"toytrain rank 0: rank 0 refuses 1 of 2") as caught:
        await train.train_step(batch, order("refuse"))
    assert "powertrain_toy" in "".join(caught.value.__notes__)
    assert (await train.train_step(batch, order("ok"))).step == 1


async def test_any_other_error_is_a_worker_error_that_names_it(train, batch, order):
    with pytest.raises(WorkerError, match="toytrain rank 0: KeyError: 'missing key'") as caught:
        await train.train_step(batch, order("break"))
    assert caught.value.remote_type == "KeyError"
    assert "train_step" in caught.value.remote_traceback
    assert (caught.value.worker, caught.value.rank) == ("toytrain", 0)


async def test_an_error_of_an_error_class_keeps_its_attributes(infer, ask):
    with pytest.raises(ConfigError, match="refuse-1 has 9 tokens, the most is 8"):
        await infer.generate(ask("refuse-1"))


async def test_a_call_in_the_wrong_state_says_so(train):
    with pytest.raises(StateError, match=r"onload\(\) was called in state 'ready'; it is allowed in: offloaded"):
        await train.onload()


async def test_an_unknown_command_suggests_the_nearest(train):
    with pytest.raises(ConfigError, match=r"no command 'train_stp' \(did you mean 'train_step'\?\)"):
        await train.handle.call("train_stp", deadline=5.0)


async def test_an_argument_that_may_not_cross_is_refused_before_it_goes_out(train, batch):
    with pytest.raises(ConfigError, match="function"):
        await train.train_step(batch, lambda: None)


async def test_an_answer_that_may_not_cross_is_refused(train):
    with pytest.raises(ConfigError, match=r"builtins\.object may not go to another process"):
        await train.offload()


async def test_commands_run_in_order_on_one_thread(train, batch, order):
    names = [f"step{i}" for i in range(20)]
    await asyncio.gather(*(train.train_step(batch, order(name)) for name in names))
    assert await fact(train, "steps") == names
    assert await fact(train, "thread") == "powertrain-engine"


async def test_health_answers_while_a_step_runs(train, batch, order):
    step = asyncio.ensure_future(train.train_step(batch, order("sleep", seconds=0.3)))
    await asyncio.sleep(0.05)
    assert await fact(train, "steps") == ["sleep"]
    assert not step.done()
    await step


async def test_a_training_step_past_its_deadline_fails_the_engine(train, batch, order):
    with pytest.raises(DeadlineError, match=r"toytrain rank 0 did not answer 'train_step' within 0.05 s") as caught:
        await train.handle.call("train_step", batch, order("sleep", seconds=0.3), deadline=0.05)
    assert (caught.value.what, caught.value.seconds) == ("train_step", 0.05)
    with pytest.raises(WorkerError, match="'toytrain' is not usable any more"):
        await train.train_step(batch, order("ok"))


async def test_a_request_past_its_deadline_is_cancelled_and_the_engine_goes_on(infer, ask):
    with pytest.raises(DeadlineError, match="toyinfer rank 0 did not answer 'generate'"):
        await infer.handles[0].call("generate", ask("sleep-1"), deadline=0.05)
    assert (await infer.generate(ask("next"))).request_id == "next@0"
    assert await fact(infer, "cancelled") == ["sleep-1"]


async def test_cancelling_a_request_cancels_it_in_the_engine(infer, ask):
    asked = asyncio.ensure_future(infer.generate(ask("sleep-2")))
    await asyncio.sleep(0.05)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await infer.generate(ask("next"))
    assert await fact(infer, "cancelled") == ["sleep-2"]


async def test_cancelling_a_training_call_leaves_the_work_to_finish(train, batch, order):
    step = asyncio.ensure_future(train.train_step(batch, order("sleep", seconds=0.2)))
    await asyncio.sleep(0.05)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert (await train.train_step(batch, order("ok"))).step == 2


async def test_save_and_load_run_in_the_engine(train, batch, order, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    await train.train_step(batch, order("ok"))
    await train.save(str(folder))
    await train.train_step(batch, order("ok"))
    await train.load(str(folder))
    assert await fact(train, "w") == 1.0


async def test_manifests_come_from_every_rank(train):
    assert [[entry.name for entry in manifest] for manifest in await train.manifests()] == [["w"]]


async def test_closing_twice_is_fine_and_a_closed_engine_says_so(train, batch, order):
    await train.close()
    await train.close()
    with pytest.raises(StateError, match="'closed'"):
        await train.train_step(batch, order("ok"))


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [("prepare", ConfigError, "prepare fails on order"), ("build", WorkerError, "KeyError: 'build fails on order'")],
)
async def test_an_engine_that_cannot_be_built_says_why_and_all_is_closed(make_driver, where, fail, error, message):
    driver = make_driver("toytrain:d1", inline=where, specs={"toytrain": {"options": {"fail": fail}}})
    with pytest.raises(error, match=f"toytrain rank 0: .*{message}"):
        await driver.start()
    with pytest.raises(StateError, match="closed already"):
        await driver.start()


async def test_an_engine_that_hangs_in_build_meets_the_start_deadline(make_driver, where):
    driver = make_driver("toytrain:d1?fail=hang", inline=where, timeouts={"start": 2.0})
    with pytest.raises(DeadlineError, match="toytrain rank 0 did not answer 'open'"):
        await driver.start()


async def test_requests_wait_while_paused_and_the_version_is_the_last_resumes(infer, ask):
    assert infer.version == "0.0"
    await infer.pause()
    asked = asyncio.ensure_future(infer.generate(ask()))
    await asyncio.sleep(0.05)
    assert not asked.done()
    await infer.resume("3.4")
    assert (await asked).completions[0].segments[0].version == "3.4"
    await infer.resume()
    assert infer.version == "3.4"


async def test_abort_reaches_the_engine(infer):
    await infer.abort(["a", "b"])
    assert await fact(infer, "aborted") == ["a", "b"]


async def test_a_series_runs_in_order_and_names_what_failed(infer):
    handle = infer.handles[0]
    answers = await handle.call("series", ("weights.state", []), ("resume", []), ("health", []), deadline=20)
    assert [answer[0] >= 0 for answer in answers[0]] == [True] * 3
    assert (answers[0][0][1], answers[0][2][1]["w"]) == ("steady", await fact(infer, "w"))
    bad = ("endpoint.call", ["toycopy", "nonsense", {}])
    with pytest.raises(ConfigError, match="no operation 'nonsense'") as info:
        await handle.call("series", ("weights.state", []), bad, ("resume", ["9.9"]), deadline=20)
    assert info.value.during == "endpoint.call"
    assert infer.version != "9.9"
    with pytest.raises(ConfigError, match=r"no command 'weights.bgin'.*did you mean 'weights.begin'"):
        await handle.call("series", ("weights.bgin", []), deadline=20)


async def test_a_push_moves_the_weights_and_publishes_the_version(make_driver, where, batch, order, ask):
    async with make_driver("toytrain:d1|toyinfer:d1", inline=where) as driver:
        train, pool = driver.train["toytrain"], driver.infer["toyinfer"]
        for step in (1, 2):
            await train.train_step(batch, order("ok"))
            report = await driver.push("toytrain", "toyinfer", WeightVersion(1, step))
            assert (report.bytes, report.sinks, str(report.version)) == (16, 1, f"1.{step}")
            assert (pool.version, await fact(pool, "w")) == (f"1.{step}", float(step))
        shared = driver.transfer("toytrain", "toyinfer").read
        await train.train_step(batch, order("ok"))
        assert shared[0] == (3.0 if where == "auto" else 2.0)  # inline endpoints hand over the very objects


async def test_a_step_waits_for_an_update_that_reads_the_weights(make_driver, batch, order):
    async with make_driver("toytrain:d1|toyinfer:d1") as driver:
        train, pool = driver.train["toytrain"], driver.infer["toyinfer"]
        transfer = driver.transfer("toytrain", "toyinfer")
        move, steps, told = transfer.move, [], []

        async def meddled(*args, **kwargs):
            steps.append(asyncio.ensure_future(train.train_step(batch, order("ok"))))
            await asyncio.sleep(0.05)
            told.append(steps[0].done())
            await move(*args, **kwargs)

        transfer.move = meddled
        await driver.push("toytrain", "toyinfer", WeightVersion(1, 1))
        await steps[0]
        assert (told, await fact(pool, "w"), await fact(train, "w")) == ([False], 0.0, 1.0)


async def test_the_trainers_memory_is_let_go_before_it_moves(make_driver):
    async with make_driver("toytrain:d1|toyinfer:d1") as driver:
        train, transfer, asked = driver.train["toytrain"], driver.transfer("toytrain", "toyinfer"), []

        async def unmap(*, deadline):
            asked.append(deadline)

        transfer.unmap = unmap
        await train.close()
        assert asked == [driver.timeouts["update"]]


async def test_a_push_that_fails_half_way_leaves_the_sink_unfit_and_the_next_heals_it(make_driver, where, ask):
    options = {"toycopy": {"fail": "move"}}
    async with make_driver("toytrain:d1|toyinfer:d1", inline=where, transfer_options=options) as driver:
        pool = driver.infer["toyinfer"]
        with pytest.raises(TransferError, match="the wire was cut; unfit until the next update: toyinfer"):
            await driver.push("toytrain", "toyinfer", WeightVersion(1, 1))
        with pytest.raises(UnfitError, match="unfit"):
            await pool.resume()
        driver.transfer("toytrain", "toyinfer").options = {"fail": ""}
        await driver.push("toytrain", "toyinfer", WeightVersion(1, 2))
        assert (await pool.generate(ask())).completions[0].segments[0].version == "1.2"


async def test_engines_that_a_broken_update_has_reached_are_named(make_driver, monkeypatch, ask):
    async with make_driver("toytrain:d1+toyinfer:d2") as driver:
        await driver.push("toytrain", "toyinfer", WeightVersion(1, 1))
        lost = driver.infer["toyinfer"].handles[1]
        call = lost.call

        async def breaks_off(method, *args, deadline):
            if method == "resume":
                message = "toyinfer/1 rank 0 is gone"
                raise WorkerError(message)
            return await call(method, *args, deadline=deadline)

        monkeypatch.setattr(lost, "call", breaks_off)
        said = "failed in phase 'resume': .* is gone; answering with it already: toyinfer/0; unfit .*: toyinfer/1$"
        with pytest.raises(TransferError, match=said):
            await driver.push("toytrain", "toyinfer", WeightVersion(1, 2))
        monkeypatch.undo()
        await driver.push("toytrain", "toyinfer", WeightVersion(1, 3))
        assert driver.infer["toyinfer"].version == "1.3"


async def test_start_gives_the_first_version(make_driver, where):
    driver = make_driver("toyinfer:d1", inline=where)
    try:
        await driver.start(WeightVersion(2, 0))
        assert driver.infer["toyinfer"].version == "2.0"
    finally:
        await driver.close()

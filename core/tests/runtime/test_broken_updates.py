"""Updates that are cancelled, doubled, or meet a stopped engine: each ends clean, and the next one works and heals."""

import asyncio
import contextlib
import os
import signal
from types import SimpleNamespace

import pytest

from powertrain.errors import DeadlineError, StateError, TransferError, UnfitError, WorkerError
from powertrain.interfaces.transfer import Loads
from powertrain.weights import Update, WeightVersion

pytestmark = pytest.mark.timeout(90)
ENGINES = "toytrain:d1+toyinfer:d2"
QUICK = {"start": 60.0, "step": 30.0, "generate": 30.0, "update": 1.5}


async def push(driver, counter):
    return await driver.push("toytrain", "toyinfer", WeightVersion(1, counter))


@contextlib.contextmanager
def stopped(pid):
    """A process does nothing within, and goes on after it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def healthy(driver, ask, counter):
    """Push once more and look at what every engine answers with then."""
    await push(driver, counter)
    pool = driver.infer["toyinfer"]
    answers = await asyncio.wait_for(pool.generate_batch([ask(f"r{i}") for i in range(len(pool.handles))]), 20)
    assert [answer.completions[0].segments[0].version for answer in answers] == [f"1.{counter}"] * len(answers)
    assert {handle.version for handle in pool.handles} == {f"1.{counter}"}


def meddle(monkeypatch, handle, act):
    """Let `act(method)`, a coroutine function, run before each call of an engine."""
    call = handle.call

    async def meddled(method, *args, deadline):
        await act(method)
        return await call(method, *args, deadline=deadline)

    monkeypatch.setattr(handle, "call", meddled)


@pytest.mark.parametrize("phase", ["plan", "gather", "pause", "weights.begin", "move", "weights.finish", "resume"])
async def test_cancelled_in_any_phase_ends_clean_before_it_returns(make_driver, monkeypatch, ask, phase):
    async with make_driver(ENGINES) as driver:
        pool, transfer = driver.infer["toyinfer"], driver.transfer("toytrain", "toyinfer")
        await push(driver, 1)
        cancels, under_way, met = [], set(), []
        task = None

        async def strike(method):
            if method == phase or (phase == "weights.begin" and method == "series" and not cancels):
                cancels.append(method)
                task.cancel()
                await asyncio.sleep(0)
            elif cancels:  # within the rollback, and more than once
                met.append(method)
                task.cancel()

        for name in {"plan", "gather", "move"} & {phase}:
            real = getattr(transfer, name)

            async def struck(*args, real=real, name=name, **kwargs):
                await strike(name)
                return await real(*args, **kwargs)

            monkeypatch.setattr(transfer, name, struck)
        for handle in pool.handles:
            collect = handle._collect

            async def collected(*args, collect=collect, handle=handle):
                under_way.add(handle.name)
                try:
                    return await collect(*args)
                finally:
                    under_way.discard(handle.name)

            monkeypatch.setattr(handle, "_collect", collected)
            meddle(monkeypatch, handle, strike)
        task = asyncio.ensure_future(push(driver, 2))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not under_way
        assert not pool.updating.locked()
        assert bool(met) == (phase not in {"plan", "gather", "resume"})
        assert {handle.version for handle in pool.handles} == {"1.2" if phase == "resume" else "1.1"}
        unfit = {"weights.finish"}  # all was written by then
        assert {handle.unfit for handle in pool.handles} == {phase in unfit}
        monkeypatch.undo()
        await healthy(driver, ask, 3)


async def test_a_sink_that_was_stopped_while_it_took_an_update_is_healed_by_the_next(make_driver, monkeypatch, ask):
    async with make_driver(ENGINES, timeouts=QUICK) as driver:
        pool, transfer = driver.infer["toyinfer"], driver.transfer("toytrain", "toyinfer")
        await push(driver, 1)
        pid, move = (await pool.handles[1].call("health", deadline=10))[0]["pid"], transfer.move

        async def stopping(*args, **kwargs):
            os.kill(pid, signal.SIGSTOP)
            await move(*args, **kwargs)

        monkeypatch.setattr(transfer, "move", stopping)
        try:
            with pytest.raises(TransferError, match=r"'load': toyinfer/1 rank 0 did not answer") as info:
                await push(driver, 2)
            assert (info.value.failed, set(info.value.unfit)) == (("toyinfer/1",), {"toyinfer/0", "toyinfer/1"})
            for handle in pool.handles:
                with pytest.raises(UnfitError, match="the next one heals it"):
                    await handle.call("generate", ask(), deadline=20)
        finally:
            os.kill(pid, signal.SIGCONT)
        monkeypatch.undo()
        await healthy(driver, ask, 3)


async def test_a_sink_stopped_before_an_update_leaves_the_other_answering(make_driver, ask):
    async with make_driver(ENGINES, timeouts=QUICK) as driver:
        pool = driver.infer["toyinfer"]
        await push(driver, 1)
        pid = (await pool.handles[1].call("health", deadline=10))[0]["pid"]
        with stopped(pid):
            with pytest.raises(TransferError, match=r"'pause': toyinfer/1 rank 0 did not answer 'pause'") as info:
                await push(driver, 2)
            assert info.value.unfit == ("toyinfer/1",)
            answer = (await pool.handles[0].call("generate", ask(), deadline=20))[0]
            assert answer.completions[0].segments[0].version == "1.1"
        await healthy(driver, ask, 3)


async def test_a_trainer_that_was_stopped_serves_the_next_update(make_driver, ask):
    async with make_driver(ENGINES, inline="never", timeouts=QUICK) as driver:
        await push(driver, 1)
        pid = (await driver.train["toytrain"].health())[0]["pid"]
        with stopped(pid):
            with pytest.raises(TransferError, match=r"toytrain rank 0 did not answer") as info:
                await push(driver, 2)
            assert info.value.failed == ()
        await healthy(driver, ask, 3)


async def test_a_rank_without_a_sign_of_life_is_refused_only_while_it_gives_none(make_driver, monkeypatch, ask):
    async with make_driver("toytrain:d1|toyinfer:d1", inline="never") as driver:
        for handle in driver.handles.values():
            pid = (await handle.call("health", deadline=10))[0]["pid"]
            with stopped(pid):
                monkeypatch.setattr(handle, "quiet", lambda: {0: 19.0})
                with pytest.raises(DeadlineError, match="no sign of life"):
                    await handle.call("weights.manifest", deadline=0.1)
                with pytest.raises(WorkerError, match=r"not usable any more: .* no sign of life"):
                    await handle.call("weights.manifest", deadline=20)
            monkeypatch.undo()
            assert len(await handle.call("weights.manifest", deadline=20)) == 1
        await healthy(driver, ask, 1)


async def test_an_endpoint_that_fails_while_another_rank_is_silent_leaves_the_trainer_usable(make_driver, monkeypatch):
    monkeypatch.setattr("powertrain.runtime.handles.ERROR_GRACE", 0.1)
    async with make_driver("toytrain:d2") as driver:
        handle = driver.train["toytrain"].handle
        pid = (await handle.call("health", deadline=10))[1]["pid"]
        with stopped(pid), pytest.raises(StateError, match="rank 0"):
            await handle.call("onload", deadline=20)
        assert handle.failed  # a method of the engine's own: the ranks may have parted
    async with make_driver("toytrain:d2") as driver:
        handle = driver.train["toytrain"].handle
        pid = (await handle.call("health", deadline=10))[1]["pid"]
        with stopped(pid), pytest.raises(WorkerError, match="rank 0"):
            await handle.call("endpoint.call", "toycopy", "read", {"odd": 1}, deadline=20)
        assert len(await handle.call("endpoint.call", "toycopy", "read", {}, deadline=20)) == 2


async def test_a_sink_that_published_unheard_is_asked_for_its_version(make_driver, monkeypatch, ask):
    async with make_driver("toytrain:d1|toyinfer:d1", inline="never") as driver:
        transfer, (handle,) = driver.transfer("toytrain", "toyinfer"), driver.infer["toyinfer"].handles
        await push(driver, 1)
        found = (await transfer.source.call("endpoint.call", "toycopy", "read", {}, deadline=10))[0]

        async def plan(*args, **kwargs):
            return SimpleNamespace(reads=[[()]])

        async def gather(*args, **kwargs):
            return Loads([("endpoint.call", ("toycopy", "write", {"found": found}))])

        monkeypatch.setattr(transfer, "plan", plan)
        monkeypatch.setattr(transfer, "gather", gather)
        collect, unheard = handle._collect, []

        async def lost(method, *args):
            answers = await collect(method, *args)
            if method == "series" and not unheard:
                unheard.append(method)
                raise DeadlineError("the answer came too late")
            return answers

        monkeypatch.setattr(handle, "_collect", lost)
        with pytest.raises(TransferError, match=r"answering with it already: toyinfer$"):
            await push(driver, 2)
        assert handle.version == "1.2"
        answer = (await handle.call("generate", ask(), deadline=20))[0]
        assert answer.completions[0].segments[0].version == "1.2"
        monkeypatch.undo()
        await healthy(driver, ask, 3)


async def test_publishing_that_all_have_finished_is_carried_to_its_end(make_driver, monkeypatch, ask):
    async with make_driver(ENGINES) as driver:
        pool = driver.infer["toyinfer"]
        late = []

        async def once(method):
            if method == "resume" and not late:
                late.append(method)
                raise DeadlineError("the answer came too late")

        meddle(monkeypatch, pool.handles[1], once)
        await push(driver, 1)
        assert pool.version == "1.1"
        await healthy(driver, ask, 2)


async def test_an_engine_that_an_update_never_paused_is_left_alone(make_driver, monkeypatch):
    async with make_driver(ENGINES) as driver:
        pool, transfer = driver.infer["toyinfer"], driver.transfer("toytrain", "toyinfer")
        await pool.release_memory()

        async def no(*args, **kwargs):
            message = "no plan"
            raise RuntimeError(message)

        monkeypatch.setattr(transfer, "plan", no)
        with pytest.raises(TransferError, match="no plan; every engine kept its old version"):
            await push(driver, 1)
        assert [health["state"] for health in await pool.health()] == ["asleep", "asleep"]


async def test_updates_of_one_transfer_wait_for_each_other(make_driver, monkeypatch):
    async with make_driver(ENGINES) as driver:
        transfer, move, inside = driver.transfer("toytrain", "toyinfer"), None, []
        move = transfer.move

        async def alone(plan, update, meter, *, deadline):
            inside.append(update.version.counter)
            await asyncio.sleep(0.05)
            await move(plan, update, meter, deadline=deadline)
            inside.append(update.version.counter)
            if update.version.counter == 2:
                message = "the wire was cut"
                raise RuntimeError(message)

        monkeypatch.setattr(transfer, "move", alone)
        pushes = [transfer.push(Update(version=WeightVersion(1, counter)), deadline=20) for counter in (1, 2, 3)]
        reports = await asyncio.gather(*pushes, return_exceptions=True)
        assert [type(report).__name__ for report in reports] == ["TransferReport", "TransferError", "TransferReport"]
        assert inside == [1, 1, 2, 2, 3, 3]
        assert {handle.version for handle in driver.infer["toyinfer"].handles} == {"1.3"}

"""Pausing, aborting and updating while requests are in flight."""

import asyncio
import threading
import weakref

import numpy as np
import pytest
import torch
from hf_world import held_at, replay, request, write

from powertrain.errors import ConfigError, StateError, UnfitError
from powertrain.interfaces.weights import Piece
from powertrain.weights import Update, WeightVersion


async def paused_at(engine, step, mode, *requests):
    """Begin requests and pause after `step` decode steps; returns their tasks."""
    async with held_at(engine, step) as (reached, go):
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        await reached.wait()
        pause = asyncio.create_task(engine.pause(mode))
        await asyncio.sleep(0.01)
        await go()
        await pause
    return tasks


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
async def test_kept_requests_go_on_under_the_new_weights_and_are_cut_there(start, models, kind):
    engine = await start(kind)
    sent = [request("a", n=2, max_tokens=12), request("b", (7, 7), max_tokens=9)]
    tasks = await paused_at(engine, 5, "keep", *sent)
    assert not any(task.done() for task in tasks)
    await asyncio.to_thread(write, engine, models.model(kind, seed=1), 2)
    await engine.resume("1.2")
    checkpoints = {"1.1": models.model(kind), "1.2": models.model(kind, seed=1)}
    for one, result in zip(sent, await asyncio.gather(*tasks), strict=True):
        for completion in result.completions:
            length = one.sampling.max_tokens
            assert [(s.start, s.end, s.version) for s in completion.segments] == [(0, 5, "1.1"), (5, length, "1.2")]
            by_version = {v: replay(model, one.prompt, completion) for v, model in checkpoints.items()}
            for s in completion.segments:
                own, got = by_version[s.version][s.start : s.end], completion.logprobs_t1[s.start : s.end]
                np.testing.assert_allclose(got, own, atol=1e-5, rtol=0)
                other = by_version["1.2" if s.version == "1.1" else "1.1"][s.start : s.end]
                assert np.abs(got - other).max() > 1e-2


async def test_kept_requests_without_an_update_are_as_if_never_paused(start):
    engine = await start()
    tasks = await paused_at(engine, 3, "keep", request(n=2))
    await engine.resume(None)
    kept = (await tasks[0]).completions
    free = (await engine.generate(request(n=2))).completions
    assert [c.tokens.tolist() for c in kept] == [c.tokens.tolist() for c in free]
    assert [len(c.segments) for c in kept] == [1, 1]


async def test_wait_lets_requests_in_flight_finish_first(start):
    engine = await start(options={"max_rows": 1})
    tasks = await paused_at(engine, 2, "wait", request("a"), request("b"))
    assert engine.state == "paused"
    assert [(await task).completions[0].finish for task in tasks] == ["length", "length"]


async def test_abort_mode_ends_requests_with_what_they_have(start):
    engine = await start(options={"max_rows": 1})
    tasks = await paused_at(engine, 2, "abort", request("a"), request("b"))
    running, queued = [(await task).completions[0] for task in tasks]
    assert (running.finish, len(running.tokens), len(running.segments)) == ("abort", 2, 1)
    assert (queued.finish, len(queued.tokens), queued.segments) == ("abort", 0, ())


async def test_requests_that_arrive_while_paused_wait_for_the_new_version(start, models):
    engine = await start()
    await engine.pause("abort")
    task = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0.01)
    assert not task.done()
    await asyncio.to_thread(write, engine, models.model(seed=1), 2)
    await engine.resume("1.2")
    completion = (await task).completions[0]
    assert completion.segments[0].version == "1.2"
    np.testing.assert_allclose(
        completion.logprobs_t1, replay(models.model(seed=1), (3, 1, 4, 1, 5), completion), atol=1e-5
    )


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_one_of_two_ends_between_steps(start, how):
    engine = await start()
    async with held_at(engine, 3) as (reached, go):
        tasks = [asyncio.create_task(engine.generate(request(name))) for name in ("a", "b")]
        await reached.wait()
        if how == "abort":
            await engine.abort(["a", "unknown"])
        else:
            tasks[0].cancel()
            await asyncio.sleep(0.01)
        await go()
    assert (await tasks[1]).completions[0].finish == "length"
    if how == "abort":
        ended = (await tasks[0]).completions[0]
        assert (ended.finish, len(ended.tokens)) == ("abort", 3)
    else:
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
    assert engine.health()["requests"] == 0


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_request_ends_in_the_tick_in_which_it_came(start, how):
    engine = await start()
    task, other = (asyncio.create_task(engine.generate(request(name, max_tokens=40))) for name in ("a", "b"))
    await asyncio.sleep(0)
    assert engine.health()["requests"] == 2
    if how == "abort":
        await engine.abort(["a"])
        assert [(c.finish, len(c.tokens)) for c in (await task).completions] == [("abort", 0)]
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len((await other).completions[0].tokens) == 40
    assert engine.health()["requests"] == 0


async def test_frozen_request_can_be_aborted(start):
    engine = await start()
    tasks = await paused_at(engine, 3, "keep", request("a"), request("b"))
    await engine.abort(["a"])
    assert len((await asyncio.wait_for(tasks[0], 10)).completions[0].tokens) == 3
    assert not tasks[1].done()
    await engine.pause("abort")
    assert len((await asyncio.wait_for(tasks[1], 10)).completions[0].tokens) == 3


async def test_cancelled_pause_leaves_the_engine_serving(start):
    engine = await start()
    async with held_at(engine, 2) as (reached, go):
        task = asyncio.create_task(engine.generate(request()))
        await reached.wait()
        pause = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0.01)
        pause.cancel()
        await asyncio.gather(pause, return_exceptions=True)
        await go()
    assert (await task).completions[0].finish == "length"
    assert engine.state == "ready"
    assert (await asyncio.wait_for(engine.generate(request("next")), 10)).completions


async def test_unfit_engine_refuses_until_healed(start, models):
    engine = await start()
    await engine.pause()
    sink = engine.weights()
    sink.begin(Update(version=WeightVersion(1, 2)))
    sink.apply([Piece("model.norm.weight", (0,), torch.ones(64))])
    sink.abort()
    with pytest.raises(UnfitError):
        await engine.resume(None)
    with pytest.raises(UnfitError, match="must heal"):
        await engine.generate(request())
    await asyncio.to_thread(write, engine, models.model(seed=1), 3)
    await engine.resume("1.3")
    assert (await engine.generate(request())).completions[0].segments[0].version == "1.3"


async def test_update_of_a_running_engine_is_refused(start):
    engine = await start()
    with pytest.raises(StateError, match="not paused"):
        engine.weights().begin(Update(version=WeightVersion(1, 2)))


async def test_float32_head_sees_an_update_in_place(start, models):
    """B13: the head of a bf16 model has no copy that could go stale."""
    engine = await start("llama-tied", dtype="bfloat16")
    before = (await engine.generate(request(max_tokens=1, temperature=0.0))).completions[0]
    await engine.pause()
    model = models.model("llama-tied", seed=1)
    await asyncio.to_thread(write, engine, model, 2)
    await engine.resume("1.2")
    after = (await engine.generate(request(max_tokens=1, temperature=0.0))).completions[0]
    import copy

    right = replay(copy.deepcopy(model).bfloat16(), (3, 1, 4, 1, 5), after)
    np.testing.assert_allclose(after.logprobs_t1, right, atol=0.1)
    assert after.logprobs_t1.tolist() != before.logprobs_t1.tolist()


async def test_pausing_a_sleeping_engine_wakes_it(start, models):
    engine = await start()
    await engine.release_memory()
    await engine.pause()
    await asyncio.to_thread(write, engine, models.model(seed=1), 2)
    await engine.resume("1.2")
    assert (await engine.generate(request())).completions[0].segments[0].version == "1.2"


@pytest.mark.parametrize("frozen", [False, True])
async def test_memory_is_released_and_taken_again(start, frozen):
    engine = await start()
    right = (await engine.generate(request(n=2))).completions
    tasks = await paused_at(engine, 3, "keep", request(n=2)) if frozen else []
    await engine.release_memory()
    with pytest.raises(StateError, match="'asleep'"):
        await engine.generate(request("late"))
    await engine.resume_memory()
    assert engine.state == "paused"
    await engine.resume(None)
    again = (await (tasks[0] if frozen else engine.generate(request(n=2)))).completions
    assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in right]


async def test_close_aborts_and_leaves_no_thread(start):
    engine = await start()
    tasks = await paused_at(engine, 2, "keep", request())
    await engine.close()
    await engine.close()
    assert (await asyncio.wait_for(tasks[0], 10)).completions[0].finish == "abort"
    assert not [t for t in threading.enumerate() if t.name.startswith("powertrain-hf")]


async def test_unknown_pause_mode_is_refused(start):
    engine = await start()
    with pytest.raises(ConfigError, match="abort, wait, keep"):
        await engine.pause("freeze")
    assert engine.state == "ready"


async def test_more_than_one_rank_is_refused(models):
    from powertrain import EngineSpec
    from powertrain.interfaces.build import RankSpec
    from powertrain_hf.engine import HfEngine

    engine = HfEngine()
    engine.prepare({})
    with pytest.raises(ConfigError, match="one rank, and this one was given 2"):
        await engine.build(EngineSpec(backend="hf", role="infer", model=models.folder(), place=RankSpec(world=2)))


async def test_closed_engine_lets_go_of_its_model(start):
    engine = await start()
    await engine.generate(request())
    model, sink = weakref.ref(engine._machine._model), engine.weights()
    tensors = [weakref.ref(tensor) for tensor in sink.tensors().values()]
    del sink
    await engine.close()
    assert model() is None
    assert all(tensor() is None for tensor in tensors)

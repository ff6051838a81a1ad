"""Tokens handed out while a request runs, on the real vLLM."""

import asyncio
import contextlib

import numpy as np
import pytest

from powertrain import EngineSpec, GenerateRequest, SamplingParams
from powertrain.errors import ConfigError, StateError
from powertrain.testing.tensors.models import tiny_model
from powertrain_vllm.engine import VllmEngine


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(loop):
    made = VllmEngine()
    made.prepare({})
    spec = EngineSpec(backend="vllm", role="infer", model=tiny_model(), options={"max_model_len": 512})
    loop.run_until_complete(made.build(spec))
    loop.run_until_complete(made.resume("1.1"))
    yield made
    loop.run_until_complete(made.close())


def ask(name, **sampling):
    return GenerateRequest(request_id=name, prompt=np.array([3, 1, 4, 1, 5]), sampling=SamplingParams(**sampling))


def run(loop, work):
    return loop.run_until_complete(asyncio.wait_for(work, 60))


def test_tokens_come_in_order_and_are_those_of_the_answer(engine, loop):
    async def work():
        fresh = [one async for one in engine.stream(ask("same", max_tokens=20, n=2, temperature=1.5))]
        return fresh, await engine.generate(ask("same", max_tokens=20, n=2, temperature=1.5))

    fresh, answer = run(loop, work())
    for sample, completion in enumerate(answer.completions):
        own = [one for one in fresh if one.sample == sample]
        assert [one.place for one in own] == list(range(20))
        assert [one.token for one in own] == completion.tokens.tolist()
        assert np.array([one.logprob for one in own], "float32").tolist() == completion.logprobs.tolist()
        assert np.array([one.logprob_t1 for one in own], "float32").tolist() == completion.logprobs_t1.tolist()
        assert {one.version for one in own} == {"1.1"}


def test_first_tokens_are_there_long_before_the_last(engine, loop):
    async def work():
        async with contextlib.aclosing(engine.stream(ask("long", max_tokens=400))) as fresh:
            first = await anext(fresh)
            return first.place, engine.health()["requests"]

    assert run(loop, work()) == (0, 1)


def test_leaving_a_stream_aborts_its_request(engine, loop):
    async def work():
        async with contextlib.aclosing(engine.stream(ask("left", max_tokens=400))) as fresh:
            async for one in fresh:
                if one.place == 3:
                    break
        return engine.health()

    health = run(loop, work())
    assert (health["requests"], health["rows"]) == (0, 0)


def test_a_stream_goes_on_after_a_pause(engine, loop):
    async def work():
        seen = []
        async with contextlib.aclosing(engine.stream(ask("frozen", max_tokens=300))) as fresh:
            seen.append((await anext(fresh)).token)
            await engine.pause("keep")
            assert engine.health()["rows"] == 0
            await engine.resume(None)
            seen += [one.token async for one in fresh]
        return seen, (await engine.generate(ask("frozen", max_tokens=300))).completions[0].tokens.tolist()

    seen, whole = run(loop, work())
    assert seen == whole


def test_a_refused_request_raises_in_its_stream(engine, loop):
    async def work():
        return [one async for one in engine.stream(ask("much", max_tokens=100_000))]

    with pytest.raises(ConfigError, match="built for 512"):
        run(loop, work())


def test_a_second_stream_under_a_name_in_flight_takes_nothing_from_the_first(engine, loop):
    async def work():
        async with contextlib.aclosing(engine.stream(ask("twice", max_tokens=60))) as first:
            seen = [await anext(first)]
            with pytest.raises(StateError, match=r"'twice' is in flight already"):
                await anext(engine.stream(ask("twice", max_tokens=4)))
            return seen + [one async for one in first]

    assert [one.place for one in run(loop, work())] == list(range(60))

"""Generation: log-probs against a plain forward, batches that change nothing, stops and refusals."""

import asyncio

import numpy as np
import pytest
import torch
from hf_world import replay, request

from powertrain import HeadSpec
from powertrain.errors import ConfigError, StateError

PROMPTS = [(3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7, 9), (9, 2)]


@pytest.mark.parametrize("kind", ["llama-tied", "llama", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_plain_forward(start, models, kind, temperature):
    engine = await start(kind)
    requests = [request(f"r{i}", p, n=3, max_tokens=12, temperature=temperature) for i, p in enumerate(PROMPTS)]
    results = await engine.generate_batch(requests)
    for sent, result in zip(requests, results, strict=True):
        assert result.request_id == sent.request_id
        for completion in result.completions:
            assert len(completion.tokens) == 12
            plain = replay(models.model(kind), sent.prompt, completion)
            np.testing.assert_allclose(completion.logprobs_t1, plain, atol=1e-5, rtol=0)
            drawn = replay(models.model(kind), sent.prompt, completion, temperature)
            np.testing.assert_allclose(completion.logprobs, drawn, atol=1e-5, rtol=0)
            assert [(s.start, s.end, s.version) for s in completion.segments] == [(0, 12, "1.1")]


@pytest.mark.parametrize("kind", ["window", "linear", "mixed"])
async def test_rows_of_models_with_other_caches_stay_apart(start, models, kind):
    """Sliding windows, and states of linear layers: alone in a layer, and beside its keys and values."""
    engine = await start(kind)
    head = tuple(range(20, 40))
    requests = [request(f"r{i}", (*head, *p), n=2, max_tokens=3 + 4 * i) for i, p in enumerate(PROMPTS)]
    requests.append(request("short", (7,), n=3, max_tokens=12))
    for sent, result in zip(requests, await engine.generate_batch(requests), strict=True):
        for completion in result.completions:
            assert len(completion.tokens) == sent.sampling.max_tokens
            plain = replay(models.model(kind), sent.prompt, completion)
            np.testing.assert_allclose(completion.logprobs_t1, plain, atol=1e-5, rtol=0)


async def test_prompts_with_a_common_beginning_answer_alike(start, models):
    engine = await start("qwen3")
    head = tuple(range(20, 40))
    requests = [request(f"r{i}", (*head, *p), n=2, max_tokens=6) for i, p in enumerate(PROMPTS)]
    fed = []
    original = engine._machine._model.model.forward
    engine._machine._model.model.forward = lambda *a, **k: (fed.append(tuple(k["input_ids"].shape)), original(*a, **k))[
        1
    ]
    results = await engine.generate_batch(requests)
    assert fed[:2] == [(1, 20), (3, 8)]
    for sent, result in zip(requests, results, strict=True):
        for completion in result.completions:
            plain = replay(models.model("qwen3"), sent.prompt, completion)
            np.testing.assert_allclose(completion.logprobs_t1, plain, atol=1e-5, rtol=0)


async def test_tokens_do_not_depend_on_the_batch(start):
    engine = await start(options={"max_rows": 5})
    requests = [request(f"r{i}", p, n=2, max_tokens=10 + i, top_k=20) for i, p in enumerate(PROMPTS)]
    together = await engine.generate_batch(requests)
    ticked = await asyncio.gather(*(engine.generate(r) for r in reversed(requests)))
    alone = [await engine.generate(r) for r in requests]
    for a, b, c in zip(together, reversed(ticked), alone, strict=True):
        for x, y, z in zip(a.completions, b.completions, c.completions, strict=True):
            assert x.tokens.tolist() == y.tokens.tolist() == z.tokens.tolist()
    assert together[1].completions[0].tokens.tolist() != together[3].completions[0].tokens.tolist()


async def test_equal_batches_are_bitwise_equal(start):
    engine = await start()
    runs = [await engine.generate_batch([request(f"r{i}", p, n=2) for i, p in enumerate(PROMPTS)]) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        for x, y in zip(a.completions, b.completions, strict=True):
            assert x.tokens.tobytes() == y.tokens.tobytes()
            assert x.logprobs.tobytes() == y.logprobs.tobytes()


async def test_greedy_matches_step_by_step_forwards(start, models):
    engine = await start("qwen3")
    result = await engine.generate(request(temperature=0.0, max_tokens=6))
    ids = [3, 1, 4, 1, 5]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(models.model("qwen3")(torch.tensor([ids])).logits[0, -1].argmax()))
    assert result.completions[0].tokens.tolist() == ids[5:]
    assert result.completions[0].logprobs.tolist() == [0.0] * 6


async def test_stop_token_ends_a_row_and_is_kept(start):
    engine = await start()
    free = (await engine.generate(request(n=4, max_tokens=20))).completions
    stops = (int(free[0].tokens[3]), int(free[1].tokens[7]))
    held = (await engine.generate(request(n=4, max_tokens=20, stop_token_ids=stops))).completions
    for whole, cut in zip(free, held, strict=True):
        ends = [i for i, token in enumerate(whole.tokens) if token in stops]
        length = ends[0] + 1 if ends else 20
        assert cut.tokens.tolist() == whole.tokens[:length].tolist()
        assert cut.finish == ("stop" if ends else "length")


async def test_batches_are_bounded_and_whole(start, monkeypatch):
    engine = await start(options={"max_rows": 3, "max_batch_tokens": 40})
    sizes = []
    original = engine._machine.start
    monkeypatch.setattr(engine._machine, "start", lambda chunk: (sizes.append(len(chunk.rows)), original(chunk)))
    results = await engine.generate_batch([request("a", n=4), request("b", (1,) * 30, n=2), request("c", n=1)])
    assert [len(r.completions) for r in results] == [4, 2, 1]
    assert sizes == [3, 1, 1, 1, 1]


async def test_head_in_the_models_dtype_differs_from_the_float32_head(start):
    asked = request(n=2, max_tokens=4)
    exact = await (await start(dtype="bfloat16")).generate(asked)
    coarse = await (await start(dtype="bfloat16", head=HeadSpec(fp32=False))).generate(asked)
    first = [c.completions[0].logprobs_t1[0] for c in (exact, coarse)]
    assert first[0] != first[1]
    assert abs(first[0] - first[1]) < 0.3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": (1, 97)}, "token ids from 0 to 96"),
        ({"adapter": "policy-v1.9"}, "no adapter 'policy-v1.9' is loaded; there is: none"),
    ],
)
async def test_bad_request_is_refused(start, bad, words):
    engine = await start()
    with pytest.raises(ConfigError, match=words):
        await engine.generate(request(**bad))


async def test_request_id_in_flight_is_refused(start):
    engine = await start()
    with pytest.raises(StateError, match="in flight already"):
        await engine.generate_batch([request("same"), request("same")])
    both = await asyncio.gather(engine.generate(request("x")), engine.generate(request("x")), return_exceptions=True)
    assert sum(isinstance(answer, StateError) for answer in both) == 1


async def test_request_id_in_flight_harms_no_other_request(start):
    engine = await start()
    first = asyncio.create_task(engine.generate_batch([request("x", max_tokens=30)]))
    await asyncio.sleep(0)
    wrong, right = await asyncio.gather(
        engine.generate(request("x")), engine.generate(request("y")), return_exceptions=True
    )
    assert isinstance(wrong, StateError)
    assert right.completions[0].finish == "length"
    assert len((await first)[0].completions[0].tokens) == 30


async def test_failed_step_reaches_its_requests_and_the_engine_goes_on(start, monkeypatch):
    engine = await start()

    def broken(chunk):
        message = "no memory"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(engine._machine, "step", broken)
        answers = await asyncio.gather(*(engine.generate(request(f"r{i}")) for i in range(2)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["no memory"] * 2
    assert len((await engine.generate(request())).completions) == 1


async def test_empty_batch_gives_nothing(start):
    assert await (await start()).generate_batch([]) == []

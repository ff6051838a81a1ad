"""Traps of the real vLLM, each met: what it would do by itself is shown where that can be, and what it does here."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
from flying import CLOSE, LONG, answer, ask, drawn, gap, opened, send, start, until, weights

from powertrain import EngineSpec
from powertrain.errors import ConfigError, StateError
from powertrain.interfaces.build import RankSpec
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.testing.tensors.models import plain_model, tiny_model
from powertrain_vllm import worker
from powertrain_vllm.worker import VllmSink

OLD, NEW = tiny_model(0), tiny_model(1)
MODELS = {"old": plain_model(OLD), "new": plain_model(NEW)}
FAR = 1e-2
BLOCK = 32  # the least that vLLM's CPU kernels have
PROMPT = [3, 1, 4, 1, 5]
WIDE = [(7 * i) % 61 + 1 for i in range(100)]
"""A prompt of many blocks of the cache, and more tokens than the engine takes in one step."""
OPTIONS = {
    "max_model_len": 512,
    "block_size": BLOCK,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 40,
}


@pytest.fixture(scope="module")
def engine():
    """One engine for all tests here, with a prefix cache that is used and prompts that are cut in pieces."""
    found = opened(OLD, options=OPTIONS)
    yield found
    found.release()


@pytest.fixture
def old_again(engine, counters):
    """Bring the old weights back, whatever a test has published."""
    yield
    send(engine, next(counters), weights(OLD), mode="abort")


# ---- caches
def cached(engine, work):
    """Return what `work` returns, and how many tokens of prompts vLLM took from its cache meanwhile."""
    seen, tell = [], engine.target._form._tell

    def listen(output):
        seen.append(output.num_cached_tokens or 0)
        tell(output)

    engine.target._form._tell = listen
    try:
        return work(), max(seen)
    finally:
        engine.target._form._tell = tell


@pytest.mark.parametrize("forgotten", [True, False])
def test_prefix_cache_of_old_weights_is_never_used(engine, counters, monkeypatch, old_again, forgotten):
    """Finishing an update resets it; where that is left out, log-probs are those of no checkpoint."""
    first, second, third = (ask(WIDE) for _ in range(3))
    engine.generate(first)
    [before], hits = cached(engine, lambda: engine.generate(second).completions)
    assert hits == 3 * BLOCK, "the prompt was not in the cache"
    assert gap(MODELS["old"], second, before) < CLOSE
    if not forgotten:
        monkeypatch.setattr(VllmSink, "refresh", lambda self: None)
    send(engine, next(counters), weights(NEW))
    [after], hits = cached(engine, lambda: engine.generate(third).completions)
    assert hits == (0 if forgotten else 3 * BLOCK)
    assert (gap(MODELS["new"], third, after) < CLOSE) is forgotten
    if not forgotten:
        assert gap(MODELS["new"], third, after) > FAR


def test_packed_weights_are_found_when_the_engine_is_built(monkeypatch):
    """By itself vLLM packs linear layers on a CPU and empties their weights: an update would reach nothing."""
    from vllm.model_executor.layers import utils

    plain = utils.dispatch_cpu_unquantized_gemm
    packing = next(c.cell_contents for c in plain.__closure__ if callable(c.cell_contents))
    for module in [utils, *(sys.modules[name] for name in worker.USERS)]:
        if hasattr(module, packing.__name__):
            monkeypatch.setattr(module, packing.__name__, packing)
    monkeypatch.setattr(worker, "before_load", lambda world: None)
    with pytest.raises(ConfigError, match=r"loaders do not take its checkpoint a second time .*torch.Size\(\[0\]\)"):
        opened(OLD, options={"max_model_len": 64})


# ---- updates
@pytest.mark.parametrize("asleep", [False, True])
def test_update_is_refused_unless_the_engine_is_paused(engine, counters, asleep):
    """vLLM's own update of a running engine ends it. A sleeper is woken by `pause`, with which every update begins."""
    request = ask(PROMPT)
    if asleep:
        engine.release_memory()
        assert engine.state == "asleep"
    with pytest.raises(StateError, match="not paused"):
        send_unpaused(engine)
    if asleep:
        engine.pause()
        assert engine.state == "paused"
        engine.resume(None)
    assert gap(MODELS["old"], request, engine.generate(request).completions[0]) < CLOSE


def send_unpaused(engine):
    from powertrain.weights import Update, WeightVersion

    engine.weights().begin(Update(version=WeightVersion(9, 9)))


def test_frozen_and_held_requests_replay_under_the_weights_of_their_segments(engine, counters, old_again):
    """Four updates while requests run: one frozen across all, one that came while the engine was paused, of a prompt
    that is in the cache. Log-probs of every segment are those of its own version, and not of the other.
    """
    engine.generate(ask(WIDE))
    frozen = ask(WIDE, n=3, max_tokens=LONG)
    future, counts = start(engine, frozen, 6), []
    versions = {engine.health()["version"]: "old"}
    held = {}
    for which in ("new", "old", "new", "old"):
        engine.pause("keep")
        counts.append(drawn(engine, frozen))
        request = ask(WIDE, max_tokens=12)
        held[which, len(counts)] = request, engine.start("generate", request)
        until(lambda request=request: request.request_id in engine.target._items)
        assert counts[-1] == drawn(engine, frozen), "tokens were drawn while the engine was paused"
        counter = next(counters)
        versions[f"1.{counter}"] = which
        send(engine, counter, weights({"old": OLD, "new": NEW}[which]))
        until(lambda: min(drawn(engine, frozen) or [LONG]) >= min(counts[-1]) + 10)
    for (which, _), (request, waiting) in held.items():
        [completion] = answer(engine, waiting)
        assert versions[completion.segments[0].version] == which
        for segment in completion.segments:  # its end may lie behind the next update
            assert gap(MODELS[versions[segment.version]], request, completion, segment) < CLOSE
    for sample, completion in enumerate(answer(engine, future)):
        assert [segment.end for segment in completion.segments] == [*(row[sample] for row in counts), LONG]
        assert [segment.version for segment in completion.segments] == list(versions)
        for segment in completion.segments:
            right, wrong = versions[segment.version], {"old": "new", "new": "old"}[versions[segment.version]]
            assert gap(MODELS[right], frozen, completion, segment) < CLOSE
            assert gap(MODELS[wrong], frozen, completion, segment) > FAR


def test_version_is_that_of_the_request_also_when_an_update_lands_before_it_is_read(engine, counters, old_again):
    """The answer lies ready; before its caller sees it, other weights are published under another version."""
    request = ask(PROMPT, n=4)
    before = engine.health()["version"]

    async def ended():
        task = asyncio.ensure_future(engine.target.generate(request))
        await asyncio.sleep(0)
        while request.request_id in engine.target._items:
            await asyncio.sleep(0.001)
        await engine.target.pause("wait")
        return task

    task = engine.on_loop(ended)
    send(engine, next(counters), weights(NEW))

    async def read():
        return (await task).completions

    for completion in engine.on_loop(read):
        assert [segment.version for segment in completion.segments] == [before]
        assert gap(MODELS["old"], request, completion) < CLOSE


def test_tokens_that_are_told_late_belong_to_the_weights_that_drew_them(engine, counters, old_again):
    """vLLM's thread is ahead of the event loop: what it has drawn is taken before the cut, though it is told late."""
    request = ask(PROMPT, max_tokens=LONG)
    before = engine.health()["version"]
    future = start(engine, request)
    engine.target._loop.call_soon_threadsafe(time.sleep, 0.2)  # the loop hears nothing for a while
    send(engine, counter := next(counters), weights(NEW))
    [completion] = answer(engine, future)
    first, second = completion.segments
    assert (first.version, second.version) == (before, f"1.{counter}")
    assert first.end > 4
    assert gap(MODELS["old"], request, completion, first) < CLOSE
    assert gap(MODELS["new"], request, completion, second) < CLOSE


# ---- draws
def same(one, other):
    """Tell whether two completions are bitwise equal, in tokens and both kinds of log-probs."""
    names = ("tokens", "logprobs", "logprobs_t1")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_request_alone_and_within_a_batch_is_bitwise_the_same(engine):
    """Products of few rows are rounded otherwise than those of many, unless MKL is told not to (`environment`)."""
    prompts = [PROMPT, WIDE, [9], WIDE[:50], WIDE[3:60]]
    names = [f"batched-{i}" for i in range(30)]
    hot = {"temperature": 1.3, "top_p": 0.9, "top_k": 20}

    def asked(i):
        return ask(prompts[i % 5], name=names[i], max_tokens=20 + i % 7, **(hot if i % 2 else {}))

    together = [result.completions[0] for result in engine.generate_batch([asked(i) for i in range(30)])]
    alone = [engine.generate(asked(i)).completions[0] for i in range(30)]
    assert [i for i in range(30) if not same(together[i], alone[i])] == []
    assert len({tuple(one.tokens.tolist()) for one in together}) == 30


def test_draws_are_the_same_when_a_prompt_is_cut_and_when_a_request_was_frozen(engine):
    """vLLM's seeded draws count how many were made: they break off where a prompt is cut in pieces, or begin anew."""
    whole = opened(OLD, options={"max_model_len": 512, "max_num_batched_tokens": 512, "enable_prefix_caching": False})
    try:
        [right] = whole.generate(ask(WIDE, name="cut", max_tokens=60)).completions
    finally:
        whole.release()
    [cut] = engine.generate(ask(WIDE, name="cut", max_tokens=60)).completions
    request = ask(WIDE, name="cut", max_tokens=60)
    future = start(engine, request)
    for _ in range(3):
        engine.pause("keep")
        engine.resume(None)
    [frozen] = answer(engine, future)
    assert right.tokens.tolist() == cut.tokens.tolist() == frozen.tokens.tolist()
    assert np.abs(right.logprobs_t1 - cut.logprobs_t1).max() < CLOSE


# ---- processes
def test_fault_in_a_step_reaches_every_request_and_close_returns():
    """vLLM's thread ends in an error: who waits hears of it, who comes later too, and nobody waits for ever."""
    engine = opened(OLD, options={"max_model_len": 512})
    try:
        requests = [ask(PROMPT, max_tokens=LONG) for _ in range(3)]
        futures = [start(engine, request) for request in requests]

        def fail():
            message = "a kernel was lost"
            raise RuntimeError(message)

        engine.target._form._engine.step = fail
        for future in futures:
            with pytest.raises(StateError, match=r"vLLM broke off in a step and answers no more: .*a kernel was lost"):
                engine.wait(future, "generate")
        with pytest.raises(StateError, match="a kernel was lost"):
            engine.generate(ask(PROMPT))
        assert "a kernel was lost" in engine.health()["fault"]
        thread = engine.target._form._thread
        engine.close()
        assert not thread.is_alive()
    finally:
        engine.release()


def test_variables_are_set_before_vllm_is_imported():
    """In a new process whose environment has none of them: what vLLM read is what the engine needs."""
    code = """
import os, sys
seen = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm.platforms":  # one of the first that `import vllm` brings
            seen.update(os.environ)
sys.meta_path.insert(0, Watch())
import powertrain
from powertrain import GenerateRequest, SamplingParams
with powertrain.open_engine("vllm:d1?max_model_len=64", model=sys.argv[1], device="cpu", deterministic=True) as engine:
    engine.resume("1.1")
    sampling = SamplingParams(max_tokens=3)
    request = GenerateRequest(request_id="r", prompt=[3], sampling=sampling)
    assert len(engine.generate(request).completions[0].tokens) == 3
names = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_TARGET_DEVICE", "VLLM_NO_USAGE_STATS", "VLLM_USE_V2_MODEL_RUNNER")
print("seen", [seen.get(name) for name in names], seen.get("OMP_WAIT_POLICY"), seen.get("MKL_CBWR"))
import vllm.envs
print("read", vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING, vllm.envs.VLLM_TARGET_DEVICE)
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "OMP_WAIT", "MKL_"))}
    call = [sys.executable, "-c", code, OLD]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "seen ['0', 'cpu', '1', '0'] PASSIVE AVX2,STRICT" in done.stdout
    assert "read False cpu" in done.stdout


RANKS = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "ROLE_RANK": "3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


async def test_engines_started_by_a_training_rank_get_none_of_its_variables(monkeypatch, tmp_path):
    """Reported case B31: with them vLLM would wait at 10.0.0.1 for three ranks that never come."""
    for name, value in {**RANKS, "HF_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    spec = EngineSpec(
        backend="vllm", role="infer", model=OLD, place=RankSpec(device="cpu"), options={"max_model_len": 64}
    )
    registry = Registry()
    layout = parse_layout("vllm:d2", registry=registry)
    given = {"registry": registry, "run_dir": tmp_path / "run", "inline": "never", "timeouts": {"start": 280.0}}
    async with Driver(layout, {"vllm": spec}, **given) as driver:
        await driver.infer["vllm"].resume("1.1")
        requests = [ask(PROMPT, name=f"r{i}") for i in range(2)]
        for request, result in zip(requests, await driver.infer["vllm"].generate_batch(requests), strict=True):
            assert gap(MODELS["old"], request, result.completions[0]) < CLOSE
        workers = [status.pid for status in driver._launcher.status()]
        assert len(workers) == 2
        for pid in workers:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            has = dict(word.split("=", 1) for word in words if "=" in word)
            kept = {name: value for name, value in has.items() if RANKS.get(name) == value}
            assert kept == {}
            assert not [name for name in has if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))]
            assert has["HF_HOME"] == str(tmp_path)
            assert (has["VLLM_TARGET_DEVICE"], has["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("cpu", "0")

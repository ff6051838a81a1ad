"""LoRA on the real vLLM: each request answers with its own adapter's weights or gets an error, never the base alone."""

import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from flying import CLOSE, LONG, SECONDS, answer, ask, drawn, gap, opened, send, start, weights, with_adapter

from powertrain.errors import ConfigError, PowertrainError, StateError
from powertrain.interfaces.build import LoraSpec
from powertrain.tensors.lora import tensor_key
from powertrain.testing.tensors.models import plain_model, tiny_model
from powertrain.testing.tensors.weights import adapter, merged, misnamed, save_adapter
from powertrain_vllm import base_rows

LORA = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
FAR = 1e-2
"""Log-probs of other weights are at least so far away."""
PROMPT = [3, 1, 4, 1, 5]
BASE = tiny_model()


@pytest.fixture(scope="module")
def engine():
    """One engine for all tests here; of what LoRA needs nothing is said, it follows from the run's `lora`."""
    found = opened(BASE, lora=LORA, options={"max_adapters": 3, "max_model_len": 512})
    yield found
    found.release()


@pytest.fixture
def names(engine, counters):
    """Return a function that loads an adapter of a seed and returns (name, folder); all are dropped at the end."""
    made = []

    def load(seed):
        name, folder = f"policy-v1.{next(counters)}", save_adapter(adapter(seed, BASE))
        engine.load_adapter(name, folder)
        made.append(name)
        return name, folder

    yield load
    clear(engine)


def clear(engine):
    for name in engine.health()["adapters"]:
        engine.unload_adapter(name)


def held_by_vllm(engine):
    return engine.target._form._engine.list_loras()


def numbers(engine):
    """Return the numbers in vLLM of the adapters that have a name."""
    return {request.lora_int_id for request in engine.target._form._numbers.values()}


def test_room_for_adapters_follows_from_the_run(engine):
    config = engine.target._form._engine.vllm_config.lora_config
    assert (config.max_lora_rank, config.max_loras, config.max_cpu_loras) == (8, 3, 4)


def test_refresh_leaves_requests_in_flight_to_their_own_adapters(engine, names):
    """Three versions and the base run side by side; each was loaded while those before it were answering."""
    flights = []
    for seed in (None, 1, 2, 3):
        name, folder = names(seed) if seed else (None, None)
        request = ask(PROMPT, adapter=name, max_tokens=LONG)
        flights.append((request, start(engine, request), folder))
    assert all(drawn(engine, request) for request, _, _ in flights), "some had ended before the last was loaded"
    models = {folder: with_adapter(BASE, folder) if folder else plain_model(BASE) for _, _, folder in flights}
    for request, future, folder in flights:
        [completion] = answer(engine, future)
        assert gap(models[folder], request, completion) < CLOSE
        assert min(gap(models[other], request, completion) for other in models if other != folder) > FAR
        assert [segment.version for segment in completion.segments] == [(request.adapter or "-v1.1").rpartition("v")[2]]


@pytest.mark.parametrize("mended", [True, False])
def test_rows_without_an_adapter_are_the_bases_when_all_places_are_taken(engine, names, monkeypatch, mended):
    """Without our patch vLLM gives such a row the weights of the adapter that lies last, and says nothing."""
    _, (busy, _), _ = names(1), names(2), names(3)
    if not mended:
        for module in base_rows.TAKERS:
            for name in base_rows.EXPANDING:
                if hasattr(sys.modules[module], name):
                    monkeypatch.setattr(sys.modules[module], name, getattr(sys.modules[module], name).__wrapped__)
    requests = [ask(PROMPT, adapter=adapter, max_tokens=60) for adapter in (busy, None, busy)]
    futures = [engine.start("generate", request) for request in requests]
    found = [
        gap(plain_model(BASE), request, answer(engine, future)[0])
        for request, future in zip(requests, futures, strict=True)
    ]
    assert min(found[0], found[2]) > FAR
    assert (found[1] < CLOSE) if mended else (found[1] > FAR)


def test_published_refresh_leaves_a_frozen_request_to_its_own_adapter(engine, counters):
    """As the driver does it: the engine is paused, the request taken out of vLLM and handed over again."""
    old, new = next(counters), next(counters)
    send(engine, old, adapter(4, BASE), adapter=f"policy-v1.{old}")
    request = ask(PROMPT, adapter=f"policy-v1.{old}", max_tokens=LONG, n=2)
    future = start(engine, request)
    send(engine, new, adapter(5, BASE), adapter=f"policy-v1.{new}")
    assert drawn(engine, request), "it had ended before the refresh"
    later = ask(PROMPT, adapter=f"policy-v1.{new}")
    [newest] = engine.generate(later).completions
    for completion in answer(engine, future):
        assert gap(merged(BASE, adapter(4, BASE)), request, completion) < CLOSE
        assert [(s.start, s.end, s.version) for s in completion.segments] == [(0, LONG, f"1.{old}")]
    assert gap(merged(BASE, adapter(5, BASE)), later, newest) < CLOSE
    assert newest.segments[0].version == f"1.{new}"
    clear(engine)


def test_update_of_the_base_under_loaded_adapters(engine, names, counters):
    """A request that it meets has two segments, its adapter on the old base and on the new; both replay."""
    from peft import PeftModel

    name, folder = names(6)
    first, second = with_adapter(BASE, folder), with_adapter(tiny_model(1), folder)
    assert isinstance(first, PeftModel)
    request, counter = ask(PROMPT, adapter=name, max_tokens=LONG), next(counters)
    future = start(engine, request)
    try:
        send(engine, counter, weights(tiny_model(1)))
        later = ask(PROMPT, adapter=name)
        [after] = engine.generate(later).completions
        [completion] = answer(engine, future)
        before, behind = completion.segments
        assert [before.version, behind.version] == [name.rpartition("v")[2], f"1.{counter}"]
        assert gap(first, request, completion, before) < CLOSE
        assert gap(second, request, completion, behind) < CLOSE
        assert gap(first, request, completion, behind) > FAR
        assert gap(second, later, after) < CLOSE
        assert after.segments[0].version == f"1.{counter}"
    finally:
        send(engine, next(counters), weights(BASE))


def test_bound_drops_the_oldest_that_no_request_uses(engine, names):
    loaded = [names(seed)[0] for seed in (1, 2, 3)]
    busy = ask(PROMPT, adapter=loaded[0], max_tokens=LONG)
    future = start(engine, busy)
    fourth, _ = names(4)
    assert engine.health()["adapters"] == [loaded[0], loaded[2], fourth]
    with pytest.raises(ConfigError, match=rf"{loaded[1]}' was dropped; there is: .*{fourth}.* stale_adapter=newest"):
        engine.generate(ask(PROMPT, adapter=loaded[1]))
    answer(engine, future)
    fifth, _ = names(5)
    assert engine.health()["adapters"] == [loaded[2], fourth, fifth]
    assert held_by_vllm(engine) == numbers(engine)


def test_refresh_is_refused_while_requests_use_all_places(engine, names):
    folders = [names(seed) for seed in (1, 2, 3)]
    flights = [(ask(PROMPT, adapter=name, max_tokens=LONG), folder) for name, folder in folders]
    futures = [start(engine, request) for request, _ in flights]
    with pytest.raises(StateError, match=r"3 adapters are loaded, all 3 places are used by requests in flight"):
        names(4)
    for (request, folder), future in zip(flights, futures, strict=True):
        assert gap(with_adapter(BASE, folder), request, answer(engine, future)[0]) < CLOSE
    names(4)


def test_requests_and_refreshes_at_once(engine, counters):
    """Loads drop adapters on one thread while requests pick them on another: an answer is right, or an error."""
    folders = {seed: save_adapter(adapter(seed, BASE)) for seed in range(3)}
    models = {seed: with_adapter(BASE, folder) for seed, folder in folders.items()}
    asked, seeds, loads = [], {}, []
    for turn in range(24):
        name, seed = f"policy-v1.{next(counters)}", turn % 3
        loads.append(engine.start("load_adapter", name, folders[seed]))
        seeds[name] = seed
        for recent in list(seeds)[-5:]:
            request = ask(PROMPT, adapter=recent, max_tokens=4)
            asked.append((request, engine.start("generate", request)))
        time.sleep(0.005)
    ended = [(request, future.exception(SECONDS), future) for request, future in asked]
    told = r"(no )?adapter '(policy-v1\.\d+)' (was dropped|is loaded)"
    assert [str(fault) for _, fault, _ in ended if fault and not re.match(told, str(fault))] == []
    right = [(request, answer(engine, future)[0]) for request, fault, future in ended if fault is None]
    assert max(gap(models[seeds[request.adapter]], request, completion) for request, completion in right) < CLOSE
    assert len(right) > 10
    for load in loads:
        assert load.exception() is None or "all 3 places are used" in str(load.exception())
    assert len(engine.health()["adapters"]) <= 3
    assert held_by_vllm(engine) == numbers(engine)
    clear(engine)


def test_loads_at_once_push_nothing_out_of_vllm(engine, names, counters):
    busy, folder = names(1)
    request = ask(PROMPT, adapter=busy, max_tokens=LONG)
    future = start(engine, request)
    others = [save_adapter(adapter(seed, BASE)) for seed in range(8)]
    loads = [engine.start("load_adapter", f"policy-v1.{next(counters)}", other) for other in others]
    assert [load.exception(SECONDS) for load in loads] == [None] * 8
    assert held_by_vllm(engine) == numbers(engine)
    assert engine.health()["adapters"][0] == busy
    assert len(engine.health()["adapters"]) == 3
    assert gap(with_adapter(BASE, folder), request, answer(engine, future)[0]) < CLOSE


def test_used_adapter_cannot_be_unloaded(engine, names):
    name, _ = names(1)
    request = ask(PROMPT, adapter=name, max_tokens=LONG)
    future = start(engine, request)
    with pytest.raises(StateError, match=rf"{name}' is in use by 1 requests"):
        engine.unload_adapter(name)
    engine.abort([request.request_id])
    answer(engine, future)
    engine.unload_adapter(name)
    with pytest.raises(ConfigError, match=rf"{name}' was dropped"):
        engine.generate(ask(PROMPT, adapter=name))


def test_folder_may_go_once_an_adapter_is_loaded(engine, names):
    """vLLM reads one that was loaded in place again at each request, and dies when it is gone; ours are read once."""
    name, folder = names(7)
    model = with_adapter(BASE, folder)
    shutil.rmtree(folder)
    for _ in range(2):
        request = ask(PROMPT, adapter=name)
        assert gap(model, request, engine.generate(request).completions[0]) < CLOSE


def _renamed(change):
    return lambda tensors: {change(key): value for key, value in tensors.items()}


def _embedding(tensors):
    return {
        tensor_key("model.embed_tokens", "A"): torch.ones(4, 32),
        tensor_key("model.embed_tokens", "B"): torch.ones(64, 4),
    }


WRONG = {
    "a module that vLLM takes in another form": (_embedding, "does not take adapter"),
    "a module that is not there": (misnamed, r"layers\.7"),
    "another root": (
        _renamed(lambda key: key.replace("model.model.", "model.model.language_model.")),
        "language_model",
    ),
    "half a pair": (lambda tensors: dict(list(tensors.items())[1:]), "has only side B"),
    "no weights": (lambda tensors: {}, "it has no weights"),
    "a rank beyond the room": (
        lambda tensors: {key: t.repeat(*((4, 1) if "lora_A" in key else (1, 4))) for key, t in tensors.items()},
        "does not take adapter",
    ),
}


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG)
def test_adapter_that_does_not_fit_is_never_answered_by_the_base(engine, names, change, told):
    """B07. It is refused when it comes; its name answers nobody; what was loaded before stays."""
    kept, folder = names(1)
    wrong = Path(save_adapter(change(adapter(2, BASE))))
    config = (wrong / "adapter_config.json").read_text()
    if "repeat" in change.__code__.co_names:
        (wrong / "adapter_config.json").write_text(config.replace('"r": 4', '"r": 16'))
    with pytest.raises(PowertrainError, match=told):
        engine.load_adapter("policy-v1.9999", str(wrong))
    with pytest.raises(ConfigError, match=r"no adapter 'policy-v1\.9999' is loaded"):
        engine.generate(ask(PROMPT, adapter="policy-v1.9999"))
    request = ask(PROMPT, adapter=kept)
    assert gap(with_adapter(BASE, folder), request, engine.generate(request).completions[0]) < CLOSE
    assert engine.health()["adapters"] == [kept]
    assert held_by_vllm(engine) == numbers(engine), "what failed keeps a place in vLLM, from which another goes"


def test_names_without_pefts_prefix_fit_the_same_modules(engine, counters):
    """B07 (b): nothing is cut from the front of a name that lacks the prefix."""
    plain = {key.removeprefix("base_model.model."): tensor for key, tensor in adapter(3, BASE).items()}
    assert all(key.startswith("model.layers.") for key in plain)
    name = f"policy-v1.{next(counters)}"
    engine.load_adapter(name, save_adapter(plain))
    request = ask(PROMPT, adapter=name)
    completion = engine.generate(request).completions[0]
    assert gap(merged(BASE, adapter(3, BASE)), request, completion) < CLOSE
    clear(engine)


def test_adapter_that_cannot_be_loaded_costs_no_other(engine, names):
    loaded = [names(seed)[0] for seed in (1, 2, 3)]
    wrong = Path(save_adapter(adapter(4, BASE)))
    (wrong / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(PowertrainError, match="it has no weights"):
        engine.load_adapter("policy-v1.9999", str(wrong))
    big = Path(save_adapter(adapter(4, BASE)))
    (big / "adapter_config.json").write_text((big / "adapter_config.json").read_text().replace('"r": 4', '"r": 64'))
    with pytest.raises(ConfigError, match=r"does not take adapter .*64.*8"):
        engine.load_adapter("policy-v1.9999", str(big))
    assert engine.health()["adapters"] == loaded


def test_newest_answers_for_a_dropped_name_where_that_is_asked_for():
    """With one place on the device, too: adapters change places there, and none answers for another."""
    options = {"max_adapters": 2, "max_loras": 1, "stale_adapter": "newest", "max_model_len": 512}
    engine = opened(BASE, lora=LORA, options=options)
    try:
        folders = {f"policy-v1.{seed}": save_adapter(adapter(seed, BASE)) for seed in (2, 3, 4)}
        for name, folder in folders.items():
            engine.load_adapter(name, folder)
        requests = [ask(PROMPT, adapter=f"policy-v1.{seed}", max_tokens=40) for seed in (2, 3, 4, 3)]
        futures = [engine.start("generate", request) for request in requests]
        for request, future, seed in zip(requests, futures, (4, 3, 4, 3), strict=True):
            [completion] = answer(engine, future)
            assert gap(with_adapter(BASE, folders[f"policy-v1.{seed}"]), request, completion) < CLOSE
            assert [segment.version for segment in completion.segments] == [f"1.{seed}"]
        for never in ("policy-v1.9", "other-v1.2", "policy"):
            with pytest.raises(ConfigError, match=rf"no adapter '{never}' is loaded"):
                engine.generate(ask(PROMPT, adapter=never))
    finally:
        engine.release()


def test_lora_that_matches_nothing_is_told_when_the_engine_is_built():
    with pytest.raises(ConfigError, match=r"no module 'q_prj' \(did you mean 'q_proj'\?\); it has: .*q_proj"):
        opened(BASE, lora=LoraSpec(rank=4, targets=("q_prj", "down_proj")), options={"max_model_len": 64})


def test_engine_without_room_says_how_to_make_it():
    engine = opened(BASE, options={"max_model_len": 64})
    try:
        with pytest.raises(ConfigError, match=r"without room for any; set enable_lora=true"):
            engine.load_adapter("policy-v1.2", save_adapter(adapter(2, BASE)))
        with pytest.raises(ConfigError, match=r"no adapter 'policy-v1\.2' is loaded"):
            engine.generate(ask(PROMPT, adapter="policy-v1.2"))
    finally:
        engine.release()


def test_a_name_and_folder_loaded_anew_answer_with_what_the_folder_holds_now(engine, counters):
    """vLLM's prefix cache knows an adapter by name and path, and would go on with what the old weights computed."""
    name, folder = f"policy-v1.{next(counters)}", save_adapter(adapter(11, BASE))
    prompt = [3 + place % 40 for place in range(300)]
    try:
        for seed in (11, 12):
            new = Path(save_adapter(adapter(seed, BASE)))
            for file in new.iterdir():
                shutil.copy(file, folder)
            engine.load_adapter(name, folder)
            request = ask(prompt, adapter=name)
            assert gap(merged(BASE, adapter(seed, BASE)), request, engine.generate(request).completions[0]) < CLOSE
            engine.unload_adapter(name)
    finally:
        clear(engine)

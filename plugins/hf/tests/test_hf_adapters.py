"""LoRA: several named adapters, refusals, and adapters that arrive as an update."""

import asyncio
import json

import numpy as np
import pytest
import torch
from hf_world import held_at, replay, request
from safetensors.torch import load_file, save_file

from powertrain.errors import ConfigError, StateError
from powertrain.interfaces.weights import Piece
from powertrain.weights import Update, WeightVersion

PROMPT = (3, 1, 4, 1, 5)


def close_to(model, completion):
    return float(np.abs(replay(model, PROMPT, completion) - completion.logprobs_t1).max()) < 1e-4


async def test_requests_name_their_adapter_in_one_batch(start, adapters, models):
    engine = await start()
    made = {f"policy-v1.{i}": adapters(i) for i in (2, 3)}
    for name, (folder, _) in made.items():
        await engine.load_adapter(name, str(folder))
    names = ["policy-v1.2", None, "policy-v1.3", "policy-v1.2"]
    results = await engine.generate_batch([request(f"r{i}", adapter=name) for i, name in enumerate(names)])
    right = {None: models.model(), **{name: model for name, (_, model) in made.items()}}
    for name, result in zip(names, results, strict=True):
        completion = result.completions[0]
        assert {other: close_to(model, completion) for other, model in right.items()} == {n: n == name for n in right}
        assert completion.segments[0].version == ("1.1" if name is None else name.removeprefix("policy-v"))


async def test_unloaded_adapter_is_refused_and_never_served_by_the_base(start, adapters, models):
    engine = await start()
    await engine.load_adapter("policy-v1.2", str(adapters(2)[0]))
    await engine.unload_adapter("policy-v1.2")
    with pytest.raises(ConfigError, match=r"no adapter 'policy-v1\.2'"):
        await engine.generate(request(adapter="policy-v1.2"))
    with pytest.raises(ConfigError, match="no adapter"):
        await engine.unload_adapter("policy-v1.2")
    assert close_to(models.model(), (await engine.generate(request())).completions[0])


def rewrite(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(change(tensors), folder / "adapter_model.safetensors")


async def test_keys_without_the_prefix_are_taken(start, adapters):
    folder, model = adapters(2)
    rewrite(folder, lambda tensors: {k.removeprefix("base_model.model."): v for k, v in tensors.items()})
    engine = await start()
    await engine.load_adapter("p-v1.2", str(folder))
    assert close_to(model, (await engine.generate(request(adapter="p-v1.2"))).completions[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: {k.replace("model.layers", "model.language_model.layers"): v for k, v in t.items()},
            "language_model",
        ),
        (lambda t: {k: v for k, v in t.items() if "layers.1" not in k}, "layers.1.*missing"),
        (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "only side A"),
        (lambda t: {k: torch.cat([v, v]) for k, v in t.items()}, "another shape"),
    ],
)
async def test_adapter_that_does_not_fit_is_refused_and_leaves_nothing(start, adapters, models, change, words):
    folder, _ = adapters(2)
    rewrite(folder, change)
    engine = await start()
    with pytest.raises(ConfigError, match=words):
        await engine.load_adapter("p-v1.2", str(folder))
    assert engine.health()["adapters"] == []
    assert close_to(models.model(), (await engine.generate(request())).completions[0])
    good, model = adapters(3)
    await engine.load_adapter("p-v1.3", str(good))
    assert close_to(model, (await engine.generate(request(adapter="p-v1.3"))).completions[0])


async def test_adapter_of_the_output_layer_is_refused(start, adapters):
    folder, _ = adapters(2, targets=("q_proj", "lm_head"))
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if "base_layer" not in k})
    with pytest.raises(ConfigError, match="output layer"):
        await (await start()).load_adapter("p-v1.2", str(folder))


async def test_folder_without_an_adapter_says_what_is_missing(start, tmp_path):
    with pytest.raises(ConfigError, match=r"adapter_config\.json and adapter_model\.safetensors"):
        await (await start()).load_adapter("p-v1.2", str(tmp_path))


async def test_name_in_use_is_refused(start, adapters):
    engine, (folder, _) = await start(), adapters(2)
    await engine.load_adapter("p-v1.2", str(folder))
    with pytest.raises(StateError, match="loaded already"):
        await engine.load_adapter("p-v1.2", str(folder))


async def test_oldest_goes_when_there_are_too_many_but_never_one_in_use(start, adapters):
    engine = await start(options={"max_adapters": 2})
    folders = {f"p-v1.{i}": str(adapters(i)[0]) for i in (2, 3, 4)}
    for name in ("p-v1.2", "p-v1.3"):
        await engine.load_adapter(name, folders[name])
    async with held_at(engine, 2) as (reached, go):
        task = asyncio.create_task(engine.generate(request(adapter="p-v1.2")))
        await reached.wait()
        with pytest.raises(StateError, match="in use"):
            await engine.unload_adapter("p-v1.2")
        await engine.load_adapter("p-v1.4", folders["p-v1.4"])
        assert engine.health()["adapters"] == ["p-v1.2", "p-v1.4"]
        await go()
    assert (await task).completions[0].finish == "length"


async def test_adapter_of_a_request_that_has_just_come_is_in_use(start, adapters):
    engine = await start()
    await engine.load_adapter("p-v1.2", str(adapters(2)[0]))
    task = asyncio.create_task(engine.generate(request(adapter="p-v1.2")))
    await asyncio.sleep(0)
    with pytest.raises(StateError, match="in use"):
        engine._machine.changed(lambda known: known.drop("p-v1.2"))
    assert (await task).completions[0].finish == "length"


async def send(engine, folder, counter):
    """Send an adapter as an update in two pieces a tensor, out of a buffer that is used again."""
    config = json.loads((folder / "adapter_config.json").read_text())
    sink = engine.weights()
    version = WeightVersion(1, counter)
    sink.begin(Update(version=version, kind="adapter", adapter=version.adapter_name("policy"), adapter_config=config))
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        for half, start in ((tensor[:2].clone(), 0), (tensor[2:].clone(), 2)):
            sink.apply([Piece(name, (start, 0), half)])
            half.fill_(9.0)
    sink.finish()


async def test_adapter_update_is_served_under_its_versioned_name(start, adapters, models):
    engine = await start()
    folder, model = adapters(2)
    await engine.pause("keep")
    await asyncio.to_thread(asyncio.run, send(engine, folder, 2))
    await engine.resume("1.2")
    tuned, base = [
        r.completions[0] for r in await engine.generate_batch([request("a", adapter="policy-v1.2"), request("b")])
    ]
    assert (tuned.segments[0].version, base.segments[0].version) == ("1.2", "1.1")
    assert close_to(model, tuned)
    assert close_to(models.model(), base)


async def test_given_up_adapter_update_leaves_the_engine_as_it_was(start, adapters):
    engine = await start()
    await engine.pause("keep")
    await asyncio.to_thread(asyncio.run, send(engine, adapters(2)[0], 2))
    engine.weights().abort()
    await engine.resume(None)
    assert engine.health()["adapters"] == []
    assert engine.health()["version"] == "1.1"


async def test_adapter_cannot_be_used_before_it_is_published(start, adapters):
    engine = await start()
    await engine.pause("keep")
    await asyncio.to_thread(asyncio.run, send(engine, adapters(2)[0], 2))
    with pytest.raises(ConfigError, match="not published"):
        await asyncio.wait_for(engine.generate(request(adapter="policy-v1.2")), 5)
    engine.weights().abort()
    assert engine.weights().state == "steady"
    await engine.pause("keep")
    await asyncio.to_thread(asyncio.run, send(engine, adapters(3)[0], 3))
    await engine.resume("1.3")
    assert (await engine.generate(request(adapter="policy-v1.3"))).completions[0].segments[0].version == "1.3"


async def test_given_up_adapter_that_was_unloaded_leaves_the_sink_steady(start, adapters):
    engine = await start()
    await engine.pause("keep")
    await asyncio.to_thread(asyncio.run, send(engine, adapters(2)[0], 2))
    await engine.unload_adapter("policy-v1.2")
    engine.weights().abort()
    assert engine.weights().state == "steady"


async def test_request_kept_over_an_adapter_update_stays_with_its_own(start, adapters):
    engine = await start()
    old, model = adapters(2)
    await engine.load_adapter("policy-v1.2", str(old))
    async with held_at(engine, 3) as (reached, go):
        task = asyncio.create_task(engine.generate(request(adapter="policy-v1.2")))
        await reached.wait()
        pause = asyncio.create_task(engine.pause("keep"))
        await asyncio.sleep(0.01)
        await go()
        await pause
    await asyncio.to_thread(asyncio.run, send(engine, adapters(3)[0], 3))
    await engine.resume("1.3")
    completion = (await task).completions[0]
    assert [(s.start, s.end, s.version) for s in completion.segments] == [(0, 8, "1.2")]
    assert close_to(model, completion)


async def test_adapter_computes_in_the_dtype_of_the_model(start, adapters):
    engine = await start(dtype="bfloat16")
    for i in (2, 3):
        await engine.load_adapter(f"policy-v1.{i}", str(adapters(i)[0]))
    await engine.generate(request(adapter="policy-v1.3"))
    added = {n: p.dtype for n, p in engine._machine._model.named_parameters() if ".lora_" in n}
    assert added
    assert set(added.values()) == {torch.bfloat16}

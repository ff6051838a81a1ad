import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from powertrain.errors import CheckpointError
from powertrain.interfaces.build import LoraSpec, OptimSpec, ScheduleSpec
from powertrain.interfaces.data import LossSpec
from powertrain_fsdp.engine import FsdpEngine

sys.path.insert(0, str(Path(__file__).parent / "modules"))
LOSS = LossSpec(name="powertrain_fsdp_test_losses:policy", entropy=True)


def _opened(spec):
    engine = FsdpEngine()
    engine.prepare({})
    engine.build(spec)
    return engine


@pytest.fixture
def saved(make_spec, batches, tmp_path):
    """A function (**changes of the spec) -> folder of a checkpoint after one step."""

    def save(**changes):
        folder = tmp_path / "checkpoint"
        with _opened(make_spec(**changes)) as engine:
            engine.train_step(batches[0], LOSS)
            engine.save(str(folder))
        return folder

    return save


def _next(spec, batches, folder):
    with _opened(spec) as engine:
        engine.load(str(folder))
        result = engine.train_step(batches[1], LOSS)
        return result, {n: t.clone() for n, t in engine.weights().tensors().items()}


def test_moments_are_restored(make_spec, batches, saved):
    _, kept = _next(make_spec(), batches, saved())
    with _opened(make_spec()) as engine:
        engine.train_step(batches[0], LOSS)
        engine.train_step(batches[1], LOSS)
        unbroken = engine.weights().tensors()
    assert all(torch.equal(kept[name], tensor) for name, tensor in unbroken.items())


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ({"no_save_optim": True}, {"no_save_optim": True}),
        ({"no_save_optim": True}, {"no_load_optim": True}),
        ({}, {"no_load_optim": True}),
    ],
)
def test_fresh_moments_on_request(make_spec, batches, saved, saving, loading):
    folder = saved(**saving)
    fresh, weights = _next(make_spec(**loading), batches, folder)
    assert fresh.step == 2
    with _opened(make_spec()) as engine:
        engine.train_step(batches[0], LOSS)
        engine._optimizer.state.clear()
        engine.train_step(batches[1], LOSS)
        assert all(torch.equal(weights[n], t) for n, t in engine.weights().tensors().items())


def test_checkpoint_before_the_first_step(make_spec, batches, tmp_path):
    with _opened(make_spec()) as engine:
        engine.save(str(tmp_path / "zero"))
        want = engine.train_step(batches[0], LOSS)
    with _opened(make_spec()) as engine:
        engine.load(str(tmp_path / "zero"))
        got = engine.train_step(batches[0], LOSS)
    assert (got.loss, got.grad_norm, got.step) == (want.loss, want.grad_norm, 1)


def test_optimizer_state_can_be_left_out(saved):
    assert sum(f.stat().st_size for f in saved(no_save_optim=True).rglob("*.distcp")) < 400_000


def test_load_that_breaks_off_among_its_writes_counts(make_spec, batches, saved, monkeypatch):
    def broken(states):
        raise RuntimeError("torn")

    folder = saved()
    engine = _opened(make_spec())
    source = engine.weights()
    before, norm = source.changes(), source.tensors()["model.norm.weight"].clone()
    monkeypatch.setattr("powertrain_fsdp.checkpoint._set_random_states", broken)
    with pytest.raises(CheckpointError, match="torn"):
        engine.load(str(folder))
    assert not torch.equal(source.tensors()["model.norm.weight"], norm)
    assert source.changes() != before
    assert engine.state == "failed"
    engine.close()


def test_missing_moments_are_refused_unless_asked_for(make_spec, saved):
    folder = saved(no_save_optim=True)
    with _opened(make_spec()) as engine:
        with pytest.raises(CheckpointError, match="no_load_optim"):
            engine.load(str(folder))
        assert engine.state == "failed"


def test_engine_that_only_scores_loads_weights(make_spec, batches, saved):
    folder = saved()
    with _opened(make_spec(optim=None)) as scorer, _opened(make_spec()) as trainer:
        scorer.load(str(folder))
        trainer.load(str(folder))
        assert (scorer.logprobs(batches[0]) == trainer.logprobs(batches[0])).all()


def test_schedule_is_that_of_the_present_configuration(make_spec, batches, saved):
    def optim(warmup):
        return OptimSpec(lr=1e-3, schedule=ScheduleSpec(kind="linear", total_steps=100, warmup_steps=warmup))

    folder = saved(optim=optim(10))
    result, _ = _next(make_spec(optim=optim(50)), batches, folder)
    assert result.lr == pytest.approx(1e-3 * 2 / 50)


def _truncate(folder):
    shard = next((folder / "shards").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])


def _flip(folder):
    shard = next((folder / "shards").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)


def _flip_state(folder):
    state = folder / "state.json"
    state.write_text(state.read_text().replace('"step": 1', '"step": 3'))


DAMAGE = {
    "no folder": (shutil.rmtree, "state.json is missing"),
    "no state": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "state is not JSON": (lambda f: (f / "state.json").write_text("{"), "damaged"),
    "state lacks keys": (lambda f: (f / "state.json").write_text('{"files": {}}'), "damaged"),
    "later format": (
        lambda f: (f / "state.json").write_text(json.dumps(json.loads((f / "state.json").read_text()) | {"format": 9})),
        "format 9; this release reads 2",
    ),
    "one bit of the state": (_flip_state, r"state\.json is damaged: it has CRC-32"),
    "no metadata": (lambda f: (f / "shards" / ".metadata").unlink(), r"\.metadata has None"),
    "truncated": (_truncate, "distcp has"),
    "one bit": (_flip, "CRC-32"),
    "no random state": (lambda f: (f / "random-0.pt").unlink(), r"random-0\.pt"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_before_anything_changes(make_spec, saved, name):
    folder = saved()
    harm, message = DAMAGE[name]
    harm(folder)
    with _opened(make_spec()) as engine:
        before = {n: t.clone() for n, t in engine.weights().tensors().items()}
        source = engine.weights()
        with pytest.raises(CheckpointError, match=message):
            engine.load(str(folder))
        assert all(torch.equal(before[n], t) for n, t in source.tensors().items())


def test_folder_in_use_is_refused(make_spec, saved):
    folder = saved()
    with _opened(make_spec()) as engine, pytest.raises(CheckpointError, match="not empty"):
        engine.save(str(folder))


def test_checkpoint_of_another_kind_is_refused(make_spec, saved):
    folder = saved()
    with _opened(make_spec(lora=LoraSpec())) as engine, pytest.raises(CheckpointError, match="a LoRA adapter"):
        engine.load(str(folder))


def test_checkpoint_of_another_model_is_refused(make_spec, saved):
    folder = saved()
    message = r"another model: .*k_norm.weight has shape None there and \[16\]"
    with _opened(make_spec("qwen3")) as engine, pytest.raises(CheckpointError, match=message):
        engine.load(str(folder))

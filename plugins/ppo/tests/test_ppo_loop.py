"""The whole loop with real engines on a tiny random model."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")

from powertrain.errors import CheckpointError, ConfigError
from powertrain.registry import Registry
from powertrain.run.config import load_config
from powertrain.run.context import carry_out
from powertrain.run.folder import RunFolder
from powertrain.run.metrics import read_metrics
from powertrain_ppo.export import verify_export
from powertrain_ppo.rewards import RewardError


def run(file, folder, *words, resume=False):
    registry = Registry()
    if resume:
        config = load_config(folder / "config.yaml", words, registry=registry)
        carry_out(config, RunFolder.open(folder), registry=registry, resumed=True)
    else:
        carry_out(load_config(file, words, registry=registry), RunFolder.make(folder), registry=registry, resumed=False)
    return read_metrics(folder / "metrics.jsonl")


def steady(rows):
    """Drop what may differ between two equal runs."""
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "weight_version"} for row in rows]


@pytest.fixture
def run_to_the_end(recipe_file, tmp_path):
    return run(recipe_file, tmp_path / "whole")


def test_three_steps_train_and_are_measured(run_to_the_end, tmp_path):
    rows = run_to_the_end
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    assert {row["eval/rows"] for row in rows if "eval/rows" in row} == {5}
    assert [row["weight_version"] for row in rows] == ["1.1", "1.2", "1.3", "1.4"]
    for row in rows[1:]:
        assert 0 <= row["mismatch/mean"] <= row["mismatch/max"] < 1e-5
        assert row["staleness/max"] == 0
        assert row["rollout/samples"] == 12
        assert row["grad_norm"] > 0
        assert row["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert verify_export(tmp_path / "whole" / "export") > 0
    assert (tmp_path / "whole" / "config.yaml").is_file()


def test_two_runs_are_bitwise_equal(run_to_the_end, recipe_file, tmp_path):
    again = run(recipe_file, tmp_path / "again")
    assert json.dumps(steady(again)) == json.dumps(steady(run_to_the_end))


def test_other_seed_gives_other_numbers(run_to_the_end, recipe_file, tmp_path):
    assert steady(run(recipe_file, tmp_path / "other", "seed=6"))[1:] != steady(run_to_the_end)[1:]


@pytest.mark.parametrize("words", [(), ("lora.rank=2", "optim.schedule.kind=linear")], ids=["full", "lora"])
def test_resumed_run_equals_an_unbroken_one(recipe_file, tmp_path, words):
    whole = run(recipe_file, tmp_path / "whole", *words)
    folder = tmp_path / "broken"
    run(recipe_file, folder, "ppo.steps=2", "optim.schedule.total_steps=3", *words)
    # As if the run had been killed after it had measured a step that no checkpoint holds.
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "loss": 77}\n{"step": 4')
    rows = run(None, folder, "ppo.steps=3", resume=True)
    assert json.dumps(steady(rows)[-1]) == json.dumps(steady(whole)[-1])
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["weight_version"].startswith("2.")
    assert "77" in (folder / "metrics.jsonl.cut-1").read_text()


def test_resume_with_other_data_is_refused(recipe_file, tmp_path):
    run(recipe_file, tmp_path / "a", "ppo.steps=1", "ppo.export=false")
    with pytest.raises(CheckpointError, match="group_size was 4 and is 2"):
        run(None, tmp_path / "a", "ppo.steps=2", "ppo.group_size=2", resume=True)


def test_stale_rollouts_stay_within_the_bound(recipe_file, tmp_path):
    rows = run(recipe_file, tmp_path / "stale", "ppo.max_staleness=2", "ppo.steps=5", "ppo.export=false")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert max(row["staleness/max"] for row in rows[1:]) in (1, 2)
    assert all(row["mismatch/max"] is None or row["mismatch/max"] < 1e-5 for row in rows[1:])


def test_adapter_is_trained_pushed_and_exported(recipe_file, tmp_path):
    rows = run(recipe_file, tmp_path / "lora", "lora.rank=2", "lora.targets=[q_proj, v_proj]")
    assert all(row["mismatch/max"] < 1e-5 for row in rows[1:])
    assert (tmp_path / "lora" / "export" / "adapter_config.json").is_file()
    assert verify_export(tmp_path / "lora" / "export") == 2 * 2 * 2


@pytest.mark.slow
def test_two_workers_for_each_engine_do_the_same_work(recipe_file, tmp_path):
    rows = run(recipe_file, tmp_path / "workers", "engines=fsdp:d2|hf:d2")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["mismatch/max"] < 1e-5 and row["rollout/samples"] == 12 for row in rows[1:])
    assert {row["eval/rows"] for row in rows if "eval/rows" in row} == {5}
    assert verify_export(tmp_path / "workers" / "export") > 0
    logs = sorted(path.name for path in (tmp_path / "workers" / "logs").glob("*-r?.log"))
    assert logs == ["fsdp-r0.log", "fsdp-r1.log", "hf-0-r0.log", "hf-1-r0.log"]


def test_missing_model_leaves_no_folder(recipe_file, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        run(recipe_file, tmp_path / "none", "model=/no/such/folder")
    assert not (tmp_path / "none").exists()


def test_bad_reward_ends_the_run_and_keeps_the_folder(recipe_file, tmp_path):
    with pytest.raises(RewardError, match=r"'mine.py:nothing' returned nan"):
        run(recipe_file, tmp_path / "bad", "ppo.reward=mine.py:nothing")
    assert (tmp_path / "bad" / "config.yaml").is_file()


def test_refused_recipe_leaves_no_folder(recipe_file, tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        run(recipe_file, tmp_path / "none", "ppo.reward=absent.py:f")
    assert not (tmp_path / "none").exists()

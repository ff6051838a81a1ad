"""The environment's precedence, its conflicts, rank variables (B31) and determinism (B21)."""

import json
import subprocess
import sys

import pytest

from powertrain.env import (
    build_environment,
    check_determinism,
    default_variables,
    determinism_variables,
    is_rank_variable,
    rank_variables,
)
from powertrain.errors import ConfigError, EnvironmentConflictError

TORCHRUN_PARENT = {
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
    "OMP_NUM_THREADS": "1",
    "HF_HOME": "/h",
    "PATH": "/usr/bin:/bin",
}
LAYERS = ("launcher", "backend", "recipe", "user")


@pytest.mark.parametrize("strongest", range(len(LAYERS)))
def test_stronger_layer_wins(strongest):
    given = {name: {"X": name} for name in LAYERS[: strongest + 1]}
    assert build_environment(inherited={"X": "inherited"}, **given)["X"] == LAYERS[strongest]


def test_inherited_beats_defaults_and_backend_beats_inherited():
    env = build_environment(
        inherited={"OMP_NUM_THREADS": "3", "HF_HOME": "/old"}, backend={"HF_HOME": "/new"}, ranks_on_host=2
    )
    assert (env["OMP_NUM_THREADS"], env["HF_HOME"]) == ("3", "/new")


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (2, 4, "1"), (3, 2, "1"), (1, 1, "1")])
def test_cores_are_shared_out_among_ranks(cores, ranks, threads):
    values = default_variables(cores=cores, ranks_on_host=ranks)
    assert values["OMP_NUM_THREADS"] == threads
    assert values["OMP_WAIT_POLICY"] == "PASSIVE"


def test_none_inherits_and_empty_inherits_nothing(monkeypatch):
    monkeypatch.setenv("POWERTRAIN_PROBE", "here")
    assert build_environment(inherited=None)["POWERTRAIN_PROBE"] == "here"
    bare = build_environment(inherited={}, launcher={"L": "1"}, user={"U": "2"})
    assert "POWERTRAIN_PROBE" not in bare
    assert "PATH" not in bare
    assert (bare["L"], bare["U"], bare["PYTHONUNBUFFERED"]) == ("1", "2", "1")


@pytest.mark.parametrize("value", ["a,b=c d", "--x=1 --y='2,3'", "", "ä\n"])
def test_values_are_passed_as_they_are(value):
    assert build_environment(inherited={}, user={"V": value})["V"] == value


def test_numbers_become_text():
    env = build_environment(inherited={}, recipe={"PORT": 8000}, user={"SHARE": 0.5})
    assert (env["PORT"], env["SHARE"]) == ("8000", "0.5")
    assert all(isinstance(value, str) for value in env.values())


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ({"A": True}, "A is True"),
        ({"A": "x\0"}, "zero bytes"),
        ({"A": None}, "A is null"),
        ({"A=B": "1"}, "A=B"),
        ({"": "1"}, "''"),
    ],
)
def test_unusable_variable_is_refused(layer, told):
    with pytest.raises(ConfigError, match="your env") as caught:
        build_environment(inherited={}, user=layer)
    assert told in str(caught.value)


def test_server_gets_no_rank_of_the_parent():  # B31
    env = build_environment(inherited=TORCHRUN_PARENT)
    assert [name for name in env if is_rank_variable(name)] == []
    assert (env["HF_HOME"], env["PATH"]) == ("/h", "/usr/bin:/bin")


def test_training_workers_get_fresh_ranks():  # B31
    envs = [
        build_environment(inherited=TORCHRUN_PARENT, rank=rank_variables(rank, 4, rank, 4, "127.0.0.1", 23456))
        for rank in range(4)
    ]
    assert [env["RANK"] for env in envs] == ["0", "1", "2", "3"]
    assert {(env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) for env in envs} == {
        ("4", "127.0.0.1", "23456")
    }
    assert not any(name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_")) for name in envs[0])


@pytest.mark.parametrize("name", ["SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "ROLE_NAME", "GROUP_WORLD_SIZE"])
def test_other_launchers_ranks_are_known(name):
    assert is_rank_variable(name)


@pytest.mark.parametrize("name", ["LOCAL_DATA", "SLURM_JOB_ID", "MY_RANK", "NCCL_DEBUG", "MASTER_KEY"])
def test_ordinary_variables_are_no_ranks(name):
    assert not is_rank_variable(name)


@pytest.mark.parametrize(("rank", "world", "local_rank", "local_world"), [(4, 4, 0, 4), (0, 4, 4, 4), (-1, 4, 0, 4)])
def test_rank_outside_its_world_is_refused(rank, world, local_rank, local_world):
    with pytest.raises(ConfigError, match=f"rank {rank} of {world}"):
        rank_variables(rank, world, local_rank, local_world, "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("facts", "user", "told"),
    [
        ({"rank": {"RANK": "1"}}, {"RANK": 3}, ["RANK='3'", "RANK='1'", "rank"]),
        ({"rank": {"RANK": "1"}}, {"GROUP_RANK": "0"}, ["GROUP_RANK='0'", "no such rank variable"]),
        ({}, {"WORLD_SIZE": "4"}, ["WORLD_SIZE='4'", "no rank"]),
        (
            {"devices": {"CUDA_VISIBLE_DEVICES": "4,5"}},
            {"CUDA_VISIBLE_DEVICES": "0"},
            ["CUDA_VISIBLE_DEVICES='0'", "CUDA_VISIBLE_DEVICES='4,5'", "cards"],
        ),
        (
            {"deterministic": True},
            {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
            ["CUBLAS_WORKSPACE_CONFIG=':0:0'", "determinism", ":4096:8"],
        ),
        ({"deterministic": True}, {"PYTHONHASHSEED": "random"}, ["PYTHONHASHSEED='random'", "determinism"]),
    ],
)
def test_contradicted_guarantee_names_both(facts, user, told):
    with pytest.raises(EnvironmentConflictError) as caught:
        build_environment(inherited={}, user=user, **facts)
    assert [part for part in told if part not in str(caught.value)] == []


def test_all_conflicts_are_told_at_once():
    with pytest.raises(EnvironmentConflictError) as caught:
        build_environment(
            inherited={},
            deterministic=True,
            rank={"RANK": "0"},
            devices={"CUDA_VISIBLE_DEVICES": "1"},
            user={"RANK": "2", "CUDA_VISIBLE_DEVICES": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},
        )
    assert len(str(caught.value).splitlines()) == 3


def test_user_may_repeat_a_fact_and_set_what_no_guarantee_covers():
    env = build_environment(
        inherited={}, rank={"RANK": "0"}, backend={"NCCL_DEBUG": "WARN"}, user={"RANK": "0", "NCCL_DEBUG": "INFO"}
    )
    assert (env["RANK"], env["NCCL_DEBUG"]) == ("0", "INFO")


def test_determinism_brings_its_variables():
    env = build_environment(inherited={}, deterministic=True, seed=1234)
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert env["PYTHONHASHSEED"] == "1234"
    assert check_determinism(env) == []


@pytest.mark.parametrize("layer", ["inherited", "backend", "user"])
@pytest.mark.parametrize(("name", "value"), [("CUBLAS_WORKSPACE_CONFIG", ":16:8"), ("NCCL_ALGO", "Tree")])
def test_value_that_keeps_the_promise_is_kept(layer, name, value):
    given = {"inherited": {}, layer: {name: value}}
    assert build_environment(deterministic=True, seed=1, **given)[name] == value


def test_inherited_hash_seed_gives_way_to_the_seed():
    assert build_environment(inherited={"PYTHONHASHSEED": "77"}, deterministic=True, seed=5)["PYTHONHASHSEED"] == "5"
    assert build_environment(inherited={}, user={"PYTHONHASHSEED": 77}, deterministic=True)["PYTHONHASHSEED"] == "77"


def test_hash_seed_fits_whatever_the_seed():
    assert determinism_variables(2**40 + 3, {})["PYTHONHASHSEED"] == "3"


def test_variable_set_after_the_start_came_too_late():
    env = determinism_variables(1, {})
    problems = check_determinism(env, at_start={**env, "PYTHONHASHSEED": "0"})
    assert problems == ["PYTHONHASHSEED='1' came too late: it was '0' when the process started"]


def test_missing_variable_is_named():
    assert "CUBLAS_WORKSPACE_CONFIG is not set; determinism needs :4096:8 or :16:8" in check_determinism({})


_PROBE = """
import json, os, sys
first = {name: os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "NCCL_ALGO")}
from powertrain.env import check_determinism
problems = check_determinism()
os.environ["PYTHONHASHSEED"] = "99"
print(json.dumps({"first": first, "hash": hash("word"), "problems": problems, "late": check_determinism()}))
"""


def _record(env):
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_started_process_finds_determinism_at_its_first_point():  # B21
    env = build_environment(deterministic=True, seed=1234, user={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    one, two = _record(env), _record(env)
    assert one == two
    assert one["first"] == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTHONHASHSEED": "1234", "NCCL_ALGO": "Ring"}
    assert one["problems"] == []
    assert one["late"] == ["PYTHONHASHSEED='99' came too late: it was '1234' when the process started"]

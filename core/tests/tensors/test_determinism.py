import json
import os
import subprocess
import sys

import pytest
import torch

from powertrain.errors import ConfigError
from powertrain.tensors import determinism

CHILD = """
import json, os, random, sys
import numpy, torch
from powertrain.tensors import determinism
determinism.enable(sys.argv[1])
determinism.seed_all(1234)
determinism.check(sys.argv[1])
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        draws = [random.random(), float(numpy.random.rand()), float(torch.rand(1))]
        self.first = dict(determinism.observed(), draws=draws)
print(json.dumps(Model().first))
"""


def _first_seen(device="cuda", **extra):
    env = {k: v for k, v in os.environ.items() if k != determinism.CUBLAS} | {"OMP_NUM_THREADS": "1"} | extra
    run = subprocess.run(
        [sys.executable, "-c", CHILD, device], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_switches_are_on_at_construction_in_two_processes():  # B21
    first, second = _first_seen(), _first_seen(CUBLAS_WORKSPACE_CONFIG=":16:8", PYTHONHASHSEED="1234")
    assert first["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert second["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert second["PYTHONHASHSEED"] == "1234"
    assert first["deterministic_algorithms"] is True
    assert first["matmul_tf32"] is False
    assert first["draws"] == second["draws"]


def test_variable_that_is_not_deterministic_is_refused(monkeypatch):
    monkeypatch.setenv(determinism.CUBLAS, ":0:0")
    with pytest.raises(ConfigError, match=":0:0"):
        determinism.enable("cuda")


def test_too_late_for_cublas_is_refused(monkeypatch):
    monkeypatch.delenv(determinism.CUBLAS, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="in use already"):
        determinism.enable("cuda")


def test_check_names_every_switch_that_is_off(monkeypatch):
    monkeypatch.delenv(determinism.CUBLAS, raising=False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # another test's engine may have
    with pytest.raises(ConfigError, match=r"deterministic_algorithms is False.*CUBLAS"):
        determinism.check("cuda")


def test_ranks_draw_differently_and_again_alike():
    draws = []
    for rank in (0, 1, 0):
        determinism.seed_all(7, rank)
        draws.append(float(torch.rand(1)))
    assert draws[0] == draws[2] != draws[1]

"""Tests on a real vLLM, in an environment of its own: POWERTRAIN_TEST_ENVIRONMENT=vllm. Elsewhere none is collected."""

import os
import sys
from pathlib import Path

import pytest

from powertrain import EngineSpec
from powertrain_vllm.environment import environment

HERE = os.environ.get("POWERTRAIN_TEST_ENVIRONMENT") == "vllm"
collect_ignore_glob = [] if HERE else ["test_*.py"]
sys.path.append(str(Path(__file__).parent))
if HERE:  # vLLM and torch read these when they are imported
    needed = environment({}, EngineSpec(backend="vllm", role="infer", model="", deterministic=True))
    os.environ.update(needed, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def counters():
    """Versions, each used once in the life of a module's engine."""
    return iter(range(2, 1000))

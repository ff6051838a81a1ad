import subprocess
import sys

import pytest

from powertrain.errors import EngineNotReadyError, Violations
from powertrain.options import resolve
from powertrain.registry import Registry

HEAVY = ("torch", "numpy", "transformers", "ray", "vllm", "sglang", "megatron", "powertrain_vllm.engine")


@pytest.fixture(scope="module")
def registry():
    return Registry(allow=("vllm",))


@pytest.fixture(scope="module")
def spec(registry):
    return registry.backend("vllm")


def test_spec_tells_role_and_axes(spec):
    assert spec.role == "infer"
    assert set(spec.axis_table()) == set("dpte")
    assert not spec.axis_table()["e"].world
    assert spec.axis_table()["d"].instances is (True)


def test_engine_is_honestly_not_there(registry, spec):
    with pytest.raises(EngineNotReadyError, match=r"^backend 'vllm' of powertrain-vllm \d.*no engine for it yet$"):
        registry.load_class(spec)


def test_options_are_typed(spec):
    assert resolve(spec.options, {"gpu_memory_utilization": "0.6"}, where="vllm")["gpu_memory_utilization"] == 0.6
    with pytest.raises(Violations, match="gpu_memory_utilization"):
        resolve(spec.options, {"gpu_memory_utilization": "1.5"}, where="vllm")


def test_hooks_import_nothing_heavy():
    code = f"import powertrain_vllm.hooks, sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []

import subprocess
import sys

import pytest

from powertrain.errors import EngineNotReadyError, Violations
from powertrain.options import resolve
from powertrain.registry import Registry

HEAVY = ("torch", "numpy", "transformers", "ray", "vllm", "sglang", "megatron", "powertrain_megatron.engine")


@pytest.fixture(scope="module")
def registry():
    return Registry(allow=("megatron",))


@pytest.fixture(scope="module")
def spec(registry):
    return registry.backend("megatron")


def test_spec_tells_role_and_axes(spec):
    assert spec.role == "train"
    assert set(spec.axis_table()) == set("pdcte")
    assert not spec.axis_table()["e"].world
    assert spec.axis_table()["d"].instances is (False)


def test_engine_is_honestly_not_there(registry, spec):
    with pytest.raises(
        EngineNotReadyError, match=r"^backend 'megatron' of powertrain-megatron \d.*no engine for it yet$"
    ):
        registry.load_class(spec)


def test_options_are_typed(spec):
    assert resolve(spec.options, {"etp": "2"}, where="megatron")["etp"] == 2
    with pytest.raises(Violations, match="etp"):
        resolve(spec.options, {"etp": "0"}, where="megatron")


def test_hooks_import_nothing_heavy():
    code = f"import powertrain_megatron.hooks, sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []

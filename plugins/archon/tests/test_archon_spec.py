import subprocess
import sys

import pytest

from powertrain.errors import EngineNotReadyError, Violations
from powertrain.options import resolve
from powertrain.registry import Registry

HEAVY = ("torch", "numpy", "transformers", "ray", "vllm", "sglang", "megatron", "powertrain_archon.engine")


@pytest.fixture(scope="module")
def registry():
    return Registry(allow=("archon",))


@pytest.fixture(scope="module")
def spec(registry):
    return registry.backend("archon")


def test_spec_tells_role_and_axes(spec):
    assert spec.role == "train"
    assert set(spec.axis_table()) == set("pdcte")
    assert not spec.axis_table()["e"].world
    assert spec.axis_table()["d"].instances is (False)


def test_engine_is_honestly_not_there(registry, spec):
    with pytest.raises(EngineNotReadyError, match=r"^backend 'archon' of powertrain-archon \d.*no engine for it yet$"):
        registry.load_class(spec)


def test_options_are_typed(spec):
    assert resolve(spec.options, {"attn_type": "sdpa"}, where="archon")["attn_type"] == "sdpa"
    with pytest.raises(Violations, match="attn_type"):
        resolve(spec.options, {"attn_type": "flash"}, where="archon")


def test_hooks_import_nothing_heavy():
    code = f"import powertrain_archon.hooks, sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []

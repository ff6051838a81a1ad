import subprocess
import sys
from dataclasses import replace

import pytest

from powertrain import EngineSpec
from powertrain.errors import ConfigError, Violations
from powertrain.interfaces.build import RankSpec
from powertrain.options import resolve
from powertrain.registry import Registry
from powertrain_vllm.environment import environment
from powertrain_vllm.ranks import arguments, variables
from powertrain_vllm.settings import engine_arguments
from powertrain_vllm.versions import generation

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


def test_versions_outside_the_tested_range_are_refused():
    assert generation("0.32.0+cpu").head_dtype
    assert not generation("0.23.0").head_dtype
    for version in ("0.22.9", "0.33.0", "1.0"):
        with pytest.raises(
            ConfigError, match=rf"vLLM {version} is installed; .*0\.23 to below 0\.33.*untested_version"
        ):
            generation(version)
    assert generation("0.33.0", allow=True).head_dtype


def test_environment_says_where_vllm_computes():
    cpu = environment({}, EngineSpec(backend="vllm", role="infer", model="m", deterministic=True))
    assert cpu["VLLM_TARGET_DEVICE"] == "cpu"
    assert "VLLM_BATCH_INVARIANT" not in cpu
    assert cpu["MKL_CBWR"] == "AVX2,STRICT"
    assert "MKL_CBWR" not in environment({}, EngineSpec(backend="vllm", role="infer", model="m"))
    card = RankSpec(device="cuda")
    cuda = environment({}, EngineSpec(backend="vllm", role="infer", model="m", deterministic=True, place=card))
    assert cuda["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_TARGET_DEVICE" not in cuda
    assert not [name for name in {**cpu, **cuda} if "RANK" in name or "WORLD" in name or "MASTER" in name]


def test_a_runs_dtype_is_one_for_both_sides():
    spec = EngineSpec(backend="vllm", role="infer", model="m", dtype="bfloat16")
    assert engine_arguments(spec, {"dtype": "auto"}, native_head=True)["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match=r"vllm\?dtype=float16.*bfloat16"):
        engine_arguments(spec, {"dtype": "float16"}, native_head=True)


def test_head_is_asked_of_vllm_where_it_has_it():
    spec = EngineSpec(backend="vllm", role="infer", model="m")
    assert engine_arguments(spec, {}, native_head=True)["hf_overrides"] == {"head_dtype": "float32"}
    assert engine_arguments(spec, {}, native_head=False)["hf_overrides"] == {}


def test_options_are_typed(spec):
    assert resolve(spec.options, {"gpu_memory_utilization": "0.6"}, where="vllm")["gpu_memory_utilization"] == 0.6
    with pytest.raises(Violations, match="gpu_memory_utilization"):
        resolve(spec.options, {"gpu_memory_utilization": "1.5"}, where="vllm")


def test_hooks_import_nothing_heavy():
    code = f"import powertrain_vllm.hooks, sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_axes_that_vllm_cannot_lay_out_are_refused():
    def engine(world, **axes):
        return EngineSpec(backend="vllm", role="infer", model="m", axes=axes, place=RankSpec(world=world))

    assert arguments(engine(1, d=2)) == {}
    assert arguments(engine(4, t=2, p=2))["distributed_executor_backend"] == "external_launcher"
    with pytest.raises(ConfigError, match=r"t2p3 makes 6 ranks .* has 4"):
        arguments(engine(4, t=2, p=3))
    with pytest.raises(ConfigError, match=r"all 4 ranks of t or over none, not over e2: say e4"):
        arguments(engine(4, t=4, e=2))


def test_ranks_of_one_engine_agree_on_the_order_of_sets_and_meet_where_they_are_told():
    place = RankSpec(rank=1, world=2, local_rank=1, rendezvous="127.0.0.1:20001")
    assert environment({}, EngineSpec(backend="vllm", role="infer", model="m", place=place))["PYTHONHASHSEED"] == "0"
    assert "PYTHONHASHSEED" not in environment({}, EngineSpec(backend="vllm", role="infer", model="m"))
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20001"}
    assert variables(place) == told
    assert variables(replace(place, device="cuda"))["LOCAL_RANK"] == "0"

"""Reported case B29: a vLLM that is broken or missing is named, with the cause, and stops nothing but itself."""

import os
import subprocess
import sys

import pytest

from powertrain import EngineSpec
from powertrain.errors import ConfigError
from powertrain_vllm.engine import VllmEngine

CAUSES = {
    "broken": ("raise ImportError('no module named fancy_gpu_lib')", "ImportError: no module named fancy_gpu_lib"),
    "lacking": ("import fancy_gpu_lib", "ModuleNotFoundError: No module named 'fancy_gpu_lib'"),
    "raising": ("raise RuntimeError('no such card')", "RuntimeError: no such card"),
}
ARGUMENTS = "class EngineArgs:\n    warp_speed: int = 1\n"
SPEC = EngineSpec(backend="vllm", role="infer", model="m")


@pytest.fixture
def broken(tmp_path, monkeypatch, request):
    """Put a vLLM on the path that cannot be imported; its arguments can be read."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(request.param)
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(ARGUMENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return tmp_path


async def build():
    engine = VllmEngine()
    try:
        engine.prepare({})
        await engine.build(SPEC)
    finally:
        await engine.close()


@pytest.mark.parametrize(("broken", "cause"), CAUSES.values(), ids=CAUSES, indirect=["broken"])
async def test_broken_vllm_is_named_with_its_cause_and_the_way_out(broken, cause):
    with pytest.raises(
        ConfigError, match=r"vllm is installed for .* and cannot be imported: .*install a build"
    ) as told:
        await build()
    assert cause in str(told.value)
    assert type(told.value.__cause__).__name__ == cause.partition(":")[0]


async def test_missing_vllm_is_told_apart_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"vllm is not installed for .*; pip install 'powertrain-vllm\[engine\]'"):
        await build()


@pytest.mark.parametrize("broken", [CAUSES["broken"][0]], indirect=True)
def test_all_that_needs_no_engine_goes_on_beside_a_broken_vllm(broken):
    """Listing and explaining import neither it nor what it lacks; another backend is picked as ever."""
    code = (
        "import sys; from powertrain.cli import main\n"
        "assert main(['engines', '--json']) == 0\n"
        "assert main(['explain', 'fsdp:d1|vllm:d1?warp_speed=3']) == 0\n"
        "assert main(['explain', 'fsdp:d1|hf:d1']) == 0\n"
        "assert not {'vllm', 'fancy_gpu_lib', 'torch'} & sys.modules.keys()"
    )
    env = {**os.environ, "PYTHONPATH": str(broken)}
    call = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert '"name": "vllm"' in done.stdout

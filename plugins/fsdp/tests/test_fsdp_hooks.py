import logging
import os
import subprocess
import sys

import pytest

from powertrain.errors import ConfigError
from powertrain.interfaces.build import EngineSpec, RankSpec
from powertrain.options import resolve
from powertrain_fsdp import needs
from powertrain_fsdp.hooks import powertrain_backend


def test_spec_names_an_engine_and_known_capabilities():
    from powertrain.interfaces.train import TrainEngine
    from powertrain.registry import Registry
    from powertrain.specs import CAPABILITIES

    spec, registry = powertrain_backend(), Registry()
    assert issubclass(registry.load_class(spec), TrainEngine)
    assert set(spec.capabilities) <= set(CAPABILITIES)
    assert callable(registry.load_class(spec, "environment"))
    assert all(option.help.endswith(".") or option.help.endswith(")") for option in spec.options)
    assert resolve(spec.options, {}, where="x")["microbatch_tokens"] == 2048


def test_hooks_and_needs_import_nothing_heavy():
    code = (
        "import sys, powertrain_fsdp.hooks as h, powertrain_fsdp.needs; h.powertrain_backend();"
        "print([m for m in ('torch', 'numpy', 'transformers', 'peft') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_registry_finds_the_backend():
    from powertrain.registry import Registry

    assert Registry().backend("fsdp").engine == "powertrain_fsdp.engine:FsdpEngine"


@pytest.mark.parametrize(
    ("rendezvous", "wanted"),
    [("127.0.0.1:1", {"GLOO_SOCKET_IFNAME": "lo"}), ("", {}), ("node7:29500", {})],
)
def test_loopback_ranks_talk_over_loopback(rendezvous, wanted):
    place = RankSpec(rendezvous=rendezvous, device="cuda")
    spec = EngineSpec(backend="fsdp", role="train", model="m", place=place)
    assert needs.environment({}, spec) == (wanted if sys.platform == "linux" else {})


def test_variables_that_come_too_late_are_told(monkeypatch, caplog):
    import torch  # noqa: F401 - read its thread settings already

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("POWERTRAIN_TEST_LATE", "a")
    with caplog.at_level(logging.WARNING):
        needs.apply({"OMP_NUM_THREADS": "7", "POWERTRAIN_TEST_LATE": "b"})
    assert os.environ["POWERTRAIN_TEST_LATE"] == "b"
    assert "OMP_NUM_THREADS" in caplog.text
    assert "POWERTRAIN_TEST_LATE" not in caplog.text


@pytest.mark.parametrize(("engine", "wanted"), [("fsdp:d2", "lo"), ("fsdp:d1", None)])
def test_ranks_on_one_host_talk_over_loopback(tmp_path, engine, wanted):
    """A host whose own name does not resolve must not stop gloo."""
    from powertrain.layout import parse_layout
    from powertrain.registry import Registry
    from powertrain.runtime.driver import Driver

    registry = Registry()
    specs = {"fsdp": EngineSpec(backend="fsdp", role="train", model="m")}
    driver = Driver(parse_layout(engine, registry=registry), specs, registry=registry, run_dir=tmp_path)
    assert driver.plans[0].needs.get("GLOO_SOCKET_IFNAME") == wanted


@pytest.mark.parametrize("given", ["spda", "", "flash"])
def test_unknown_attention_is_refused_before_anything_starts(given):
    with pytest.raises(ConfigError, match="it takes sdpa, eager, flash_attention_2, flash_attention_3"):
        resolve(powertrain_backend().options, {"attention": given}, where="backend fsdp")

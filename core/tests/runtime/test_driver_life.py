"""How drivers begin and end: refusals before anything starts, and nothing left behind afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from powertrain.errors import (
    ConfigError,
    DeadlineError,
    EngineNotReadyError,
    PluginError,
    StateError,
    UnknownPluginError,
    WorkerError,
)
from powertrain.interfaces.build import HeadSpec, RankSpec
from powertrain.runtime import wire
from powertrain.weights import WeightVersion

_before = set()


@pytest.fixture(autouse=True)
def earlier_children():
    """Leave out what earlier tests of this process keep running, multiprocessing's own helper for one."""
    _before.clear()
    _before.update(psutil.Process().children(recursive=True))


def children():
    return [child for child in psutil.Process().children(recursive=True) if child not in _before]


async def test_close_leaves_no_process_no_segment_and_may_be_repeated(make_driver, segments):
    driver = make_driver("toytrain:d2+toyinfer:d1", inline="never")
    await driver.start()
    assert len(children()) >= 3
    await driver.close()
    await driver.close()
    assert children() == []
    assert segments() == []


async def test_workers_close_their_engines_when_the_driver_does(make_driver, tmp_path):
    async with make_driver("toytrain:d2"):
        pass
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == ["toytrain-r0.log", "toytrain-r1.log"]
    assert all("toy engine closes" in log.read_text() for log in logs)


async def test_an_error_in_the_block_closes_everything(make_driver):
    with pytest.raises(KeyError):
        async with make_driver("toytrain:d1", inline="never"):
            raise KeyError
    assert children() == []


async def test_a_driver_starts_once(make_driver):
    async with make_driver("toyinfer:d1") as driver:
        with pytest.raises(StateError, match="started already"):
            await driver.start()


async def test_registering_has_the_start_deadline(make_driver, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    driver = make_driver(f"toytrain:d1?python='{python}'", timeouts={"start": 0.3})
    with pytest.raises(DeadlineError, match=r"toytrain-r0 did not register within 0\.3 s"):
        await driver.start()
    assert children() == []


def test_a_worker_that_cannot_be_started_is_told_and_nothing_else(make_driver, tmp_path, caplog):
    python = tmp_path / "python"
    python.write_text("#!/no/such/interpreter\n")
    python.chmod(0o755)

    def start():
        with pytest.raises(WorkerError, match="toytrain-r0 could not be started"):
            asyncio.run(make_driver(f"toytrain:d2?python='{python}'").start())

    start()
    gc.collect()
    assert caplog.text == ""  # no complaint of a greeting that nobody waits for any more


SCRIPT = """
    import asyncio, sys
    import numpy as np
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.data import GenerateRequest
    from powertrain.layout import parse_layout
    from powertrain.registry import Registry
    from powertrain.runtime import wire
    from powertrain.runtime.driver import Driver

    wire.RUN_PREFIX = sys.argv[2]

    async def main():
        registry = Registry()
        layout = parse_layout("toytrain:d1+toyinfer:d1", registry=registry)
        specs = {part.label: EngineSpec(backend=part.backend, role=part.role, model="m") for part in layout.parts}
        async with Driver(layout, specs, registry=registry, run_dir=sys.argv[1], inline="never") as driver:
            pids = [(await client.health())[0]["pid"] for client in (*driver.train.values(), *driver.infer.values())]
            big = GenerateRequest(request_id="sleep", prompt=np.arange(50_000))
            asked = asyncio.ensure_future(driver.infer["toyinfer"].generate(big))  # its segment is in use at the end
            await asyncio.sleep(0.1)
            print(*pids, flush=True)
            await asyncio.sleep(60)

    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_no_worker_outlives_its_driver(tmp_path, number, segments):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), wire.RUN_PREFIX],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(workers) == 2
    assert segments() != []
    driver.send_signal(number)
    _, alive = psutil.wait_procs(workers, timeout=10)
    errors = driver.communicate(timeout=10)[1]
    assert alive == []
    assert segments() == []
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert "toy engine closes" in (tmp_path / "logs" / "toytrain-r0.log").read_text()


def test_a_worker_without_a_driver_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "powertrain.runtime.worker"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "POWERTRAIN_WORKER is not set" in done.stderr


def test_parts_and_specs_must_match(make_driver, registry, tmp_path):
    from powertrain.layout import parse_layout
    from powertrain.runtime.driver import Driver

    with pytest.raises(ConfigError, match="has the parts toytrain, but specs are given for none"):
        Driver(parse_layout("toytrain:d1", registry=registry), {}, registry=registry, run_dir=tmp_path)


def test_heads_that_differ_are_refused_unless_allowed(make_driver):
    specs = {"toytrain": {"head": HeadSpec(fp32=True)}, "toyinfer": {"head": HeadSpec(fp32=False)}}
    with pytest.raises(ConfigError, match="the LM head is float32 in training"):
        make_driver("toytrain:d1|toyinfer:d1", specs=specs)
    assert not make_driver("toytrain:d1|toyinfer:d1", specs=specs, head_mismatch="allow").heads_agree
    assert make_driver("toytrain:d1|toyinfer:d1").heads_agree


def test_an_unknown_engine_option_is_refused(make_driver):
    with pytest.raises(ConfigError, match=r"part toytrain: unknown option 'fial' \(did you mean 'fail'\?\)"):
        make_driver("toytrain:d1", specs={"toytrain": {"options": {"fial": "x"}}})


def test_a_part_on_another_card_cannot_live_inline(make_driver):
    with pytest.raises(ConfigError, match="'toytrain' is to live in the driver's process but has card 1, not 0"):
        make_driver("toyinfer:d1+toytrain:d1?inline=true", specs={"toytrain": {"place": RankSpec(device="cuda")}})


def test_an_interpreter_that_is_not_there_is_refused(make_driver, tmp_path):
    with pytest.raises(ConfigError, match=r"part 'toytrain' .*/no-python', which is no program on this host; give"):
        make_driver(f"toytrain:d1?python='{tmp_path}/no-python'")


@pytest.mark.parametrize(
    ("text", "inline", "expected"),
    [
        ("toytrain:d1", "auto", True),
        ("toytrain:d1", "never", False),
        ("toytrain:d1?inline=true", "never", True),
        ("toytrain:d1?inline=false", "auto", False),
        (f"toytrain:d1?python='{sys.executable}'", "auto", False),
        ("toyinfer:t2", "auto", False),
    ],
)
def test_engines_of_one_rank_live_inline_unless_told_otherwise(make_driver, text, inline, expected):
    assert [plan.inline for plan in make_driver(text, inline=inline).plans] == [expected]


def test_more_cards_than_visible_are_refused_with_both_numbers(make_driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    specs = {"toytrain": {"place": RankSpec(device="cuda")}, "toyinfer": {"place": RankSpec(device="cuda")}}
    with pytest.raises(ConfigError, match="2 devices visible, 3 needed"):
        make_driver("toytrain:d2+toyinfer:d1", specs=specs)


async def test_the_transfer_is_the_lowest_rank_that_reaches(make_driver):
    async with make_driver("toytrain:d1|toyinfer:d1") as driver:
        assert driver.transfer("toytrain", "toyinfer").name == "toycopy"
        assert driver.transfer("toytrain", "toyinfer") is driver.transfer("toytrain", "toyinfer")
        with pytest.raises(
            ConfigError, match="no weights go from 'toyinfer' to 'toytrain'; the layout's pairs are: toytrain"
        ):
            driver.transfer("toyinfer", "toytrain")


def test_a_transfer_that_does_not_reach_is_refused(make_driver, monkeypatch):
    monkeypatch.setattr("powertrain_toy.hooks.REACH", ("process",), raising=True)
    with pytest.raises(
        ConfigError,
        match="no transfer fits: 'toycopy' reaches within process, but from 'toytrain' to 'toyinfer' it takes",
    ):
        make_driver("toytrain:d2+toyinfer:d1", transfer="toycopy")


def test_an_unknown_transfer_or_launcher_lists_what_there_is(make_driver):
    with pytest.raises(UnknownPluginError, match="toycopy"):
        make_driver("toytrain:d1|toyinfer:d1", transfer="toycpy")


def test_a_planned_transfer_is_refused_when_named_and_never_picked(make_driver, monkeypatch):
    monkeypatch.setattr("powertrain_toy.hooks.STATUS", "planned")
    with pytest.raises(
        EngineNotReadyError, match=r"'toycopy' of powertrain-toy 1\.0 .*this release does not bring it yet$"
    ):
        make_driver("toytrain:d1|toyinfer:d1 via toycopy")
    with pytest.raises(EngineNotReadyError, match="'toycopy'"):
        make_driver("toytrain:d1|toyinfer:d1", transfer="toycopy")
    (picked,) = make_driver("toytrain:d1|toyinfer:d1").picked.values()
    assert (picked.name, picked.status) == ("local", "ready")  # of a higher rank than the planned one


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"launcher": "locl"}, r"no launcher 'locl' is installed \(did you mean 'local'\?\)"),
        ({"launcher_options": {"grce": 1}}, r"launcher local: unknown option 'grce' \(did you mean 'grace'\?\)"),
        (
            {"transfer_options": {"toycopy": {"fial": 1}}},
            r"transfer toycopy: unknown option 'fial' \(did you mean 'fail'",
        ),
        ({"transfer_options": {"toycpy": {"fail": 1}}}, r"no transfer 'toycpy' is installed \(did you mean 'toycopy'"),
        ({"env": {"WORLD_SIZE": "5"}}, "WORLD_SIZE='5' in your env contradicts"),
    ],
    ids=["launcher", "launcher-option", "transfer-option", "transfer-options-of-none", "env"],
)
@pytest.mark.parametrize("text", ["toytrain:d2|toyinfer:d2", "toytrain:d1|toyinfer:d1"])
def test_what_can_be_refused_is_refused_before_anything_starts(make_driver, text, given, match):
    with pytest.raises((ConfigError, PluginError), match=match):
        make_driver(text, **given)


async def test_pushes_to_one_part_wait_for_each_other(make_driver):
    async with make_driver("toytrain:d1|toyinfer:d1") as driver:
        first, second = await asyncio.gather(
            *(driver.push("toytrain", "toyinfer", WeightVersion(1, counter)) for counter in (1, 2))
        )
        assert (str(first.version), str(second.version), driver.infer["toyinfer"].version) == ("1.1", "1.2", "1.2")


async def test_an_inline_engine_is_asked_only_for_what_a_running_process_can_set(make_driver, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    specs = {"toytrain": {"deterministic": True}}
    async with make_driver("toytrain:d1", specs=specs, env={"MY": "1"}) as driver:
        asked = (await driver.train["toytrain"].health())[0]["asked"]
        assert (asked["CUBLAS_WORKSPACE_CONFIG"], asked["MY"], asked["TOY_NUMBER"]) == (":4096:8", "1", "3")
        assert "PYTHONHASHSEED" not in asked


def test_ports_of_two_engines_differ(make_driver):
    async def ports():
        async with make_driver("toytrain[a]:d1+toytrain[b]:d1", inline="never") as driver:
            return [(await client.health())[0]["rank_env"]["MASTER_PORT"] for client in driver.train.values()]

    found = asyncio.run(ports())
    assert len(set(found)) == 2


def test_importing_the_driver_imports_nothing_heavy():
    code = "import sys, powertrain.runtime.driver; print(sorted({'torch', 'zmq', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env={**os.environ})
    assert done.stdout.strip() == "[]", done.stderr
    assert Path(sys.executable).exists()

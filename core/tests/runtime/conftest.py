"""The toy plugin on the path of this process and of every worker, and drivers over it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from powertrain.errors import PowertrainError
from powertrain.interfaces.build import EngineSpec
from powertrain.interfaces.data import GenerateRequest, LossSpec, TrainBatch
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime import wire
from powertrain.runtime.driver import Driver

DIST = Path(__file__).parent / "toy"


@pytest.fixture(autouse=True, scope="module")
def toy_plugin():
    with pytest.MonkeyPatch.context() as monkeypatch:
        _show_toy_plugin(monkeypatch)
        yield


def _show_toy_plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(DIST))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DIST), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("POWERTRAIN_PLUGINS", "powertrain-toy,local")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(wire, "RUN_PREFIX", f"powertrain-t{os.getpid()}-")  # other runs on this host do not count


@pytest.fixture
def registry(toy_plugin):
    return Registry()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(toy_plugin, tmp_path_factory):
    """Return a function that starts a driver of one part, or hands out the one of an earlier test of the module.

    The engines are as new (the toy's order "reset"), unless a test has closed or broken them: then it starts another.
    """
    drivers = {}

    async def start(text, inline="auto"):
        driver = drivers.get((text, inline))
        if driver is None or not await _as_new(driver):
            if driver is not None:
                await driver.close()
            driver = drivers[text, inline] = _driver(text, Registry(), tmp_path_factory.mktemp("run"), inline=inline)
            await driver.start()
        return driver

    yield start
    for driver in drivers.values():
        await driver.close()


async def _as_new(driver):
    batch = TrainBatch.from_sequences([[1]], [[2]])
    try:
        for client in driver.train.values():
            await client.train_step(batch, LossSpec(name="reset"))
        for pool in driver.infer.values():
            await pool.resume("0.0")
            for handle in pool.handles:
                await handle.call("generate", _ask("reset"), deadline=10.0)
                handle.version = None
    except PowertrainError:
        return False
    return True


def _driver(text, registry, folder, *, specs=None, **kwargs):
    layout = parse_layout(text, registry=registry)
    fields = specs or {}
    templates = {
        part.label: EngineSpec(backend=part.backend, role=part.role, model="m", **fields.get(part.label, {}))
        for part in layout.parts
    }
    kwargs.setdefault("timeouts", {"start": 30.0, "step": 30.0, "generate": 30.0, "update": 10.0})
    return Driver(layout, templates, registry=registry, run_dir=folder, **kwargs)


@pytest.fixture
def make_driver(registry, tmp_path):
    """Return a function from a config string to an unstarted Driver; fields of the specs by keyword."""

    def make(text, **kwargs):
        return _driver(text, registry, tmp_path, **kwargs)

    return make


@pytest.fixture(params=["inline", "worker"])
def where(request):
    """Where an engine of one rank lives: the behaviour is the same."""
    return {"inline": "auto", "worker": "never"}[request.param]


@pytest.fixture
def batch():
    return TrainBatch.from_sequences([[1, 2], [3]], [[4, 5], [6]], meta={"turn": (1, "a")})


@pytest.fixture
def order():
    """Return a function that makes the loss by which a toy training step is told what to do."""
    return lambda name, **config: LossSpec(name=name, config=config)


@pytest.fixture
def ask():
    """Return a function that makes a request; its id tells the toy inference engine what to do."""
    return _ask


def _ask(name="r", prompt=(1, 2, 3)):
    return GenerateRequest(request_id=name, prompt=np.asarray(prompt, np.int64))


@pytest.fixture
def segments():
    """Return a function that lists the segments of this test's drivers."""
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    return lambda: sorted(str(path) for path in folder.glob(f"{wire.RUN_PREFIX}*") if not path.name.endswith("lock"))

"""`powertrain.open_engine`: one engine by its config string, for scripts without an event loop."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.interfaces.build import EngineSpec, RankSpec
from powertrain.runtime.clients import Blocking

if TYPE_CHECKING:
    from powertrain.registry import Registry
    from powertrain.runtime.driver import Driver


def open_engine(
    engine: str,
    *,
    model: str = "",
    device: str = "auto",
    registry: Registry | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    inline: str = "auto",
    env: Mapping[str, str] | None = None,
    timeouts: Mapping[str, float] | None = None,
    **spec: Any,
) -> Blocking:
    """Start one part of a layout and return its client with blocking methods; a context manager.

    engine: a config string of one part (`"fsdp:d1"`, `"hf:d2"`). A training part has the methods of `TrainClient`, an
    inference part those of `InferPool`, with any number of ranks and instances. model: as in a recipe file; a
    folder is taken as it is. device: auto, cpu or cuda. spec: further fields of `EngineSpec` (`optim=`, `lora=`,
    `head=`, `seed=`, ...). run_dir: gets the workers' logs; a folder that goes away again if not given.
    inline, env, timeouts: as for `Driver`.

        with open_engine("fsdp:d1", model="models/smol", optim=OptimSpec(lr=1e-4)) as engine:
            result = engine.train_step(batch, LossSpec(name="..."))
    """
    from powertrain.devices import resolve_device
    from powertrain.layout import parse_layout
    from powertrain.registry import Registry as _Registry
    from powertrain.runtime.driver import Driver as _Driver

    registry = registry or _Registry()
    layout = parse_layout(engine, registry=registry)
    if len(layout.parts) != 1:
        message = f"{engine!r} has {len(layout.parts)} parts; open_engine takes one, a Driver takes them all"
        raise ConfigError(message)
    part = layout.parts[0]
    place = RankSpec(device=resolve_device(device))
    template = EngineSpec(backend=part.backend, role=part.role, model=_folder(model), place=place, **spec)
    scratch = tempfile.TemporaryDirectory(prefix="powertrain-") if run_dir is None else None
    driver = _Driver(
        layout,
        {part.label: template},
        registry=registry,
        run_dir=scratch.name if scratch is not None else run_dir or "",
        inline=inline,
        env=env,
        timeouts=timeouts,
    )
    return _opened(driver, lambda: scratch.cleanup() if scratch is not None else None)


def _opened(driver: Driver, clean: Callable[[], None]) -> Blocking:
    """Start a driver of one part on a loop thread of its own and return the part's client."""
    from powertrain.runtime.handles import LoopThread

    thread = LoopThread("powertrain-open")

    def close() -> None:
        try:
            if thread.alive:
                thread.submit(driver.close()).result()
        finally:
            thread.stop()
            clean()

    try:
        thread.submit(driver.start()).result()
    except BaseException:
        close()
        raise
    client = next(iter(driver.train.values()), None) or next(iter(driver.infer.values()))
    return Blocking(client, thread, close)


def _folder(model: str) -> str:
    if not model or Path(model).is_dir():
        return model
    from powertrain.tensors.models import materialize

    return str(materialize(model))

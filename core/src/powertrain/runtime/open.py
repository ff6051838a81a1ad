"""`powertrain.open_engine`: one engine by its config string, for scripts without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Mapping
from typing import Any, Self

from powertrain.devices import resolve_device
from powertrain.errors import ConfigError, Violations
from powertrain.interfaces.build import EngineSpec, RankSpec
from powertrain.layout import parse_layout
from powertrain.options import nearest
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.runtime.host import LoopThread


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
    registry = registry or Registry()
    layout = parse_layout(engine, registry=registry)
    if len(layout.parts) != 1:
        message = f"{engine!r} has {len(layout.parts)} parts; open_engine takes one, a Driver takes them all"
        raise ConfigError(message)
    part = layout.parts[0]
    if model and not os.path.isdir(model):  # noqa: PTH112 - Path's raises for a name that is too long
        from powertrain.tensors.models import materialize

        model = str(materialize(model))
    place = RankSpec(device=resolve_device(device))
    known = [field.name for field in dataclasses.fields(EngineSpec)]
    wrong = [f"open_engine has no argument {name!r}{nearest(name, known)}" for name in spec if name not in known]
    if wrong:
        raise Violations(wrong)
    template = EngineSpec(backend=part.backend, role=part.role, model=model, place=place, **spec)
    with contextlib.ExitStack() as stack:  # closed here if anything fails, else by the client
        folder = run_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="powertrain-"))
        rest: dict[str, Any] = {"inline": inline, "env": env, "timeouts": timeouts}
        driver = Driver(layout, {part.label: template}, registry=registry, run_dir=folder, **rest)
        thread = LoopThread("powertrain-open")
        stack.callback(thread.stop)
        thread.submit(driver.start()).result()
        stack.callback(lambda: thread.submit(driver.close()).result())
        return Blocking({**driver.train, **driver.infer}[part.label], thread, stack.pop_all())


class Blocking:
    """The same client for callers without an event loop: every coroutine method blocks until its answer is there.

    `with` closes the engine and everything that was started for it.
    """

    def __init__(self, client: Any, thread: LoopThread, closing: contextlib.ExitStack) -> None:
        self._client = client
        self._thread = thread
        self._closing = closing

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        def blocking(*args: Any, **kwargs: Any) -> Any:
            future = self._thread.submit(found(*args, **kwargs))
            try:
                return future.result()
            except BaseException:
                future.cancel()
                raise

        blocking.__doc__ = found.__doc__
        return blocking

    def close(self) -> None:
        """Close the engine, its workers and all else; may be called twice."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""The host: owns one rank's engine and runs the driver's commands on it, in workers and in the driver alike."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, cast

from powertrain.errors import ConfigError, DeadlineError, StateError
from powertrain.interfaces.infer import InferEngine
from powertrain.interfaces.train import TrainEngine
from powertrain.options import nearest

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.registry import Registry

RULES: Final = {"train": TrainEngine.RULES, "infer": InferEngine.RULES}
WEIGHTS: Final = {
    "train": ("manifest", "changes", "fence"),
    "infer": ("manifest", "state", "begin", "finish", "abort"),
}
"""Methods of a weight source and of a weight sink that the driver may call, as `weights.<name>`."""
CLOSE_SECONDS: Final = 20.0


class Lane:
    """One thread that runs what it is given, in order. A daemon: a stuck collective never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` after all that were given before."""
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def stop(self) -> None:
        """Let the thread end once it has run what it was given."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as exc:  # noqa: BLE001 - the caller gets it through the future
                future.set_exception(exc)
            del item, future, job


class EngineHost:
    """One rank's engine. All methods run on one event loop.

    A training engine's methods run on one thread of their own, in the order of the commands. An inference engine's
    coroutines run on the loop; its sink and endpoints block, so they run in a thread, one at a time.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._spec: EngineSpec | None = None
        self._engine: TrainEngine | InferEngine | None = None
        self._lane = Lane("powertrain-engine")
        self._endpoints: dict[str, Any] = {}

    async def dispatch(self, method: str, args: Sequence[Any]) -> Any:
        """Run one command and return its answer.

        Commands: "open"(spec, env); every name in the engine's `RULES` except "weights"; "health", "abort" (infer);
        "weights.<name>" of `WEIGHTS`; "endpoint.call"(transfer, op, payload) and "endpoint.close"(transfer).
        Commands of a training engine begin in the order of the calls. ConfigError for an unknown command,
        StateError before "open".
        """
        if method == "open":
            return await self._open(*args)
        if self._engine is None:
            if method == "close":
                return None
            message = f"{method!r} was called before the engine was opened"
            raise StateError(message)
        area, _, name = method.partition(".")
        if method == "health":
            return dict(self._engine.health())
        if method == "close":
            return await self.close()
        if area == "weights" and name in WEIGHTS[self._role]:
            return await self._on_lane(lambda: self._weights_call(name, args))
        if method == "endpoint.call":
            return await self._on_lane(lambda: self._endpoint_call(*args))
        if method == "endpoint.close":
            return await self._on_lane(lambda: self._close_endpoint(*args))
        if method in self._methods():
            bound = getattr(self._engine, method)
            if inspect.iscoroutinefunction(bound):
                return await bound(*args)
            return await self._on_lane(lambda: bound(*args))
        known = [*self._methods(), "open", "health", *(f"weights.{name}" for name in WEIGHTS[self._role])]
        message = f"a {self._role} engine has no command {method!r}{nearest(method, known)}"
        raise ConfigError(message)

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close endpoints and engine; may be repeated. DeadlineError after `seconds` where its thread is stuck."""
        engine = self._engine
        if engine is None:
            return

        def close_here() -> None:
            for transfer in list(self._endpoints):
                self._close_endpoint(transfer)
            if isinstance(engine, TrainEngine):
                engine.close()

        try:
            async with asyncio.timeout(seconds):
                await self._on_lane(close_here)
                if isinstance(engine, InferEngine):
                    await engine.close()
        except TimeoutError as exc:
            message = f"the engine did not close within {seconds:g} s; it is still busy with an earlier command"
            raise DeadlineError(message, what="close", seconds=seconds) from exc

    def end(self) -> None:
        """Let the engine's thread end once it is idle; the host is of no use afterwards."""
        self._lane.stop()

    @property
    def _role(self) -> str:
        assert self._spec is not None
        return self._spec.role

    def _methods(self) -> list[str]:
        names = [name for name in RULES[self._role] if name != "weights"]
        return [*names, "abort"] if self._role == "infer" else names

    async def _on_lane(self, job: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._lane.submit(job))

    async def _open(self, spec: EngineSpec, env: Mapping[str, str]) -> None:
        """Find the engine's class, `prepare` and `build` it; one that fails is closed again."""
        if self._engine is not None:
            message = f"the engine {spec.part or spec.backend!r} is open already; close it first"
            raise StateError(message)
        engine = await self._on_lane(lambda: self._make(spec))
        self._spec, self._engine = spec, engine
        try:
            await self._on_lane(lambda: engine.prepare(env))
            if isinstance(engine, InferEngine):
                await engine.build(spec)
            else:
                await self._on_lane(lambda: engine.build(spec))
        except BaseException:
            try:
                await self.close()
            finally:
                self._engine = None
            raise

    def _make(self, spec: EngineSpec) -> TrainEngine | InferEngine:
        if self._registry is None:
            from powertrain.registry import Registry

            self._registry = Registry()
        described = self._registry.backend(spec.backend)
        engine = self._registry.load_class(described)()
        base = {"train": TrainEngine, "infer": InferEngine}[spec.role]
        if described.role != spec.role or not isinstance(engine, base):
            message = (
                f"{described.engine} of backend {spec.backend!r} is no {base.__name__}, as role {spec.role!r} needs"
            )
            raise ConfigError(message)
        return cast("TrainEngine | InferEngine", engine)

    def _weights(self) -> WeightSource | WeightSink:
        assert self._engine is not None
        return self._engine.weights()

    def _weights_call(self, name: str, args: Sequence[Any]) -> Any:
        found = getattr(self._weights(), name)
        return found(*args) if callable(found) else found

    def _endpoint_call(self, transfer: str, op: str, payload: Mapping[str, Any]) -> Any:
        if transfer not in self._endpoints:
            assert self._registry is not None
            assert self._spec is not None
            side = "source" if self._role == "train" else "sink"
            made = self._registry.load_class(self._registry.transfer(transfer), side)
            self._endpoints[transfer] = made(self._weights(), self._spec.place)
        endpoint = self._endpoints[transfer]
        if op.startswith("_") or not callable(getattr(endpoint, op, None)):
            message = f"the {self._role} endpoint of transfer {transfer!r} has no operation {op!r}"
            raise ConfigError(message)
        return getattr(endpoint, op)(**payload)

    def _close_endpoint(self, transfer: str) -> None:
        endpoint = self._endpoints.pop(transfer, None)
        if endpoint is not None:
            endpoint.close()

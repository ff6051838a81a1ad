"""The host: owns one rank's engine and runs the driver's commands on it, in workers and in the driver alike."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError, DeadlineError, StateError
from powertrain.interfaces.infer import InferEngine
from powertrain.interfaces.train import TrainEngine
from powertrain.options import nearest
from powertrain.runtime.wire import RankFault, told

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.registry import Registry

METHODS: Final = {
    "train": [name for name in TrainEngine.RULES if name != "weights"],
    "infer": [*(name for name in InferEngine.RULES if name != "weights"), "abort"],
}
"""Methods of an engine that the driver may call."""
WEIGHTS: Final = {
    "train": ("manifest", "changes", "fence"),
    "infer": ("manifest", "state", "version", "begin", "finish", "abort"),
}
"""Methods of a weight source and of a weight sink that the driver may call, as `weights.<name>`."""
CLOSE_SECONDS: Final = 20.0


class LoopThread:
    """An event loop on a thread of its own: for the control channel, for engines, and for callers without a loop.

    The thread is a daemon: one that is stuck in an engine never keeps a process alive.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once it has been stopped."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine there; those submitted one after another begin in that order."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, seconds: float = 1.0) -> None:
        """Cancel what still runs and end the thread; waits at most `seconds`. May be called twice."""
        if self.alive:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(seconds)

    def _run(self) -> None:
        self.loop.run_forever()
        for _ in range(3):  # what a task does on its way out may have to be cancelled too
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=0.3))
        self.loop.close()


@contextlib.contextmanager
def _during(method: str) -> Iterator[None]:
    """Say in an error which command of a series it came from."""
    try:
        yield
    except Exception as exc:
        raise RankFault({**told(exc), "during": method}) from exc


class EngineHost:
    """One rank's engine.

    An inference engine's coroutines run on one event loop. Everything that blocks runs on one thread, in the order of
    the commands: all of a training engine but `health`, and an inference engine's sink and endpoints.
    """

    def __init__(self, name: str, registry: Registry) -> None:
        self._registry = registry
        self._commands: dict[str, Callable[..., Any]] = {}
        """What may be called of the engine; empty while there is none."""
        self._endpoints: dict[str, Any] = {}
        self._loop = LoopThread(f"powertrain-{name}")
        self._lane = LoopThread("powertrain-engine")

    def submit(self, method: str, args: Sequence[Any], seal: Callable[[Any], Any]) -> Future[Any]:
        """Run one command; the future ends with its sealed answer, or with a `RankFault` (any error, the seal's too).

        Commands: "open"(spec, env); every name in the engine's `RULES` except "weights"; "health", "abort" (infer);
        "weights.<name>" of `WEIGHTS`; "endpoint.call"(transfer, op, payload) and "endpoint.close"(transfer);
        "series"(commands [method, args]), see `powertrain.interfaces.transfer.EngineHandle.call`.
        ConfigError for an unknown command, StateError before "open". Cancelling ends a coroutine of the engine.
        """
        return self._loop.submit(self._answer(method, args, seal))

    def end(self) -> None:
        """End the loop now and the engine's thread once it is idle; the host is of no use afterwards."""
        self._lane.stop(0.0)
        self._loop.stop()

    async def _answer(self, method: str, args: Sequence[Any], seal: Callable[[Any], Any]) -> Any:
        try:
            return seal(await self._dispatch(method, args))
        except (Exception, SystemExit, asyncio.CancelledError) as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise exc if isinstance(exc, RankFault) else RankFault(told(exc)) from exc

    async def _dispatch(self, method: str, args: Sequence[Any]) -> Any:
        if method == "open":
            return await self._open(*args)
        if not self._commands:
            if method == "close":
                return None
            message = f"{method!r} was called before the engine was opened"
            raise StateError(message)
        if method == "series":
            return await self._series(args)
        return await self._run(self._command(method), *args)

    def _command(self, method: str) -> Callable[..., Any]:
        if method not in self._commands:
            message = f"the engine has no command {method!r}{nearest(method, self._commands)}"
            raise ConfigError(message)
        return self._commands[method]

    async def _series(self, commands: Sequence[Any]) -> list[tuple[float, Any]]:
        """Run commands in order; those side by side that block share one visit to the engine's thread."""
        answers: list[tuple[float, Any]] = []
        waits = {method: inspect.iscoroutinefunction(self._command(method)) for method, _ in commands}
        for coroutines, group in itertools.groupby(commands, lambda command: waits[command[0]]):
            if not coroutines:
                answers += await self._run(lambda some=tuple(group): [self._timed(*command) for command in some])
                continue
            for method, args in group:
                begun = time.perf_counter()
                with _during(method):
                    answer = await self._command(method)(*args)
                answers.append((time.perf_counter() - begun, answer))
        return answers

    def _timed(self, method: str, args: Sequence[Any]) -> tuple[float, Any]:
        begun = time.perf_counter()
        with _during(method):
            answer = self._command(method)(*args)
        return time.perf_counter() - begun, answer

    async def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Await a coroutine function here; run any other one on the engine's thread."""
        if inspect.iscoroutinefunction(work):
            return await work(*args)

        async def there() -> Any:
            try:
                return work(*args)
            except SystemExit as exc:  # which would end the thread
                raise RankFault(told(exc)) from exc

        return await asyncio.wrap_future(self._lane.submit(there()))

    async def _open(self, spec: EngineSpec, env: Mapping[str, str]) -> None:
        """Find the engine's class, `prepare` and `build` it; one that fails is closed again."""
        if self._commands:
            message = f"the engine {spec.part or spec.backend!r} is open already; close it first"
            raise StateError(message)
        engine = await self._run(lambda: self._registry.load_class(self._registry.backend(spec.backend))())
        self._commands = {
            **{name: getattr(engine, name) for name in METHODS[spec.role]},
            **{f"weights.{name}": partial(_call_weights, engine, name) for name in WEIGHTS[spec.role]},
            "health": partial(_health, engine),
            "close": partial(self._close, engine),
            "endpoint.call": partial(self._call_endpoint, engine, spec),
            "endpoint.close": self._close_endpoint,
        }
        try:
            await self._run(engine.prepare, env)
            await self._run(engine.build, spec)
        except BaseException:
            try:
                await self._close(engine)
            finally:
                self._commands = {}
            raise

    async def _close(self, engine: TrainEngine | InferEngine) -> None:
        """Close endpoints and engine; may be repeated. DeadlineError where its thread is stuck."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for transfer in list(self._endpoints):
                    await self._run(self._close_endpoint, transfer)
                await self._run(engine.close)
        except TimeoutError as exc:
            message = f"the engine did not close within {CLOSE_SECONDS:g} s; it is still busy with an earlier command"
            raise DeadlineError(message, what="close", seconds=CLOSE_SECONDS) from exc

    def _call_endpoint(self, engine: Any, spec: EngineSpec, transfer: str, op: str, payload: Mapping[str, Any]) -> Any:
        if transfer not in self._endpoints:
            train, about = spec.role == "train", self._registry.transfer(transfer)
            made = self._registry.load_class(about, "source" if train else "sink")
            self._endpoints[transfer] = (
                made(engine.weights(), spec.place) if train else engine.weights().endpoint(made, spec.place)
            )
        found = None if op.startswith("_") else getattr(self._endpoints[transfer], op, None)
        if found is None:
            message = f"the {spec.role} endpoint of transfer {transfer!r} has no operation {op!r}"
            raise ConfigError(message)
        return found(**payload)

    def _close_endpoint(self, transfer: str) -> None:
        if endpoint := self._endpoints.pop(transfer, None):
            endpoint.close()


async def _health(engine: TrainEngine | InferEngine) -> dict[str, Any]:
    return dict(engine.health())


def _call_weights(engine: TrainEngine | InferEngine, name: str, *args: Any) -> Any:
    return found(*args) if callable(found := getattr(engine.weights(), name)) else found

"""The driver's side of one engine, in this process or in workers: one call, one answer from each rank."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import DeadlineError, WorkerError
from powertrain.runtime import faults, wire
from powertrain.runtime.host import RULES, EngineHost

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.registry import Registry
    from powertrain.runtime.channel import DriverChannel

ERROR_GRACE: Final = 2.0
"""Seconds that the other ranks have, after the first error, to show whether they failed alike."""


class RankFault(Exception):
    """What a rank's engine raised, as `faults.told` tells it."""

    def __init__(self, fault: dict[str, Any]) -> None:
        super().__init__(fault["message"])
        self.fault = fault


class Handle(ABC):
    """One engine, all its ranks; satisfies `powertrain.interfaces.transfer.EngineHandle`.

    Arguments and answers of an engine's methods are copies on both sides, inline too, and are held to the same rules
    (`powertrain.runtime.wire`). `endpoint.call` alone hands over the very objects where the engine is inline, so
    that a transfer within one process can share tensors.

    One failing rank fails the call. The engine goes on when every rank raised the same error (a refused argument);
    when ranks differ, hang or die it is failed: every later call but "close" and "health" says so at once. So it is
    after a training method that passed its deadline, since its thread may still be in it. `version`: the weight
    version of the last `resume` that gave one. `inline`: it lives in this process.
    """

    inline = False

    def __init__(self, name: str, role: str, ranks: int) -> None:
        self.name = name
        self.role = role
        self.ranks = ranks
        self.failed = ""
        self.version: str | None = None

    async def call(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """Call one command of `EngineHost.dispatch` on every rank; return the answers in rank order.

        deadline: seconds; `DeadlineError` names the engine, the ranks that are silent, and the method. Cancelling the
        call cancels an inference engine's coroutine; a training engine finishes the work and the result is dropped.
        Errors come as `powertrain.runtime.faults.rebuilt` makes them; a dead rank is a `WorkerError`.
        """
        answers = await self._collect(method, self._send(method, [args] * self.ranks), deadline)
        if method == "resume" and args and args[0] is not None:
            self.version = str(args[0])
        return answers

    async def open(self, specs: Sequence[EngineSpec], envs: Sequence[Mapping[str, str]], *, deadline: float) -> None:
        """Make the engine of every rank: `prepare(env)`, then `build(spec)`; one spec and env for each rank."""
        args = list(zip(specs, [dict(env) for env in envs], strict=True))
        await self._collect("open", self._send("open", args), deadline)

    @abstractmethod
    def stop(self) -> None:
        """Let go of what serves this handle in this process; does not wait. May be called twice."""

    @abstractmethod
    def _send(self, method: str, args: Sequence[Sequence[Any]]) -> list[Future[Any]]:
        """Give each rank its command. A future ends with the answer, a `RankFault`, or a `WorkerError` (died)."""

    async def _collect(self, method: str, futures: list[Future[Any]], deadline: float) -> list[Any]:
        waiters = [asyncio.wrap_future(future) for future in futures]
        try:
            done, silent = await asyncio.wait(waiters, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
            if silent and any(isinstance(self._error(waiter), RankFault) for waiter in done):
                done, silent = await asyncio.wait(waiters, timeout=ERROR_GRACE)
        finally:
            for waiter in waiters:
                waiter.cancel()  # of those not done: tells the rank to stop, or drops its result
        errors = {rank: exc for rank, w in enumerate(waiters) if w in done and (exc := self._error(w)) is not None}
        if not errors and not silent:
            return [waiter.result() for waiter in waiters]
        missing = [rank for rank, waiter in enumerate(waiters) if waiter in silent]
        if not errors:
            raise self._late(method, missing, deadline)
        raise self._fault(method, errors, missing)

    def _error(self, waiter: asyncio.Future[Any]) -> BaseException | None:
        if waiter.cancelled():
            return WorkerError(f"engine {self.name!r} was closed while it answered", worker=self.name)
        return waiter.exception()

    def _late(self, method: str, missing: list[int], deadline: float) -> DeadlineError:
        who = f"{self.name} rank {', '.join(map(str, missing))}"
        message = f"{who} did not answer {method!r} within {deadline:g} s{self._heard(missing)}"
        if method == "open" or (self.role == "train" and method in RULES["train"]):
            self.failed = message
        return DeadlineError(message, who=who, what=method, seconds=deadline)

    def _fault(self, method: str, errors: Mapping[int, BaseException], missing: list[int]) -> BaseException:
        for exc in errors.values():
            if not isinstance(exc, RankFault):
                self.failed = str(exc)
                return exc
        told = {rank: exc.fault for rank, exc in errors.items() if isinstance(exc, RankFault)}
        rank, first = next(iter(told.items()))
        error = faults.rebuilt(first, engine=self.name, rank=rank)
        apart = len(told) < self.ranks or not faults.same(list(told.values()))
        if missing or (apart and method in {*RULES[self.role], "open"}):
            where = f"rank {', '.join(map(str, missing))} did not answer" if missing else "the other ranks did not"
            self.failed = f"{method!r} failed on rank {rank} where {where}: {error}"
        error.__cause__ = errors[rank].__cause__  # inline: the engine's own error
        return error

    def _check_usable(self, method: str) -> None:
        if self.failed and method not in {"close", "health"}:
            message = f"engine {self.name!r} is not usable any more: {self.failed}"
            raise WorkerError(message, worker=self.name)

    def _heard(self, ranks: Sequence[int]) -> str:
        return ""


class LoopThread:
    """An event loop on a daemon thread of its own, for engines in this process and for callers that have no loop."""

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
        """Cancel what still runs and end the thread; waits at most `seconds`."""
        if self.alive:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            for _ in range(3):  # what a task does on its way out may have to be cancelled too
                tasks = asyncio.all_tasks(self.loop)
                for task in tasks:
                    task.cancel()
                if tasks:
                    self.loop.run_until_complete(asyncio.wait(tasks, timeout=0.3))
        finally:
            self.loop.close()


class InlineHandle(Handle):
    """An engine of one rank in the driver's process, on an event loop of its own (and a thread, if it trains)."""

    inline = True

    def __init__(self, name: str, role: str, registry: Registry) -> None:
        super().__init__(name, role, 1)
        self._host = EngineHost(registry)
        self._thread: LoopThread | None = LoopThread(f"powertrain-{name}")

    def stop(self) -> None:
        """End the loop and the engine's thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._host.end()
            thread.stop()

    def _send(self, method: str, args: Sequence[Sequence[Any]]) -> list[Future[Any]]:
        self._check_usable(method)
        if self._thread is None:
            message = f"engine {self.name!r} has been closed"
            raise WorkerError(message, worker=self.name, rank=0)
        shared = method == "endpoint.call"
        given = args[0] if shared else wire.copied(list(args[0]))
        return [self._thread.submit(self._run(method, given, shared=shared))]

    async def _run(self, method: str, args: Sequence[Any], *, shared: bool) -> Any:
        work = asyncio.ensure_future(self._host.dispatch(method, args))
        try:
            # A training engine finishes what it has begun, or is about to begin, also when nobody waits any more.
            answer = await (asyncio.shield(work) if self.role == "train" else work)
            return answer if shared else wire.copied(answer)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RankFault(faults.told(exc)) from exc  # the engine's own doing
        except (Exception, SystemExit) as exc:
            raise RankFault(faults.told(exc)) from exc


class WorkerHandle(Handle):
    """An engine whose ranks are worker processes. workers: their names in rank order, registered with the channel."""

    def __init__(self, name: str, role: str, channel: DriverChannel, workers: Sequence[str]) -> None:
        super().__init__(name, role, len(workers))
        self._channel = channel
        self.workers = tuple(workers)

    def stop(self) -> None:
        """Do nothing: the driver ends the workers."""

    def _send(self, method: str, args: Sequence[Sequence[Any]]) -> list[Future[Any]]:
        self._check_usable(method)
        if all(one is args[0] for one in args):  # one encoding, and one segment, for all ranks
            packets = [wire.pack([method, list(args[0])], prefix=self._channel.prefix)] * len(args)
        else:
            packets = [wire.pack([method, list(one)], prefix=self._channel.prefix) for one in args]
        return self._channel.call(self.workers, packets)

    def _heard(self, ranks: Sequence[int]) -> str:
        silence = max(self._channel.silence(self.workers[rank]) for rank in ranks)
        return f"; last sign of life {silence:.0f} s ago" if silence > 5 else ""

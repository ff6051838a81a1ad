"""The driver's side of one engine, in this process or in workers: one call, one answer from each rank."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import DeadlineError, PowertrainError, UnfitError, WorkerError
from powertrain.runtime import wire
from powertrain.runtime.host import METHODS, EngineHost

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.registry import Registry
    from powertrain.runtime.channel import DriverChannel

ERROR_GRACE: Final = 2.0
"""Seconds that the other ranks have, after the first error, to show whether they failed alike."""
QUIET: Final = 10.0
"""Seconds without a sign of life, which workers give every 3 s, after which a rank is told as frozen."""


class Handle(ABC):
    """One engine, all its ranks; satisfies `powertrain.interfaces.transfer.EngineHandle`.

    Arguments and answers of an engine's methods are copies on both sides, inline too, and are held to the same rules
    (`powertrain.runtime.wire`). `endpoint.call` and `series` alone hand over the very objects where the engine is
    inline, so that a transfer within one process can share tensors.

    One failing rank fails the call. The engine goes on when every rank raised the same error (a refused argument);
    when one dies, or ranks differ or hang in a method of the engine's own, it is failed: every later call but "close"
    and "health" says so at once. So it is after a training method that passed its deadline, since its thread may still
    be in it; and after any call that did so on a rank that gives no sign of life, for as long as it gives none.
    `version`: the weight version of the last `resume` that gave one. `unfit`: an update that failed could not bring the
    engine to a clean state; requests are refused until the next `resume` that goes well. `inline`: it lives in this
    process.
    """

    inline = False

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.failed = ""
        self.version: str | None = None
        self.unfit = self._until_heard = False

    async def call(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """Call one command of `EngineHost.submit` on every rank; return the answers in rank order.

        deadline: seconds; `DeadlineError` names the engine, the ranks that are silent, and the method. Cancelling the
        call cancels an inference engine's coroutine; a training engine finishes the work and the result is dropped.
        Errors come as `powertrain.runtime.wire.rebuilt` makes them; a dead rank is a `WorkerError`. Their `engine` is
        this one's name.
        """
        try:
            if self.unfit and method in {"generate", "generate_batch"}:
                message = f"engine {self.name!r} is unfit since an update of its weights failed; the next one heals it"
                raise UnfitError(message)
            answers = await self._collect(method, [args], deadline)
        except PowertrainError as exc:
            exc.engine = self.name
            raise
        for name, given in args if method == "series" else [(method, args)]:
            if name == "resume":
                self.unfit, told = False, given[0] if given else None
                self.version = self.version if told is None else str(told)
        return answers

    async def open(self, specs: Sequence[EngineSpec], envs: Sequence[Mapping[str, str]], *, deadline: float) -> None:
        """Make the engine of every rank: `prepare(env)`, then `build(spec)`; one spec and env for each rank."""
        args = [(spec, dict(env)) for spec, env in zip(specs, envs, strict=True)]
        await self._collect("open", args, deadline)

    @abstractmethod
    def _send(self, method: str, args: Sequence[Sequence[Any]]) -> list[Future[Any]]:
        """Give each rank its command; args: one for each rank, or one for all.

        A future ends with the answer, a `wire.RankFault`, or a `WorkerError` (died).
        """

    def quiet(self) -> dict[int, float]:
        """Return the ranks that have given no sign of life for `QUIET` seconds, with these seconds."""
        return {}

    async def _collect(self, method: str, args: Sequence[Sequence[Any]], deadline: float) -> list[Any]:
        if self._until_heard and not self.quiet():
            self.failed, self._until_heard = "", False
        if self.failed and method not in {"close", "health"}:
            message = f"engine {self.name!r} is not usable any more: {self.failed}"
            raise WorkerError(message, worker=self.name)
        waiters = [asyncio.wrap_future(future) for future in self._send(method, args)]
        try:
            done, silent = await asyncio.wait(waiters, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
            if silent and any(isinstance(waiter.exception(), wire.RankFault) for waiter in done):
                done, silent = await asyncio.wait(waiters, timeout=ERROR_GRACE)
        finally:
            for waiter in waiters:
                if self.role == "infer":
                    waiter.cancel()  # if it is not done
                else:
                    waiter.add_done_callback(_disregard)
        errors = {rank: exc for rank, w in enumerate(waiters) if w in done and (exc := w.exception()) is not None}
        missing = [rank for rank, waiter in enumerate(waiters) if waiter in silent]
        if errors:
            raise self._fault(method, errors, missing, alone=len(errors) < len(waiters))
        if missing:
            raise self._late(method, missing, deadline)
        return [waiter.result() for waiter in waiters]

    def _late(self, method: str, missing: list[int], deadline: float) -> DeadlineError:
        who = f"{self.name} rank {', '.join(map(str, missing))}"
        message = f"{who} did not answer {method!r} within {deadline:g} s"
        quiet = {rank: seconds for rank, seconds in self.quiet().items() if rank in missing}
        if quiet:
            message += f"; no sign of life from rank {', '.join(map(str, quiet))} for {max(quiet.values()):.0f} s"
        lasting = method == "open" or (self.role == "train" and method in METHODS["train"])
        if (quiet or lasting) and not self.failed:
            self.failed, self._until_heard = message, not lasting
        return DeadlineError(message, who=who, what=method, seconds=deadline)

    def _fault(
        self, method: str, errors: Mapping[int, BaseException], missing: list[int], *, alone: bool
    ) -> BaseException:
        told = {}
        for rank, exc in errors.items():
            if not isinstance(exc, wire.RankFault):
                self.failed, self._until_heard = str(exc), False
                return exc
            told[rank] = exc.fault
        rank, first = next(iter(told.items()))
        error = wire.rebuilt(first, engine=self.name, rank=rank)
        apart = alone or not wire.same(list(told.values()))
        if (missing or apart) and method in {*METHODS[self.role], "open"}:
            where = f"rank {', '.join(map(str, missing))} did not answer" if missing else "the other ranks did not"
            self.failed, self._until_heard = f"{method!r} failed on rank {rank} where {where}: {error}", False
        error.__cause__ = errors[rank].__cause__  # inline: the engine's own error
        return error


def _disregard(waiter: asyncio.Future[Any]) -> None:
    """Look at how a call ended that nobody waits for any more, so that asyncio does not complain."""
    if not waiter.cancelled():
        waiter.exception()


class InlineHandle(Handle):
    """An engine of one rank in the driver's process, on threads of its own."""

    inline = True

    def __init__(self, name: str, role: str, registry: Registry) -> None:
        super().__init__(name, role)
        self._host: EngineHost | None = EngineHost(name, registry)

    def stop(self) -> None:
        """End the engine's threads."""
        host, self._host = self._host, None
        if host is not None:
            host.end()

    def _send(self, method: str, args: Sequence[Sequence[Any]]) -> list[Future[Any]]:
        if self._host is None:
            message = f"engine {self.name!r} has been closed"
            raise WorkerError(message, worker=self.name, rank=0)
        border: Callable[[Any], Any] = wire.copied if method not in {"endpoint.call", "series"} else lambda value: value
        return [self._host.submit(method, border(list(args[0])), border)]


class WorkerHandle(Handle):
    """An engine whose ranks are worker processes. workers: their names in rank order, registered with the channel."""

    def __init__(self, name: str, role: str, channel: DriverChannel, workers: Sequence[str]) -> None:
        super().__init__(name, role)
        self._channel = channel
        self.workers = tuple(workers)

    def _send(self, method: str, args: Sequence[Sequence[Any]]) -> list[Future[Any]]:
        messages = [wire.pack([method, list(one)], prefix=self._channel.prefix) for one in args]
        return self._channel.call(self.workers, messages if len(messages) > 1 else messages * len(self.workers))

    def quiet(self) -> dict[int, float]:
        """Look at when the channel heard of each worker last."""
        silence = {rank: self._channel.silence(name) for rank, name in enumerate(self.workers)}
        return {rank: seconds for rank, seconds in silence.items() if seconds > QUIET}

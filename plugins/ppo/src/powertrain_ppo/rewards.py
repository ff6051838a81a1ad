"""Calling the user's reward: sync or async, one deadline a call, and an error that names function and prompt."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from powertrain.errors import PowertrainError
from powertrain_ppo.references import raised

Call = tuple[Mapping[str, Any], str, Sequence[int]]
"""What a reward is called with: the prompt's record, the completion's text, its token ids."""


class RewardError(PowertrainError, RuntimeError):
    """A reward function raised, hung, or returned something that is not a finite number."""


class Reward:
    """A reward function by name.

    A plain function is called in one extra thread, one completion after the other; async ones run together in an event
    loop on such a thread, at most `parallel` at once. A call that outlives `deadline` seconds ends the run with an
    error; one that blocks its thread cannot be stopped then, the thread dies with the process.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, deadline: float, parallel: int) -> None:
        self.function = function
        self.name = name
        self.deadline = deadline
        self.parallel = parallel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun: Call = ({}, "", ())

    async def __call__(self, calls: Sequence[Call]) -> list[float]:
        """Return one finite float for each call, in order; RewardError otherwise."""
        target = self.function if inspect.isroutine(self.function) else getattr(self.function, "__call__", None)  # noqa: B004
        if inspect.iscoroutinefunction(target):
            return await self._together(calls)
        return await self._in_turn(calls)

    async def _together(self, calls: Sequence[Call]) -> list[float]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="powertrain-reward", daemon=True).start()
        pending = asyncio.run_coroutine_threadsafe(self._gathered(calls), self._loop)
        done = asyncio.wrap_future(pending)
        try:
            while not done.done():
                beat = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop))
                await asyncio.wait({done, beat}, timeout=self.deadline, return_when=asyncio.FIRST_COMPLETED)
                if not done.done() and not beat.done():  # a call blocks the loop, so that no timer of it can fire
                    fault = f"blocked its thread and gave no answer within {self.deadline:g} s (reward_deadline)"
                    message = f"reward {self.name!r} {fault} {_where(self._begun)}"
                    raise RewardError(message)
                await asyncio.wait({done}, timeout=min(1.0, self.deadline))
            return done.result()
        finally:
            pending.cancel()

    async def _gathered(self, calls: Sequence[Call]) -> list[float]:
        room = asyncio.Semaphore(self.parallel)

        async def one(call: Call) -> float:
            async with room:
                self._begun = call
                return await self._awaited(self.function(*call), call)

        tasks = [asyncio.ensure_future(one(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _in_turn(self, calls: Sequence[Call]) -> list[float]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in calls]
        stopped = threading.Event()

        def run() -> None:
            for future, call in zip(futures, calls, strict=True):
                if stopped.is_set():
                    return
                outcome: tuple[Any, BaseException | None]
                try:
                    outcome = self.function(*call), None
                except BaseException as exc:  # noqa: BLE001 - handed on to the waiting side, which raises it
                    outcome = None, exc
                try:
                    loop.call_soon_threadsafe(_settle, future, *outcome)
                except RuntimeError:  # the loop has ended; nobody waits any more
                    return

        threading.Thread(target=run, name="powertrain-reward", daemon=True).start()
        try:
            return [await self._awaited(future, call) for future, call in zip(futures, calls, strict=True)]
        finally:
            stopped.set()
            for future in futures:
                if future.done() and not future.cancelled():
                    future.exception()  # read, so that no second failure is reported as never retrieved
                future.cancel()

    async def _awaited(self, pending: Any, call: Call) -> float:
        timer = asyncio.timeout(self.deadline)
        try:
            async with timer:
                value = await pending
                if inspect.isawaitable(value):  # a plain function that returned a coroutine
                    value = await value
        except Exception as exc:  # a user's function may raise anything
            late = isinstance(exc, TimeoutError) and timer.expired()
            fault = f"gave no answer within {self.deadline:g} s (reward_deadline)" if late else f"raised {raised(exc)};"
            message = f"reward {self.name!r} {fault} {_where(call)}"
            raise RewardError(message) from exc
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, int | float) or not math.isfinite(value):
            message = f"reward {self.name!r} returned {value!r}, not a finite number, {_where(call)}"
            raise RewardError(message)
        return float(value)


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def _where(call: Call) -> str:
    record, text, _ = call
    shown = ", ".join(f"{key}={str(value)[-200:]!r}" for key, value in record.items())
    return f"for the row {shown[:800]} and the completion {text[:200]!r}"

"""Calls with a deadline, whatever is called: a hang fails one test within seconds and cannot hold up the session.

The threads are daemons. One that is stuck in a call is left behind; the next engine gets threads of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final

import pytest

from powertrain.interfaces.weights import WeightSink, WeightSource

HARMLESS: Final = frozenset(
    {"generate", "generate_batch", "logprobs", "weights", "health", "manifest", "tensors", "changes", "fence", "export"}
)
"""Methods after which an engine is as it was, so that the next test may have it."""
CLOSE_SECONDS: Final = 20.0


class Threads:
    """An event loop for coroutines and a lane for calls that block, which run in order, each on a thread of its own."""

    def __init__(self) -> None:
        self._loops = [asyncio.new_event_loop() for _ in range(2)]
        for loop in self._loops:
            threading.Thread(target=self._run, args=(loop,), name="powertrain-testing", daemon=True).start()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()

    def begin(self, work: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        """Begin a coroutine function on the loop, or any other one on the lane."""
        if inspect.iscoroutinefunction(work):
            return asyncio.run_coroutine_threadsafe(work(*args, **named), self._loops[0])

        async def there() -> Any:
            return work(*args, **named)

        return asyncio.run_coroutine_threadsafe(there(), self._loops[1])

    def stop(self) -> None:
        """Cancel what still runs and end the threads, unless they are stuck."""
        for loop in self._loops:
            loop.call_soon_threadsafe(_end, loop)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_later(0.05, loop.stop)


def answer(future: Future[Any], seconds: float, what: str) -> Any:
    """Wait for a call that was begun; the test fails when the answer is not there in time."""
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # its own error
            raise
        future.cancel()
        pytest.fail(f"{what} did not answer within {seconds:g} s; every wait needs a deadline")


class Bounded:
    """An engine, or its weights, with plain blocking methods that each have a deadline.

    target: the object itself. clean: nothing was called yet that may have changed it.
    """

    def __init__(self, target: Any, seconds: float, parent: Bounded | None = None) -> None:
        self.target, self.seconds = target, seconds
        self._parent = parent
        self._threads: Threads = parent._threads if parent else Threads()
        self.clean = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.target, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            return self.wait(self.start(name, *args, **named), name)

        return call

    def start(self, name: str, *args: Any, **named: Any) -> Future[Any]:
        """Begin a method and return its future; `wait` has the answer."""
        if name not in HARMLESS:
            self.spoil()
        return self._threads.begin(getattr(self.target, name), *args, **named)

    def wait(self, future: Future[Any], what: str = "the call", seconds: float | None = None) -> Any:
        """Return a begun call's answer, or raise its error; the test fails at the deadline."""
        found = answer(future, seconds or self.seconds, f"{type(self.target).__name__}.{what}")
        return Bounded(found, self.seconds, self) if isinstance(found, WeightSource | WeightSink) else found

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run a function where the engine's blocking methods run."""
        return answer(self._threads.begin(work, *args), self.seconds, getattr(work, "__name__", "the call"))

    def on_loop(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine function where the engine's coroutines run."""
        return answer(self._threads.begin(work), self.seconds, getattr(work, "__name__", "the call"))

    def spoil(self) -> None:
        """Note that the engine is not as it was."""
        self.clean = False
        if self._parent:
            self._parent.spoil()

    def release(self) -> None:
        """Close the target if it will; a failure here was, or will be, told by a test of closing."""
        future = self._threads.begin(self.target.close)
        try:
            future.exception(min(self.seconds, CLOSE_SECONDS))
        except TimeoutError:
            future.cancel()
        self._threads.stop()


class Shelf:
    """Keeps one built engine from test to test, as long as nothing was called that may have changed it."""

    def __init__(self) -> None:
        self._engine: Bounded | None = None

    def get(self, build: Callable[[], Bounded]) -> Bounded:
        """Return the kept engine if it is as new, else a new one."""
        if self._engine is None or not self._engine.clean:
            self.clear()
            self._engine = build()
        return self._engine

    def clear(self) -> None:
        """Close the kept engine."""
        if self._engine is not None:
            self._engine.release()
            self._engine = None

"""An event loop on a thread of its own: for the control channel, for engines, and for callers without a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """The thread is a daemon: one that is stuck in an engine never keeps a process alive."""

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

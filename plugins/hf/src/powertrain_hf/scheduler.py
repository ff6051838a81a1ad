"""The compute thread and its queue: batches run one after another, and every wish (abort, pause) is met between steps.

arriving --submit, or gather ... gathered--> queued --(thread)--> running --> answered
while paused: arriving waits until `resume`; mode "keep" freezes the running batch where it stands.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from powertrain.errors import DeadlineError, StateError
from powertrain.interfaces.data import GenerateResult

if TYPE_CHECKING:
    from powertrain.interfaces.data import GenerateRequest
    from powertrain.tensors.rows import Row


@dataclass(eq=False, slots=True)
class Item:
    """A request in flight: its rows and the future of its answer. aborted: it is to end at the next step."""

    request: GenerateRequest
    rows: list[Row]
    future: Future[GenerateResult] = field(default_factory=Future)
    aborted: bool = False

    def answer(self, fault: Exception | None) -> None:
        """Hand out the completions, or the fault that ended them."""
        if fault is not None:
            self.future.set_exception(fault)
            return
        completions = tuple(row.completion() for row in self.rows)
        self.future.set_result(GenerateResult(request_id=self.request.request_id, completions=completions))


@dataclass(eq=False, slots=True)
class Chunk:
    """Rows that are decoded together, all under one adapter."""

    rows: list[Row]
    adapter: str | None


class Machine(Protocol):
    """What runs a batch on the compute thread; given by the engine."""

    def start(self, chunk: Chunk) -> None:
        """Pin the weight version and prefill."""

    def again(self, chunk: Chunk) -> None:
        """Go on after a freeze: when the weights or caches have changed, cut segments and prefill anew."""

    def step(self, chunk: Chunk) -> None:
        """Draw one token for every live row."""

    def stop(self, chunk: Chunk) -> None:
        """Free the batch's caches."""


class Scheduler:
    """Owns the compute thread. Methods may be called from any thread; none blocks for longer than a lock."""

    def __init__(self, machine: Machine, split: Callable[[Sequence[Row]], list[Chunk]], name: str) -> None:
        self._machine, self._split = machine, split
        self._lock = threading.Condition()
        self._queue: deque[Chunk] = deque()
        self._arrived: list[list[Item]] = []
        self._gathering: list[Item] = []
        self._items: dict[str, Item] = {}
        self._owner: dict[int, Item] = {}
        self._running: Chunk | None = None
        self._mode: str | None = None
        self._frozen = self._closing = False
        self._quiet: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ---- called by the engine
    def submit(self, items: Sequence[Item]) -> None:
        """Take requests; batches are made of those given together. StateError for a request id already in flight."""
        with self._lock:
            self._take(items)
            self._arrived.append(list(items))
            self._admit()

    def gather(self, item: Item) -> None:
        """Take a request that is queued with others at the next `gathered`; in flight from now on. As `submit` else."""
        with self._lock:
            self._take([item])
            self._gathering.append(item)

    def gathered(self) -> None:
        """Queue what has been gathered, as one batch."""
        with self._lock:
            self._arrived.append(self._gathering)
            self._gathering = []
            self._admit()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Let the named requests end at the next step with what they have; unknown ids are ignored."""
        with self._lock:
            for name in request_ids:
                if name in self._items:
                    self._items[name].aborted = True
            self._sweep()
            self._lock.notify_all()

    def pause(self, mode: str) -> Future[None]:
        """Pause in `mode`; the future is done when nothing is running any more."""
        done: Future[None] = Future()
        with self._lock:
            if self._mode is None or mode == "abort":
                self._mode = mode
            if mode == "abort":
                arrived = {id(item) for items in [self._gathering, *self._arrived] for item in items}
                for item in self._items.values():
                    item.aborted |= id(item) not in arrived
                self._sweep()
            self._quiet.append(done)
            self._tell_quiet()
            self._lock.notify_all()
        return done

    def resume(self) -> None:
        """Go on, with the frozen batch first, then with what has arrived meanwhile."""
        with self._lock:
            self._mode = None
            self._admit()

    def counts(self) -> dict[str, int]:
        """Return how many requests are in flight, and how many rows are being decoded."""
        running = self._running
        return {"requests": len(self._items), "rows": len(running.rows) if running else 0}

    def users(self) -> set[str]:
        """Return the adapters that requests in flight use."""
        with self._lock:
            return {item.request.adapter for item in self._items.values() if item.request.adapter is not None}

    def close(self, seconds: float) -> None:
        """Abort everything and end the thread; DeadlineError when it does not end in time."""
        with self._lock:
            self._closing = True
            for item in self._items.values():
                item.aborted = True
            self._sweep()
            self._lock.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            message = f"the compute thread did not end within {seconds:g} s"
            raise DeadlineError(message, who=self._thread.name, what="its end", seconds=seconds)

    # ---- with the lock held
    def _take(self, items: Sequence[Item]) -> None:
        ids = [item.request.request_id for item in items]
        twice = next((name for i, name in enumerate(ids) if name in self._items or name in ids[:i]), None)
        if twice is not None or self._closing:
            message = "the engine is closed" if twice is None else f"request id {twice!r} is in flight already"
            raise StateError(message)
        for item in items:
            item.future.set_running_or_notify_cancel()
            self._items[item.request.request_id] = item
            self._owner.update((id(row), item) for row in item.rows)

    def _admit(self) -> None:
        """Queue what has arrived, unless paused."""
        if self._mode is not None:
            return
        for items in self._arrived:
            self._queue.extend(self._split([row for item in items for row in item.rows if not row.finish]))
        self._arrived.clear()
        self._lock.notify_all()

    def _sweep(self) -> None:
        """End aborted rows that are not running, at once."""
        busy = {id(row) for row in self._running.rows} if self._running else set()
        for item in [item for item in self._items.values() if item.aborted]:
            for row in item.rows:
                if not row.finish and id(row) not in busy:
                    row.finish = "abort"
            self._settle(item)
        for chunk in self._queue:
            chunk.rows = [row for row in chunk.rows if not row.finish]
        self._queue = deque(chunk for chunk in self._queue if chunk.rows)

    def _settle(self, item: Item, fault: Exception | None = None) -> None:
        """Forget an item whose rows have all ended, and answer it: whoever is answered finds it gone already."""
        if all(row.finish for row in item.rows) and self._items.get(item.request.request_id) is item:
            del self._items[item.request.request_id]
            for row in item.rows:
                del self._owner[id(row)]
            item.answer(fault)

    def _tell_quiet(self) -> None:
        drained = self._running is None and (not self._queue or self._mode == "keep")
        if self._mode is not None and (self._frozen or drained):
            for done in self._quiet:
                if done.set_running_or_notify_cancel():
                    done.set_result(None)
            self._quiet.clear()

    # ---- the thread
    def _run(self) -> None:
        while True:
            with self._lock:
                self._running = None
                self._tell_quiet()
                self._lock.wait_for(lambda: self._closing or (self._queue and self._mode != "keep"))
                if not self._queue:
                    return
                chunk = self._running = self._queue.popleft()
            try:
                self._machine.start(chunk)
                while self._between(chunk):
                    self._machine.step(chunk)
            except Exception as exc:  # noqa: BLE001 - every request of the batch gets it through its future
                self._fail(chunk, exc)
            finally:
                self._machine.stop(chunk)

    def _between(self, chunk: Chunk) -> bool:
        """Between two steps: answer what has ended, abort, freeze; False when no row is left."""
        froze = False
        with self._lock:
            while True:
                for item in {id(item): item for row in chunk.rows if (item := self._owner.get(id(row)))}.values():
                    if item.aborted:
                        for row in item.rows:
                            row.finish = row.finish or "abort"
                    self._settle(item)
                chunk.rows = [row for row in chunk.rows if not row.finish]
                if not chunk.rows or self._closing or self._mode != "keep":
                    break
                self._frozen = froze = True
                self._tell_quiet()
                self._lock.wait()
            self._frozen = False
        if froze and chunk.rows:
            self._machine.again(chunk)
        return bool(chunk.rows)

    def _fail(self, chunk: Chunk, exc: Exception) -> None:
        with self._lock:
            for item in [self._owner[id(row)] for row in chunk.rows if id(row) in self._owner]:
                for row in item.rows:
                    row.finish = row.finish or "abort"
                self._settle(item, exc)
            self._sweep()

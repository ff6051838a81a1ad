"""The `hf` inference engine: a transformers model in this process with its own batched decode loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, StateError
from powertrain.interfaces.infer import PAUSE_MODES, InferEngine
from powertrain.tensors.early import set_early
from powertrain_hf.scheduler import Chunk, Item, Scheduler

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.data import GenerateRequest, GenerateResult
    from powertrain.tensors.rows import Row
    from powertrain_hf.machine import HfSink, Machine

logger = logging.getLogger(__name__)
CLOSE_SECONDS = 15.0
EARLY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
"""Variables that libraries read once, when they are loaded."""


class HfEngine(InferEngine):
    """One transformers model on one card (or the CPU).

    Requests handed over together are decoded together: `generate_batch` makes its batches from its own requests alone,
    `generate` calls of one tick of the event loop share theirs. All compute is on one thread of the engine's own.
    """

    _machine: Machine
    _scheduler: Scheduler
    _options: Mapping[str, Any]

    def __init__(self) -> None:
        self._gathering = self._built = False

    def prepare(self, env: Mapping[str, str]) -> None:
        """Set the variables that differ; those that libraries have read already are warned about."""
        set_early(env, EARLY, "torch")

    async def build(self, spec: EngineSpec) -> None:
        """Load the model and start the compute thread. ConfigError for more than one rank: instances are engines."""
        if spec.place.world != 1:
            message = f"an hf engine has one rank, and this one was given {spec.place.world}; use d for more instances"
            raise ConfigError(message)
        from powertrain.options import resolve
        from powertrain_hf.hooks import OPTIONS

        self._options = resolve(OPTIONS, spec.options, where="backend hf")
        await asyncio.to_thread(self._build, spec)
        self._built = True

    def _build(self, spec: EngineSpec) -> None:
        from powertrain_hf.machine import Machine

        self._machine = Machine(spec, self._options, paused=lambda: self.state == "paused", users=self._users)
        name = f"powertrain-hf-{spec.part or 'infer'}-{spec.place.instance}"
        self._scheduler = Scheduler(self._machine, self._split, name)

    def _users(self) -> set[str]:
        return self._scheduler.users()

    # ---- requests
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request. ConfigError for an unknown adapter or a bad prompt, UnfitError while unfit."""
        item = self._item(request)
        self._scheduler.gather(item)
        if not self._gathering:
            self._gathering = True
            asyncio.get_running_loop().call_soon(self._tick)
        return (await self._answers([item]))[0]

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer several requests, decoded in batches made of them alone and in their order."""
        items = [self._item(request) for request in requests]
        if not items:
            return []
        self._scheduler.submit(items)
        return await self._answers(items)

    def _item(self, request: GenerateRequest) -> Item:
        from powertrain.tensors.rows import Row, check_prompt

        sink = self._machine.sink
        sink.check_fit()
        if request.adapter is not None:
            self._machine.adapters.check(request.adapter)
            sink.check_published(request.adapter)
        check_prompt(request, self._machine.vocabulary)
        return Item(request, Row.of(request))

    def _tick(self) -> None:
        self._gathering = False
        self._scheduler.gathered()

    async def _answers(self, items: Sequence[Item]) -> list[GenerateResult]:
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(item.future) for item in items)))
        except BaseException:
            self._scheduler.abort([item.request.request_id for item in items])
            raise

    def _split(self, rows: Sequence[Row]) -> list[Chunk]:
        """Cut rows into batches in their order, by adapter, bounded by both options; a row alone always fits."""
        by_adapter: dict[str | None, list[Row]] = {}
        for row in rows:
            by_adapter.setdefault(row.request.adapter, []).append(row)
        chunks = []
        for adapter, group in by_adapter.items():
            current: list[Row] = []
            longest = 0
            for row in group:
                longest = max(longest, row.room)
                many = len(current) + 1
                if current and (many > self._options["max_rows"] or many * longest > self._options["max_batch_tokens"]):
                    chunks.append(Chunk(current, adapter))
                    current, longest = [], row.room
                current.append(row)
            chunks.append(Chunk(current, adapter))
        return chunks

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End the named requests at the next decode step with what they have."""
        self._scheduler.abort(list(request_ids))

    # ---- pause and weights
    async def pause(self, mode: str = "wait") -> None:
        """Stop between two decode steps (keep, abort) or when all in flight have ended (wait); wakes a sleeper."""
        if mode not in PAUSE_MODES:
            message = f"pause mode is {mode!r}; it is one of {', '.join(PAUSE_MODES)}"
            raise ConfigError(message)
        was = self.state
        try:
            await asyncio.wrap_future(self._scheduler.pause(mode))
            if was == "asleep":
                await asyncio.to_thread(self._machine.wake)
        except BaseException:
            if was == "ready":
                self._scheduler.resume()
            raise

    async def resume(self, version: str | None = None) -> None:
        """Publish the finished update's version, or go on with the present one; UnfitError while unfit."""
        self._machine.sink.publish(version)
        self._scheduler.resume()

    def weights(self) -> HfSink:
        """Return the engine's sink, the same object each time."""
        return self._machine.sink

    async def load_adapter(self, name: str, folder: str) -> None:
        """Register a PEFT adapter from a folder, between two decode steps."""
        await asyncio.to_thread(self._machine.changed, lambda adapters: adapters.load(name, folder))

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter; StateError while a request in flight uses it."""
        await asyncio.to_thread(self._machine.changed, lambda adapters: adapters.drop(name))

    async def release_memory(self) -> None:
        """Drop KV caches, and on a GPU move the weights to the host; on the CPU they stay, being on the host already.

        Frozen requests lose their caches and are prefilled anew later. StateError while requests are running.
        """
        if self.state == "ready" and self._scheduler.counts()["requests"]:
            message = "memory cannot be released while requests run; pause the engine first"
            raise StateError(message)
        was = self.state
        try:
            await asyncio.wrap_future(self._scheduler.pause("keep"))
            await asyncio.to_thread(self._machine.sleep)
        except BaseException:
            if was == "ready":
                self._scheduler.resume()
            raise

    async def resume_memory(self) -> None:
        """Bring the weights back to the card; the engine stays paused."""
        await asyncio.to_thread(self._machine.wake)

    async def close(self) -> None:
        """Abort what is in flight, end the compute thread and free the model."""
        if self._built:
            self._built = False
            await asyncio.to_thread(self._scheduler.close, CLOSE_SECONDS)
            self._machine.free()

    def health(self) -> Mapping[str, Any]:
        """Return state, versions, adapters and what is in flight."""
        if not self._built:
            return {"state": self.state}
        sink = self._machine.sink
        return {
            "state": self.state,
            "weights": sink.state,
            "version": sink.version,
            "base_version": sink.base_version,
            "adapters": self._machine.adapters.names(),
            **self._scheduler.counts(),
        }

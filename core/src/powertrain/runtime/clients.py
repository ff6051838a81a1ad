"""What recipes and users hold: a training engine by its methods, and a pool of equal inference engines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import StateError

if TYPE_CHECKING:
    from powertrain.interfaces.data import (
        FloatArray,
        GenerateRequest,
        GenerateResult,
        LossSpec,
        StepResult,
        TrainBatch,
    )
    from powertrain.runtime.handles import Handle
    from powertrain.weights import Manifest

TIMEOUTS: Final[Mapping[str, float]] = {"start": 600.0, "step": 1800.0, "generate": 1800.0, "update": 300.0}
"""Seconds: start of all engines; a training step, save or export; a request; each step of an update and all else."""


class TrainClient:
    """A training engine, all its ranks, as coroutines; contracts and errors are `TrainEngine`'s and `Handle.call`'s.

    timeouts: as `TIMEOUTS`; "step" for a step, log-probs, save, load and export, "update" for everything else.
    """

    def __init__(self, handle: Handle, timeouts: Mapping[str, float] = TIMEOUTS) -> None:
        self.handle = handle
        self.name = handle.name
        self._timeouts = timeouts

    async def train_step(self, batch: TrainBatch, loss: LossSpec) -> StepResult:
        """Take one optimizer step; every rank gets the whole batch."""
        return (await self._every("train_step", batch, loss))[0]  # type: ignore[no-any-return]

    async def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> FloatArray:
        """Return float32 [N], the log-probability of each scored token under the current weights, 0 elsewhere."""
        return (await self._every("logprobs", batch, temperature))[0]  # type: ignore[no-any-return]

    async def save(self, folder: str) -> None:
        """Write the resumable state into an empty folder."""
        await self._every("save", folder)

    async def load(self, folder: str) -> None:
        """Take the state that `save` wrote."""
        await self._every("load", folder)

    async def export(self, folder: str) -> None:
        """Write an HF-format model or a PEFT adapter into a folder."""
        await self._every("export", folder)

    async def offload(self) -> None:
        """Move all state off the device."""
        await self._every("offload", limit="update")

    async def onload(self) -> None:
        """Undo `offload`."""
        await self._every("onload", limit="update")

    async def manifests(self) -> list[Manifest]:
        """Return every rank's manifest of its weights, in rank order."""
        return await self._every("weights.manifest", limit="update")

    async def health(self) -> list[Mapping[str, Any]]:
        """Return every rank's plain facts, in rank order."""
        return await self._every("health", limit="update")

    async def close(self) -> None:
        """Close the engine on every rank; the driver's `close` does it too."""
        await self._every("close", limit="update")

    async def _every(self, method: str, *args: Any, limit: str = "step") -> list[Any]:
        return await self.handle.call(method, *args, deadline=self._timeouts[limit])


class InferPool:
    """The engines of one inference part, all alike. Requests are spread over them; every other call goes to all.

    timeouts: as `TIMEOUTS`; "generate" for a request, waiting in a paused engine included, and "update" for all else.
    A request to an engine that died raises `WorkerError`. The answers of rank 0 count.
    """

    def __init__(self, handles: Sequence[Handle], timeouts: Mapping[str, float] = TIMEOUTS) -> None:
        self.handles = tuple(handles)
        self._timeouts = timeouts
        self._load = [0] * len(self.handles)

    @property
    def version(self) -> str:
        """The weight version that all engines carry, "0.0" before the first; StateError while they differ."""
        found = {handle.version or "0.0" for handle in self.handles}
        if len(found) > 1:
            message = f"the engines carry different weight versions: {', '.join(sorted(found))}; an update is under way"
            raise StateError(message)
        return found.pop()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request by the engine that has the fewest in flight; cancelling aborts it."""
        index = min(range(len(self.handles)), key=self._load.__getitem__)
        return await self._ask(index, "generate", request, weight=1)  # type: ignore[no-any-return]

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer several requests, in their order. Request i goes to engine i % n, each share as one batch.

        The dealing depends on nothing else, so equal batches give equal results. When one engine fails, the other
        shares are cancelled and the error is raised.
        """
        n = len(self.handles)
        shares = [list(requests[i::n]) for i in range(min(n, len(requests)))]
        asked = [self._ask(i, "generate_batch", share, weight=len(share)) for i, share in enumerate(shares)]
        parts = await all_or_none(asked)
        return [parts[i % n][i // n] for i in range(len(requests))]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End the named requests wherever they run; unknown ids are ignored."""
        await self._every("abort", list(request_ids))

    async def pause(self, mode: str = "wait") -> None:
        """Pause every engine; see `InferEngine.pause`."""
        await self._every("pause", mode, limit="generate")

    async def resume(self, version: str | None = None) -> None:
        """Let every engine take requests again, with the version that its weights now carry."""
        await self._every("resume", version)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Register a PEFT adapter with every engine."""
        await self._every("load_adapter", name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter from every engine."""
        await self._every("unload_adapter", name)

    async def release_memory(self) -> None:
        """Give every engine's device memory back."""
        await self._every("release_memory")

    async def resume_memory(self) -> None:
        """Take device memory again, ending paused."""
        await self._every("resume_memory")

    async def manifests(self) -> list[list[Manifest]]:
        """Return the manifests of every engine, of each its ranks'."""
        return await self._every("weights.manifest")

    async def health(self) -> list[Mapping[str, Any]]:
        """Return the plain facts of every engine's rank 0."""
        return [answers[0] for answers in await self._every("health")]

    async def close(self) -> None:
        """Close every engine; the driver's `close` does it too."""
        await self._every("close")

    async def _ask(self, index: int, method: str, request: Any, *, weight: int) -> Any:
        self._load[index] += weight
        try:
            return (await self.handles[index].call(method, request, deadline=self._timeouts["generate"]))[0]
        finally:
            self._load[index] -= weight

    async def _every(self, method: str, *args: Any, limit: str = "update") -> list[list[Any]]:
        """Call all engines, wait for all, then raise the first error: none is left half way behind the caller."""
        calls = [handle.call(method, *args, deadline=self._timeouts[limit]) for handle in self.handles]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers  # type: ignore[return-value]


async def all_or_none(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all at once; when one fails, cancel the others, wait until they have ended, and raise the first error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

"""What recipes and users hold: a training engine by its methods, and a pool of equal inference engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import StateError, UnfitError, WorkerError
from powertrain.runtime.host import METHODS
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.data import FloatArray, GenerateRequest, GenerateResult, LossSpec, StepResult, TrainBatch
    from powertrain.interfaces.transfer import Transfer
    from powertrain.runtime.handles import Handle
    from powertrain.weights import Manifest

TIMEOUTS: Final[Mapping[str, float]] = {"start": 600.0, "step": 1800.0, "generate": 1800.0, "update": 300.0}
"""Seconds: start of all engines; a training step, save or export; a request; each step of an update and all else."""


_LIMITS: Final = dict.fromkeys(("train_step", "logprobs", "save", "load", "export"), "step") | {"pause": "generate"}
"""Method -> which of the timeouts is its deadline; "update" for all others."""


class _Client:
    """Engines of one part, all alike: a call goes to each of them, under the name of the engine's method."""

    def __init__(self, handles: Sequence[Handle], timeouts: Mapping[str, float] = TIMEOUTS) -> None:
        self.handles = tuple(handles)
        self._timeouts = timeouts

    @property
    def serving(self) -> tuple[Handle, ...]:
        """The engines that calls go to."""
        return self.handles

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name not in METHODS[self.handles[0].role]:
            message = f"a client of {self.handles[0].name} has no {name!r}"
            raise AttributeError(message)

        async def call(*args: Any) -> Any:
            return await self._every(name, *args)

        return call

    async def _every(self, method: str, *args: Any) -> list[list[Any]]:
        """Call all engines, wait for all, then raise the first error: none is left half way behind the caller."""
        deadline = self._timeouts[_LIMITS.get(method, "update")]
        return await together(handle.call(method, *args, deadline=deadline) for handle in self.serving)


_CHANGING: Final = frozenset({"train_step", "load", "offload", "onload", "close"})
"""Methods that change or move a trainer's weights, and so wait while an update reads them."""
_FREEING: Final = frozenset({"offload", "close"})
"""Methods that free a trainer's storages, before which nobody may have them mapped."""


class TrainClient(_Client):
    """A training engine, all its ranks, as coroutines; contracts and errors are `TrainEngine`'s and `Handle.call`'s.

    Beside the methods below it has `save`, `load`, `export`, `offload`, `onload` and `close`, with the arguments of
    `TrainEngine`'s. timeouts: as `TIMEOUTS`; "step" for a step, log-probs, save, load and export, else "update".
    still: held while an update reads the weights; what would change or move them waits for it. transfers: those that
    read from here.
    """

    def __init__(self, handles: Sequence[Handle], timeouts: Mapping[str, float] = TIMEOUTS) -> None:
        super().__init__(handles, timeouts)
        self.still = asyncio.Lock()
        self.transfers: list[Transfer] = []

    async def _every(self, method: str, *args: Any) -> list[list[Any]]:
        if method not in _CHANGING:
            return await super()._every(method, *args)
        async with self.still:
            for transfer in self.transfers if method in _FREEING else ():
                await transfer.unmap(deadline=self._timeouts["update"])
            return await super()._every(method, *args)

    @property
    def handle(self) -> Handle:
        """The one engine."""
        return self.handles[0]

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.handle.name

    async def train_step(self, batch: TrainBatch, loss: LossSpec) -> StepResult:
        """Take one optimizer step; every rank gets the whole batch."""
        return (await self._every("train_step", batch, loss))[0][0]  # type: ignore[no-any-return]

    async def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> FloatArray:
        """Return float32 [N], the log-probability of each scored token under the current weights, 0 elsewhere."""
        return (await self._every("logprobs", batch, temperature))[0][0]  # type: ignore[no-any-return]

    async def manifests(self) -> list[Manifest]:
        """Return every rank's manifest of its weights, in rank order."""
        return (await self._every("weights.manifest"))[0]

    async def health(self) -> list[Mapping[str, Any]]:
        """Return every rank's plain facts, in rank order."""
        return (await self._every("health"))[0]


class InferPool(_Client):
    """The engines of one inference part, all alike. Requests are spread over them; every other call goes to all.

    Beside the methods below it has `abort`, `pause`, `resume`, `load_adapter`, `unload_adapter`, `release_memory`,
    `resume_memory` and `close`, with the arguments of `InferEngine`'s. timeouts: as `TIMEOUTS`; "generate" for a
    request, waiting in a paused engine included, and for `pause`, else "update". A request to an engine that died
    raises `WorkerError`. The answers of rank 0 count.

    updating: held while an update of these engines runs. out: names of engines that an update has taken out of the set
    until they are healed; nothing is asked of them, and a request that one of them lost is asked of another.
    """

    def __init__(self, handles: Sequence[Handle], timeouts: Mapping[str, float] = TIMEOUTS) -> None:
        super().__init__(handles, timeouts)
        self.updating = asyncio.Lock()
        self.out: set[str] = set()
        self._load: Counter[str] = Counter()

    @property
    def serving(self) -> tuple[Handle, ...]:
        """The engines that calls go to: those that no update has taken out."""
        return tuple(handle for handle in self.handles if handle.name not in self.out)

    @property
    def version(self) -> str:
        """The weight version that all engines carry, "0.0" before the first; StateError while they differ."""
        found = {handle.version or "0.0" for handle in self.serving}
        if len(found) > 1:
            message = f"the engines carry different weight versions: {', '.join(sorted(found))}; an update is under way"
            raise StateError(message)
        return found.pop()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request by the engine that has the fewest in flight; cancelling aborts it."""
        return await self._ask(self._idlest(), "generate", request, weight=1)  # type: ignore[no-any-return]

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer several requests, in their order. Request i goes to engine i % n, each share as one batch.

        The dealing depends on nothing else, so equal batches give equal results. When one engine fails, the other
        shares are cancelled and the error is raised.
        """
        serving = self.serving
        n = len(serving)
        shares = [(handle, list(requests[i::n])) for i, handle in enumerate(serving[: len(requests)])]
        asked = [self._ask(handle, "generate_batch", share, weight=len(share)) for handle, share in shares]
        parts = await all_or_none(asked)
        return [parts[i % n][i // n] for i in range(len(requests))]

    async def manifests(self) -> list[list[Manifest]]:
        """Return the manifests of every engine, of each its ranks'."""
        return await self._every("weights.manifest")

    async def health(self) -> list[Mapping[str, Any]]:
        """Return the plain facts of every engine's rank 0."""
        return [answers[0] for answers in await self._every("health")]

    def _idlest(self) -> Handle:
        return min(self.serving, key=lambda handle: self._load[handle.name])

    async def _ask(self, handle: Handle, method: str, request: Any, *, weight: int) -> Any:
        self._load[handle.name] += weight
        try:
            return (await handle.call(method, request, deadline=self._timeouts["generate"]))[0]
        except (WorkerError, UnfitError):
            async with self.updating:  # at the end of an update it shows whether the engine is still one of the set
                if handle in self.serving:
                    raise
        finally:
            self._load[handle.name] -= weight
        return await self._ask(self._idlest(), method, request, weight=weight)


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

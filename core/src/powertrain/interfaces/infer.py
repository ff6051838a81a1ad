"""The inference engine's interface."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Self

from powertrain.interfaces.build import EngineSpec
from powertrain.interfaces.data import GenerateRequest, GenerateResult
from powertrain.interfaces.state import Rule, Stateful
from powertrain.interfaces.weights import WeightSink

PAUSE_MODES: Final = ("abort", "wait", "keep")
"""abort: requests in flight end now with finish "abort" and what they have; wait: they finish first; keep: they freeze
and go on after `resume`, with their caches made anew when the weights have changed."""

_SERVING = ("ready", "paused", "asleep")
_LIVE = ("new", "prepared", "ready", "paused", "asleep", "failed", "closed")


class InferEngine(Stateful, ABC):
    """One inference engine (one instance of a part). In-process and server forms answer alike.

    States: new -> prepared -> ready <-> paused, ready/paused <-> asleep -> closed. Methods are coroutines of one event
    loop and may be cancelled; nothing waits without a bound. Requests that arrive while the engine is paused wait
    for `resume`. An engine whose sink is unfit answers `generate` with `UnfitError`.
    With more than one rank, every rank's worker gets every call; rank 0's answer counts.
    """

    RULES: ClassVar[Mapping[str, Rule]] = {
        "prepare": Rule(("new",), "prepared", "failed"),
        "build": Rule(("prepared",), "ready", "failed"),
        "generate": Rule(("ready", "paused")),
        "generate_batch": Rule(("ready", "paused")),
        "pause": Rule(_SERVING, "paused"),
        "resume": Rule(("paused", "ready"), "ready"),
        "weights": Rule(_SERVING),
        "load_adapter": Rule(("ready", "paused")),
        "unload_adapter": Rule(("ready", "paused")),
        "release_memory": Rule(("ready", "paused"), "asleep"),
        "resume_memory": Rule(("asleep",), "paused"),
        "close": Rule(_LIVE, "closed", "closed"),
    }

    @abstractmethod
    def prepare(self, env: Mapping[str, str]) -> None:
        """As `TrainEngine.prepare`: check or set the variables before anything heavy is imported."""

    @abstractmethod
    async def build(self, spec: EngineSpec) -> None:
        """Build or start the engine, weights loaded, ready to answer, in the same fixed order as a training engine."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request: token ids, their log-probs and the weight version of every segment.

        The version is pinned before the request goes out. Cancelling the call aborts the request.
        """

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer several requests handed over together, in their order.

        An engine whose numbers depend on the batch's make-up overrides this so that equal batches give equal results.
        """
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End the named requests now; each answers with finish "abort" and what it has. Unknown ids are ignored."""

    @abstractmethod
    async def pause(self, mode: str = "wait") -> None:
        """Stop taking steps, in one of `PAUSE_MODES`; returns when nothing is running any more. Idempotent.

        A sleeping engine takes its memory again, as by `resume_memory`: an update finds room for the weights whether
        or not anybody woke the engine before it, and `resume` lets it answer.
        """

    @abstractmethod
    async def resume(self, version: str | None = None) -> None:
        """Take requests again; `version` (str of a `WeightVersion`) is the one that the weights now carry.

        None keeps the present one. Refused with `UnfitError` while the sink is unfit.
        """

    @abstractmethod
    def weights(self) -> WeightSink:
        """Return the place where new weights go (cheap; moves nothing)."""

    @abstractmethod
    async def load_adapter(self, name: str, folder: str) -> None:
        """Register the PEFT adapter in `folder` under a versioned name. Unmatched keys are an error."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter; a request that names it afterwards is refused, never served by the base model."""

    @abstractmethod
    async def release_memory(self) -> None:
        """Give device memory (weights and KV cache) back; the engine must be idle or paused."""

    @abstractmethod
    async def resume_memory(self) -> None:
        """Take device memory again; ends in state paused, since the weights may be stale."""

    @abstractmethod
    async def close(self) -> None:
        """Stop and free everything; may be called in any state, more than once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

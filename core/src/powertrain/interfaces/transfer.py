"""The transfer's interface: what moves weights from a training engine to the inference engines of a set."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from powertrain.weights import Manifest, TransferPlan, TransferReport, Update

Command = tuple[str, Sequence[Any]]
"""A method of a rank's host, and its arguments."""


@dataclass(frozen=True, slots=True)
class Loads:
    """The rest of an update that is one message to each sink.

    commands: for each sink the one by which its ranks load everything; they answer bytes. beside: what is awaited at
    the same time, the trainer's part; a command that must not read before that waits for it by means of its own.
    """

    commands: Sequence[Command]
    beside: Sequence[Awaitable[Any]] = ()


class EngineHandle(Protocol):
    """The driver's side of one engine, all its ranks: inline or in workers alike."""

    name: str
    """Unique in the run, such as `actor` or `rollout/1`."""
    version: str | None
    """The weight version that it was last resumed with; meaningful for inference engines."""
    unfit: bool
    """A failed update has left it neither old nor new, or out of reach; the next `resume` that goes well ends that."""

    async def call(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """Call a method of every rank's host and return the answers in rank order; one failing rank fails the call.

        "series" takes commands, runs them one after another and answers [seconds, answer] for each; an error's
        `during` is the method it came from, and what stands behind that is not run.
        """
        ...


class Endpoint(ABC):
    """A transfer's half inside each rank, made as `cls(weights, place)` and driven by the names of its methods.

    weights: a training rank's `WeightSource` (for `TransferSpec.source`) or an inference rank's `WeightSink`
    (`TransferSpec.sink`).
    """

    @abstractmethod
    def close(self) -> None:
        """Free what the endpoint holds; may be called twice."""


class Transfer(ABC):
    """One pair's path for weights, on the driver. `push` runs the phases in fixed order; subclasses move the bytes.

    The order is: pause, make room, gather, wire, load, finish, resume. `powertrain.weights.transaction` owns it.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self.options = options
        self._one_at_a_time = asyncio.Lock()

    @abstractmethod
    async def plan(self, source: EngineHandle, sinks: Sequence[EngineHandle], *, deadline: float) -> TransferPlan:
        """Work out who sends what to whom from both sides' manifests; called again only when a manifest changed."""

    async def gather(self, plan: TransferPlan, update: Update, *, deadline: float) -> Loads | None:
        """Make the trainer ready to be read; the engines still answer, and nothing may be written yet.

        Return how every sink loads all of it by one command, which then goes out in one message with pause, begin and
        finish; or None where it takes more than one, and `move` is called.
        """
        return None

    async def move(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Gather, wire and load one update into sinks that have begun it; `meter.phase(name)` times each phase.

        Called where `gather` returned None.

        Returns when every byte has arrived in every sink. Raises on the first fault; the caller aborts the sinks.
        """
        raise NotImplementedError

    async def unmap(self, *, deadline: float) -> None:
        """Let go of the trainer's memory on every sink; called before its storages are freed or moved."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Free endpoints and shared memory on all ranks; may be called twice, also after a failure."""

    async def push(self, update: Update, *, deadline: float, pause_mode: str = "wait") -> TransferReport:
        """Run one update from pause to resume; see `powertrain.weights.transaction.run_update`.

        Updates of one transfer wait for each other.
        """
        async with self._one_at_a_time:
            return await self._push(update, deadline=deadline, pause_mode=pause_mode)

    async def _push(self, update: Update, *, deadline: float, pause_mode: str) -> TransferReport:
        """Run one update, with nobody else's beside it; for a subclass that does something before it or after it."""
        from powertrain.weights.transaction import run_update

        return await run_update(self, update, deadline=deadline, pause_mode=pause_mode)

    source: EngineHandle
    sinks: Sequence[EngineHandle]
    manifests: Sequence[Manifest]

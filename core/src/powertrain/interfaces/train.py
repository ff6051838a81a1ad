"""The training engine's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from powertrain.interfaces.build import EngineSpec
from powertrain.interfaces.data import LossSpec, StepResult, TrainBatch
from powertrain.interfaces.state import Rule, Stateful
from powertrain.interfaces.weights import WeightSource

if TYPE_CHECKING:
    from powertrain.interfaces.data import FloatArray

_READY = ("ready",)
_LIVE = ("new", "prepared", "ready", "offloaded", "failed", "closed")


class TrainEngine(Stateful, ABC):
    """One rank of a training engine.

    Every method is collective: all ranks of the engine call it in the same order with equal arguments, and all
    return or all raise. States: new -> prepared -> ready <-> offloaded -> closed; a failed build or a failed step that
    may have left ranks apart ends in `failed`, where only `close` and `load` after a new build are possible.
    One thread calls the methods; they block until the work is done, the device included.
    """

    RULES: ClassVar[Mapping[str, Rule]] = {
        "prepare": Rule(("new",), "prepared", "failed"),
        "build": Rule(("prepared",), "ready", "failed"),
        "train_step": Rule(_READY, None, None),
        "logprobs": Rule(_READY),
        "weights": Rule(_READY),
        "save": Rule(_READY),
        "load": Rule(_READY, None, "failed"),
        "export": Rule(_READY),
        "offload": Rule(_READY, "offloaded"),
        "onload": Rule(("offloaded",), "ready"),
        "close": Rule(_LIVE, "closed", "closed"),
    }

    @abstractmethod
    def prepare(self, env: Mapping[str, str]) -> None:
        """Run before any heavy import: check the variables in `env`, or set them in a process that is not our own.

        Imports nothing heavy itself. A variable that comes too late to have an effect is an error when determinism
        was asked for, else a warning.
        """

    @abstractmethod
    def build(self, spec: EngineSpec) -> None:
        """Build the model: prebuild (determinism, head precision, attention) -> construct -> load -> patch -> wrap.

        The order is fixed, since libraries read determinism at construction. Collective; joins the engine's process
        group at `spec.place.rendezvous` when the world is larger than 1.
        """

    @abstractmethod
    def train_step(self, batch: TrainBatch, loss: LossSpec) -> StepResult:
        """Take one optimizer step on the global batch and return the same result on every rank.

        Loss, gradients and their norm do not depend on how sequences fall to ranks and micro-batches. A loss or a
        gradient norm that is not finite raises before the optimizer moves, and the weights stay as they were.
        """

    @abstractmethod
    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> FloatArray:
        """Return float32 [N]: log-probability of each scored token under the present weights, else 0; on every rank."""

    @abstractmethod
    def weights(self) -> WeightSource:
        """Return this rank's source of weights (cheap; moves nothing)."""

    @abstractmethod
    def save(self, folder: str) -> None:
        """Write the native, resumable state (weights, optimizer, schedule, random states) into an empty folder.

        Complete when it returns on all ranks; the caller publishes the folder by renaming it.
        """

    @abstractmethod
    def load(self, folder: str) -> None:
        """Take the state that `save` wrote, also with another number of ranks; goes on bitwise as if never stopped."""

    @abstractmethod
    def export(self, folder: str) -> None:
        """Write an HF-format model, or a PEFT adapter when one is trained, into a folder; rank 0 writes."""

    @abstractmethod
    def offload(self) -> None:
        """Move weights, gradients and optimizer state off the device."""

    @abstractmethod
    def onload(self) -> None:
        """Undo `offload`."""

    @abstractmethod
    def close(self) -> None:
        """Free everything and leave the process group; may be called in any state, more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

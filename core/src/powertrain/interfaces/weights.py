"""The two ends of a weight update inside the engines: source and sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from powertrain.weights import Manifest, Update


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of one tensor on its way: `tensor` (a torch tensor) holds the range that begins at `start` of `name`.

    name: canonical HF name. start: first index in each dimension of the global tensor; the extent is `tensor`'s shape.
    The receiver copies before it returns; it never keeps a reference, since the memory is used again.
    """

    name: str
    start: tuple[int, ...]
    tensor: Any


class WeightSource(ABC):
    """One rank's weights as they can be read. All methods run in the engine's worker."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """Return what this rank holds, the same for as long as the engine lives; moves nothing, not a collective."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Any]:
        """Return storage name -> local torch tensor; the manifest's boxes point into these."""

    @abstractmethod
    def changes(self) -> int:
        """Return a number that differs whenever the weights may have changed (steps and loads counted)."""

    def places(self) -> int:
        """Return a number that differs whenever a storage may have moved (an offload, for one).

        Asked for in every update that reads storages directly; a source that counts its moves spares the look at each.
        """
        return hash(tuple((name, tensor.data_ptr()) for name, tensor in self.tensors().items()))

    def fence(self) -> None:
        """Return once every write to the weights so far has reached memory (a device synchronise; nothing on CPU)."""
        return


class WeightSink(ABC):
    """Where an engine takes new weights: `begin`, any number of `apply`, `finish`, and `publish` (or `abort`).

    States: steady -> updating -> finished -> steady. `abort` before the first write goes back to steady with the old
    version; after it, also from finished, the sink is unfit until another update has finished. All methods run in
    the engine's worker while the engine is paused, one at a time.

    version: text of the version that is published; None from a sink that does not tell. A driver that could not hear
    how an update ended asks for it.
    """

    version: str | None = None

    @property
    @abstractmethod
    def state(self) -> str:
        """One of steady, updating, finished, unfit."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """Return what this rank wants, the same for as long as the engine lives; moves nothing."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Any]:
        """Return storage name -> local torch tensor, for transfers that write into them directly."""

    def endpoint(self, made: Callable[..., Any], place: Any) -> Any:
        """Make a transfer's endpoint `made(sink, place)`, place a `RankSpec`, in the process where the weights lie."""
        return made(self, place)

    @abstractmethod
    def begin(self, update: Update) -> None:
        """Open an update. Refused in state updating. Nothing is written yet."""

    @abstractmethod
    def apply(self, pieces: Iterable[Piece]) -> None:
        """Copy pieces into place; complete when it returns, device included. Unknown names and ranges are errors."""

    @abstractmethod
    def finish(self) -> None:
        """Refresh all derived state (fused copies, scales, prefix and KV caches); state finished.

        An update that left an element unwritten is an error. Nothing answers with the new weights yet.
        """

    @abstractmethod
    def publish(self, version: str | None) -> None:
        """Called by the engine's `resume`: with a version, finished -> steady under it; None is for a steady sink.

        UnfitError in state unfit; StateError when the version is not that of the update that has finished.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give the update up: steady with the old weights if nothing was written, else unfit. Never raises.

        On a steady sink it does nothing.
        """

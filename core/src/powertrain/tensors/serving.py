"""The sink of an engine that answers requests in the same process: what it asks of updates, adapters and requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, StateError
from powertrain.tensors.lora import version_of
from powertrain.tensors.sink import BoxSink
from powertrain.weights import WeightVersion

if TYPE_CHECKING:
    import torch

    from powertrain.weights import Manifest, Update


class ServingSink(BoxSink):
    """paused: tells whether the engine is paused, without which no update begins.

    unpublished: name of an adapter that has arrived under a version that may yet be given up; no request may use it.
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], paused: Callable[[], bool]) -> None:
        super().__init__(manifest, tensors)
        self._paused = paused
        self.unpublished: str | None = None

    @abstractmethod
    def register(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take an adapter that has arrived whole."""

    @abstractmethod
    def withdraw(self, name: str) -> None:
        """Forget an adapter that was never published, and that no request can use; it may be gone already."""

    def begin(self, update: Update) -> None:
        """Open an update; StateError unless the engine is paused."""
        if not self._paused():
            message = f"update {update.version} cannot begin: the engine is not paused"
            raise StateError(message)
        super().begin(update)

    def add_adapter(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Register an adapter; requests may use it once its version is published."""
        self.register(name, config, tensors)
        self.unpublished = name

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter whose update was given up."""
        self.withdraw(name)
        self.unpublished = None

    def publish(self, version: str | None) -> None:
        """As `BoxSink.publish`; from now on requests may use the adapter."""
        super().publish(version)
        self.unpublished = None

    def check_published(self, name: str) -> None:
        """Raise ConfigError for an adapter that no request may use yet."""
        if name == self.unpublished:
            message = f"adapter {name!r} has arrived and is not published; resume with its version first"
            raise ConfigError(message)

    def answering(self, adapter: str | None) -> str:
        """Return the version of what answers: the base's, or the adapter's where that is the later one."""
        base = WeightVersion.parse(self.base_version)
        own = version_of(adapter) if adapter is not None else None
        return str(max(base, own) if own is not None else base)

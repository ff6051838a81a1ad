"""An engine's side of a sink that lies in a worker of its vLLM server."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import StateError
from powertrain.interfaces.transfer import Endpoint
from powertrain.tensors.local import LocalSink
from powertrain.tensors.serving import ServingSink
from powertrain.tensors.sink import dtype_name

if TYPE_CHECKING:
    from powertrain.interfaces.weights import Piece, WeightSource
    from powertrain.weights import Manifest, Update
    from powertrain_vllm.relay import Caller

logger = logging.getLogger(__name__)
CALL_SECONDS: Final = 300.0
MARGIN_SECONDS: Final = 30.0
"""What a call gets beyond the deadline that the operation keeps by itself."""
APPLY_BYTES: Final = 64 << 20
"""About so much goes to the worker in one call of `apply`."""


class RemoteSink(ServingSink):
    """Relays to the worker's sink and mirrors where it stands; an update's bytes go straight there, see `endpoint`.

    forget: drops the prefix caches, or raises. `apply` and `tensors` carry bytes through shared memory, for tests and
    for who has no transfer: `tensors` returns copies, and what is written into those does not reach the engine.
    """

    remote = True

    def __init__(self, caller: Caller, forget: Callable[[], None]) -> None:
        self._caller, self._forget = caller, forget
        self._arrived: Callable[[str, str], None] = lambda name, folder: None
        self._withdrawn: Callable[[str], None] = lambda name: None
        answer = caller.call("manifest", seconds=CALL_SECONDS)
        manifest: Manifest = answer["value"]
        super().__init__(manifest, {}, lambda: True)
        self._note(answer["status"])
        self._kind = "full"

    def attach(
        self, paused: Callable[[], bool], arrived: Callable[[str, str], None], withdrawn: Callable[[str], None]
    ) -> None:
        """As `worker.VllmSink.attach`."""
        self._paused, self._arrived, self._withdrawn = paused, arrived, withdrawn

    def _note(self, status: Mapping[str, Any]) -> None:
        self._state = status["state"]
        self.version, self.base_version = status["version"], status["base_version"]
        self.unpublished = status["unpublished"]

    def _call(self, op: str, *args: Any, seconds: float = CALL_SECONDS) -> Any:
        try:
            answer = self._caller.call(op, *args, seconds=seconds)
        except Exception:
            if op != "status":
                self._look()
            raise
        self._note(answer["status"])
        for kind, name, folder in answer["events"]:
            if kind == "withdrawn":
                self._withdrawn(name)
            else:
                self._take(name, folder)
        return answer["value"]

    def _look(self) -> None:
        """After a fault: see where the sink stands; one that cannot be asked is unfit."""
        try:
            self._call("status", seconds=MARGIN_SECONDS)
        except Exception:  # noqa: BLE001 - the first error tells
            self._state = "unfit"

    def _take(self, name: str, folder: str) -> None:
        """Hand an adapter on; one that the engine refuses is given up."""
        try:
            self._arrived(name, folder)
        except BaseException:
            self._call("abort")
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def register(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Not called here: the worker's sink takes adapters."""
        raise NotImplementedError

    def withdraw(self, name: str) -> None:
        """Not called here, as `register`."""
        raise NotImplementedError

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return storage name -> a copy of the worker's tensor as it is now."""
        found = {}
        for name, (dtype, shape, stride, data) in self._call("tensors").items():
            flat = torch.from_numpy(data).view(getattr(torch, dtype))
            found[name] = torch.as_strided(flat, tuple(shape), tuple(stride))
        return found

    def endpoint(self, made: Callable[..., Any], place: Any) -> Any:
        """Make a transfer's endpoint in the worker, on the sink there; that of `local` here, where its source is."""
        if made is LocalSink:
            if place.device == "cuda":
                logger.warning(
                    "weights go to vLLM's server through host memory, since its engine shares the trainer's process; "
                    "with the option inline=false they stay on the card"
                )
            return made(self, place)
        return RemoteEndpoint(self._call, made, place)

    def begin(self, update: Update) -> None:
        """Open an update; StateError unless the engine is paused."""
        if not self._paused():
            message = f"update {update.version} cannot begin: the engine is not paused"
            raise StateError(message)
        self._call("begin", update)
        self._kind = update.kind

    def apply(self, pieces: Iterable[Piece]) -> None:
        """Copy pieces into place, by way of shared memory, some at a time."""
        batch: list[tuple[Any, ...]] = []
        size = 0
        for piece in pieces:
            batch.append(_packed(piece))
            size += piece.tensor.nbytes
            if size >= APPLY_BYTES:
                self._call("apply", batch)
                batch, size = [], 0
        self._call("apply", batch)

    def share(self, source: WeightSource, pieces: Iterable[Piece]) -> bool:
        """Return False: another process's memory is shared with nobody."""
        return False

    def finish(self) -> None:
        """Finish in the worker, then drop the prefix caches; without that the update is given up."""
        self._call("finish")
        if self._kind == "adapter":
            return
        try:
            self._forget()
        except BaseException:
            self.abort()
            raise

    def publish(self, version: str | None) -> None:
        """As `BoxSink.publish`."""
        self._call("publish", version)

    def abort(self) -> None:
        """Give the open update up; never raises."""
        try:
            self._call("abort")
        except Exception:  # noqa: BLE001 - the server has gone, which the next call tells
            self._state = "unfit"


class RemoteEndpoint(Endpoint):
    """A transfer's endpoint in a worker; has the operations of its class."""

    def __init__(self, call: Callable[..., Any], made: Any, place: Any) -> None:
        self._call, self._made = call, made
        self._number: int | None = call("open_endpoint", made.__module__, made.__qualname__, place)

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_") or not callable(getattr(self._made, op, None)):
            raise AttributeError(op)
        return partial(self._operate, op)

    def _operate(self, op: str, **payload: Any) -> Any:
        own = payload.get("seconds", 0.0)
        seconds = max(CALL_SECONDS, float(own) + MARGIN_SECONDS)
        return self._call("call_endpoint", self._number, op, payload, seconds=seconds)

    def close(self) -> None:
        """Close the endpoint there; may be called twice, also when the server has gone."""
        number, self._number = self._number, None
        if number is not None:
            try:
                self._call("close_endpoint", number)
            except StateError:
                return


def _packed(piece: Piece) -> tuple[Any, ...]:
    tensor = piece.tensor.detach().cpu().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return piece.name, tuple(piece.start), dtype_name(tensor.dtype), tuple(tensor.shape), data

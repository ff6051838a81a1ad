"""What powertrain has inside the processes of a vLLM server: a plugin for all of them, an extension for its workers.

The plugin (entry point group `vllm.general_plugins`) does nothing unless `POWERTRAIN_VLLM_FOLDER` is set. It patches
what must be patched before a model loads and, in a server that an engine has started, ends the process with the engine.
The extension (`--worker-extension-cls powertrain_vllm.extension.Extension`) makes a worker's seat and serves its sink
to the engine over a socket, on a thread of its own.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, StateError, TransferError
from powertrain.runtime import wire
from powertrain_vllm.relay import Desk
from powertrain_vllm.serving import ALIVE, FOLDER, HOW, OWNED, private

if TYPE_CHECKING:
    from powertrain_vllm.worker import Seat

_watching: list[threading.Thread] = []


def plugin() -> None:
    """Prepare a process of a server of ours; called by vLLM in each, more than once."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    if os.environ.get(OWNED) == "1" and not _watching:
        _watching.append(threading.Thread(target=_end_with_engine, args=(private(folder),), daemon=True))
        _watching[0].start()
    from powertrain_vllm.worker import before_load

    before_load()


def _end_with_engine(folder: Path) -> None:
    """Wait until the engine's process is gone, however it ended, then kill what is left of the server."""
    with suppress(OSError), (folder / ALIVE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Gate:
    """Keeps a model's steps and what is written into its weights apart.

    An engine writes while none of its rows run. `writing` takes the lock that every step takes, so the two never
    overlap; and a step that came between two writes of one update, which only another client can have caused, fails
    the update: what it computed was of neither version.
    """

    def __init__(self, runner: Any) -> None:
        self._lock = threading.Lock()
        self.steps = 0
        for name in ("execute_model", "sample_tokens"):
            if hasattr(runner, name):
                setattr(runner, name, self._guarded(getattr(runner, name), counts=name == "execute_model"))

    def _guarded(self, run: Callable[..., Any], *, counts: bool) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if counts and getattr(args[0], "total_num_scheduled_tokens", 1):
                    self.steps += 1
                return run(*args, **kwargs)

        return guarded

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold steps back; StateError when one does not end."""
        if not self._lock.acquire(timeout=60.0):
            message = "a step of vLLM has not ended within 60 s; weights are written between steps"
            raise StateError(message)
        try:
            yield
        finally:
            self._lock.release()


class Relayed:
    """A worker's sink as an engine in another process uses it: one method for each operation of `remote.RemoteSink`."""

    def __init__(self, seat: Seat, runner: Any) -> None:
        self._sink, self._gate = seat.sink, Gate(runner)
        self._events: list[tuple[str, str, str]] = []
        self._endpoints: dict[int, Any] = {}
        self._begun = 0
        self._sink.attach(
            lambda: True,  # the engine has looked whether it is paused
            lambda name, folder: self._events.append(("arrived", name, folder)),
            lambda name: self._events.append(("withdrawn", name, "")),
        )

    def answer(self, op: str, args: list[Any]) -> dict[str, Any]:
        """Do one operation; returns its value, where the sink stands, and the adapters that came and went."""
        found = None if op.startswith("_") or op in {"answer", "left"} else getattr(self, op, None)
        if found is None:
            message = f"a worker has no operation {op!r}"
            raise ConfigError(message)
        self._events.clear()
        value = found(*args)
        return {"value": value, "status": self.status(), "events": list(self._events)}

    def left(self) -> None:
        """Give up what an engine that has gone left open."""
        for number in list(self._endpoints):
            with suppress(Exception):
                self.close_endpoint(number)
        with suppress(Exception):
            self.abort()

    def status(self) -> dict[str, Any]:
        """Return what an engine's mirror of the sink shows."""
        sink = self._sink
        return {
            "state": sink.state,
            "version": sink.version,
            "base_version": sink.base_version,
            "unpublished": sink.unpublished,
        }

    def steps(self) -> int:
        """Return how many steps the model has taken since its seat was made."""
        return self._gate.steps

    def manifest(self) -> Any:
        """Return the sink's manifest."""
        return self._sink.manifest()

    def tensors(self) -> dict[str, Any]:
        """Return name -> (dtype, shape, strides, elements as bytes) of each storage."""
        import torch

        from powertrain.tensors.sink import dtype_name

        found = {}
        with self._gate.writing():
            for name, tensor in self._sink.tensors().items():
                span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                flat = torch.as_strided(tensor.detach(), (span if tensor.numel() else 0,), (1,)).cpu()
                where = dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride())
                found[name] = (*where, flat.view(torch.uint8).numpy())
        return found

    def begin(self, update: Any) -> None:
        """Open an update."""
        with self._gate.writing():
            self._sink.begin(update)
            self._begun = self._gate.steps

    def apply(self, pieces: list[Any]) -> None:
        """Write pieces (name, start, dtype, shape, bytes)."""
        import torch

        from powertrain.interfaces.weights import Piece

        def given() -> Iterator[Piece]:
            for name, start, dtype, shape, data in pieces:
                flat = torch.from_numpy(data).view(getattr(torch, dtype)) if data.size else torch.empty(0)
                yield Piece(name, tuple(start), flat.reshape(tuple(shape)))

        with self._gate.writing():
            self._sink.apply(given())

    def finish(self) -> None:
        """Finish an update; TransferError where the model took steps while it was written."""
        with self._gate.writing():
            steps = self._gate.steps - self._begun
            if steps and self._sink.state == "updating":
                message = (
                    f"vLLM took {steps} steps while weights were written, for another client of its server; their "
                    "tokens are of no version. Let nobody else use a server that a run updates"
                )
                raise TransferError(message, phase="finish")
            self._sink.finish()

    def publish(self, version: str | None) -> None:
        """Publish."""
        self._sink.publish(version)

    def abort(self) -> None:
        """Give an update up."""
        with self._gate.writing():
            self._sink.abort()

    # ---- endpoints of transfers
    def open_endpoint(self, module: str, name: str, place: Any) -> int:
        """Make a transfer's endpoint on the sink; returns its number."""
        number = secrets.randbits(31)
        self._endpoints[number] = _endpoint(module, name)(self._sink, place)
        return number

    def call_endpoint(self, number: int, op: str, payload: Mapping[str, Any]) -> Any:
        """Call an endpoint's operation."""
        found = None if op.startswith("_") else getattr(self._endpoints.get(number), op, None)
        if found is None:
            message = f"this worker has no endpoint {number} with an operation {op!r}"
            raise StateError(message)
        with self._gate.writing():
            return found(**payload)

    def close_endpoint(self, number: int) -> None:
        """Close an endpoint."""
        endpoint = self._endpoints.pop(number, None)
        if endpoint is not None:
            endpoint.close()


def _endpoint(module: str, name: str) -> Any:
    """Return a class by its name; only one that an installed transfer gives for a sink is ever called."""
    from powertrain.errors import PluginError
    from powertrain.registry import Registry

    registry = Registry()
    for spec in registry.specs("transfer").values():
        with suppress(PluginError):
            made = registry.load_class(spec, "sink")
            if (made.__module__, made.__qualname__) == (module, name):
                return made
    message = f"no transfer that is installed beside the server has the endpoint {module}:{name}"
    raise ConfigError(message)


class Extension:
    """Methods that vLLM's worker gets; they run on its main thread, between steps."""

    def powertrain_sit(self, fp32_head: bool, native_head: bool) -> dict[str, Any]:
        """Make this worker's seat and open its desk, once; returns plain facts, or the `fault` that prevents it."""
        try:
            found = vars(self).get("_powertrain_seat") or self._powertrain_made(fp32_head, native_head)
            if found["fp32_head"] != fp32_head:
                message = f"this server's head was checked for fp32={found['fp32_head']}, now for fp32={fp32_head}"
                raise ConfigError(message)
        except Exception as exc:  # noqa: BLE001 - told to the engine
            return {"fault": wire.told(exc)}
        vars(self)["_powertrain_seat"] = found
        return dict(found)

    def _powertrain_made(self, fp32_head: bool, native_head: bool) -> dict[str, Any]:
        from powertrain_vllm.worker import Seat

        worker: Any = self
        if not os.environ.get(FOLDER):
            message = f"this server has no {FOLDER}; {HOW}"
            raise ConfigError(message)
        folder = private(os.environ[FOLDER])
        seat = Seat(worker, _nothing, fp32_head=fp32_head, native_head=native_head, folder=folder)
        relayed = Relayed(seat, worker.model_runner)
        prefix = f"{wire.RUN_PREFIX}{secrets.token_hex(6)}-"
        path = folder / f"rank-{worker.rank}.sock"
        facts = {
            "rank": int(worker.rank),
            "process": os.getpid(),
            "vocabulary": seat.vocabulary,
            "path": str(path),
            "prefix": prefix,
            "fp32_head": fp32_head,
        }
        desk = Desk(
            path,
            prefix=prefix,
            rank=int(worker.rank),
            answer=relayed.answer,
            left=relayed.left,
            begin=lambda: _use(worker.device),
        )
        vars(self)["_powertrain_kept"] = (seat, desk, wire.claim(prefix))
        return facts

    def powertrain_fence(self) -> int:
        """Return once everything that this worker was told before has been done, on the device too."""
        worker: Any = self
        if worker.device.type == "cuda":
            import torch

            torch.cuda.synchronize(worker.device)
        return int(worker.rank)


def _use(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def _nothing() -> None:
    """Stand where an engine in the same process drops its prefix caches; here the engine does that after `finish`."""

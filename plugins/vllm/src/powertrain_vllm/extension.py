"""What a vLLM server's workers get: `--worker-extension-cls powertrain_vllm.extension.WorkerExtension`.

vLLM imports this module in each worker before the model is loaded; with `POWERTRAIN_VLLM_SOCKETS` set the import
patches what has to be patched by then. The rest is done by the command `powertrain_open`, once the server is up.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.errors import ConfigError
from powertrain.interfaces.transfer import Endpoint
from powertrain.runtime.wire import told
from powertrain_vllm.relay import SOCKETS, check_private, receive, send

SINK = ("manifest", "begin", "finish", "publish", "abort")
"""Methods of the sink that may be called, as `weights.<name>`."""


class WorkerExtension:
    """Becomes a base of vLLM's worker class, so nothing here may have a name that a worker has."""

    def powertrain_open(self, fp32_head: bool, native_head: bool) -> dict[str, Any]:
        """Take the seat, once, and listen on the rank's socket; returns plain facts about the model and its layout."""
        from powertrain_vllm.worker import Seat

        folder = Path(os.environ.get(SOCKETS, ""))
        check_private(folder)
        worker: Any = self
        if not hasattr(worker, "powertrain_seat"):
            worker.powertrain_seat = Seat(worker, fp32_head=fp32_head, native_head=native_head)
            worker.powertrain_head = fp32_head
            Desk(worker.powertrain_seat.sink, folder, worker.rank)
        config = worker.vllm_config
        return {
            "rank": worker.rank,
            "tensor": config.parallel_config.tensor_parallel_size,
            "pipeline": config.parallel_config.pipeline_parallel_size,
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "seed": config.model_config.seed,
            "max_model_len": config.model_config.max_model_len,
            "vocabulary": worker.powertrain_seat.vocabulary,
            "fp32_head": worker.powertrain_head,
            "sockets": str(folder),
        }

    def powertrain_rows(self) -> list[str]:
        """Return the names of requests that this worker still holds."""
        worker: Any = self
        return list(worker.model_runner.requests)


class Desk:
    """Serves commands on a worker's sink and on endpoints, one at a time, for whoever may read the private folder."""

    def __init__(self, sink: Any, folder: Path, rank: int) -> None:
        self._sink = sink
        self._endpoints: dict[int, Endpoint] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._token = secrets.token_hex(32)
        path, token = folder / f"{rank}.sock", folder / f"{rank}.token"
        for old in (path, token):
            old.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1)
        with os.fdopen(os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(self._token)
        threading.Thread(target=self._run, name="powertrain-desk", daemon=True).start()

    def _run(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._talk, args=(sock,), name="powertrain-desk", daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        opened: list[int] = []
        with sock, contextlib.suppress(OSError, ConfigError):
            sock.settimeout(30.0)
            if not hmac.compare_digest(str(receive(sock)).encode(), self._token.encode()):
                return
            sock.settimeout(None)
            try:
                while True:
                    command, args = receive(sock)
                    with self._lock:
                        answer = self._answered(command, args, opened)
                    send(sock, answer)
            finally:
                with self._lock:  # nobody is left who could go on with an update
                    for number in opened:
                        self._close(number)
                    self._sink.abort()

    def _answered(self, command: str, args: list[Any], opened: list[int]) -> dict[str, Any]:
        answer = fault = None
        try:
            answer = self._do(command, args, opened)
        except Exception as exc:  # noqa: BLE001 - the caller gets it
            fault = told(exc)
        sink = self._sink
        facts = {
            "state": sink.state,
            "version": sink.version,
            "base_version": sink.base_version,
            "arrived": getattr(sink, "arrived", None),
        }
        return {"answer": answer, "fault": fault, "facts": facts}

    def _do(self, command: str, args: list[Any], opened: list[int]) -> Any:
        kind, _, name = command.partition(".")
        if command == "state":
            return None
        if kind == "weights" and name in SINK:
            if name == "begin":
                self._sink.arrived = None
            return getattr(self._sink, name)(*args)
        if command == "endpoint.open":
            number = next(self._numbers)
            self._endpoints[number] = _endpoint_class(args[0])(self._sink, args[1])
            opened.append(number)
            return number
        if command == "endpoint.call":
            return self._operation(*args)
        if command == "endpoint.close":
            return self._close(*args)
        message = f"vLLM's worker has no command {command!r}"
        raise ConfigError(message)

    def _operation(self, number: int, op: str, payload: Mapping[str, Any]) -> Any:
        found = None if op.startswith("_") else getattr(self._endpoints[number], op, None)
        if found is None:
            message = f"{type(self._endpoints[number]).__name__} has no operation {op!r}"
            raise ConfigError(message)
        return found(**payload)

    def _close(self, number: int) -> None:
        endpoint = self._endpoints.pop(number, None)
        if endpoint is not None:
            endpoint.close()


def _endpoint_class(place: str) -> Any:
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, Endpoint)):
        message = f"{place!r} is no endpoint of a transfer"
        raise ConfigError(message)
    return found


if os.environ.get(SOCKETS):
    from powertrain_vllm.worker import before_load

    before_load()

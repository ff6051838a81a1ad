"""Weights of a vLLM server: commands go to its workers over Unix sockets, and the sink that stands for the far one.

Bytes of weights never come this way: a transfer's endpoint lives in vLLM's worker, beside the parameters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, DeadlineError, StateError
from powertrain.interfaces.weights import WeightSink
from powertrain.runtime.wire import pack, rebuilt, unpack

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.interfaces.weights import Piece
    from powertrain.weights import Manifest, Update

SOCKETS = "POWERTRAIN_VLLM_SOCKETS"
"""Variable that names the private folder of a server's sockets."""
_HEAD = struct.Struct("<3Q")
_MOST = 1 << 30


def check_private(folder: Path) -> None:
    """ConfigError unless a folder is this user's own and closed to everybody else."""
    found = folder.lstat() if folder.exists() else None
    if found is None or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        message = f"{SOCKETS} names {folder}; it has to be a folder of this user with mode 0700 (mkdir -m 700)"
        raise ConfigError(message)


def send(sock: socket.socket, value: Any) -> None:
    """Send one value; ConfigError where it is not plain data."""
    frames = pack(value)
    sock.sendall(_HEAD.pack(*map(len, frames)) + b"".join(frames))


def receive(sock: socket.socket) -> Any:
    """Receive one value; ConnectionError when the other end is gone."""
    sizes = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if sum(sizes) > _MOST:
        message = f"a message of {sum(sizes)} bytes arrived; the most is {_MOST}"
        raise ConfigError(message)
    return unpack([_exactly(sock, size) for size in sizes])


def _exactly(sock: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = sock.recv(min(size - len(found), 1 << 20))
        if not part:
            message = "the other end has closed the connection"
            raise ConnectionError(message)
        found += part
    return bytes(found)


class Wire:
    """The connection to one of a server's workers; one command at a time, from any thread."""

    def __init__(self, folder: Path, rank: int, seconds: float) -> None:
        self._rank, self._seconds = rank, seconds
        self._lock = threading.Lock()
        self.lost = False
        self.facts: Mapping[str, Any] = {}
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(seconds)
        self._sock.connect(str(folder / f"{rank}.sock"))
        send(self._sock, (folder / f"{rank}.token").read_text(encoding="ascii"))
        self.call("state")

    def call(self, command: str, *args: Any) -> Any:
        """Run a command there; its errors come back. StateError when the worker is gone, DeadlineError when it hangs."""
        with self._lock:
            if self.lost:
                message = "vLLM's worker is out of reach since an earlier command"
                raise StateError(message)
            try:
                send(self._sock, [command, list(args)])
                answer = receive(self._sock)
            except TimeoutError as exc:
                self.close()
                message = f"vLLM's worker {self._rank} did not answer {command!r} within {self._seconds:g} s"
                raise DeadlineError(message, who="vLLM's worker", what=command, seconds=self._seconds) from exc
            except OSError as exc:
                self.close()
                message = f"vLLM's worker {self._rank} went away during {command!r}: {exc}"
                raise StateError(message) from exc
        self.facts = answer["facts"]
        if answer["fault"] is not None:
            raise rebuilt(answer["fault"], engine="vLLM's worker", rank=self._rank)
        return answer["answer"]

    def close(self) -> None:
        """Hang up; may be called twice."""
        self.lost = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class RemoteSink(WeightSink):
    """A worker's sink. halt, go_on: stop the server's scheduler and restart it; forget: drop its prefix caches."""

    def __init__(
        self, wire: Wire, halt: Callable[[], None], go_on: Callable[[], None], forget: Callable[[], None]
    ) -> None:
        self._wire, self._halt, self._go_on, self._forget = wire, halt, go_on, forget
        self._halted = False
        self._manifest: Manifest = wire.call("weights.manifest")
        self.paused: Callable[[], bool] = lambda: True
        self.registered: Callable[[str, str], None] | None = None
        self.dropped: Callable[[str], None] | None = None
        self.unpublished: str | None = None

    @property
    def state(self) -> str:
        """One of steady, updating, finished, unfit; unfit also when the worker is out of reach."""
        return "unfit" if self._wire.lost else str(self._wire.facts["state"])

    @property
    def version(self) -> str:  # type: ignore[override]
        """Text of the version that is published."""
        return str(self._wire.facts["version"])

    @property
    def base_version(self) -> str:
        """Text of the last published version that was not an adapter's."""
        return str(self._wire.facts["base_version"])

    def manifest(self) -> Manifest:
        """Return what the worker wants."""
        return self._manifest

    def tensors(self) -> Mapping[str, Any]:
        """StateError: the tensors lie in another process."""
        message = "a server's weights lie in vLLM's worker; endpoints are made there"
        raise StateError(message)

    def apply(self, pieces: Iterable[Piece]) -> None:
        """StateError, as `tensors`."""
        self.tensors()

    def endpoint(self, made: type, place: RankSpec) -> Any:
        """Make a transfer's endpoint in vLLM's worker and return what stands for it here."""
        number = self._wire.call("endpoint.open", f"{made.__module__}:{made.__qualname__}", place)
        return RemoteEndpoint(self._wire, number)

    def begin(self, update: Update) -> None:
        """Stop the server's scheduler and open an update; StateError unless the engine is paused."""
        if not self.paused():
            message = f"update {update.version} cannot begin: the engine is not paused"
            raise StateError(message)
        self._halt()
        self._halted = True
        try:
            self._wire.call("weights.begin", update)
        except BaseException:
            if self.state != "updating":
                self._release()
            raise

    def finish(self) -> None:
        """Finish there, take an adapter that has arrived, and drop the server's prefix caches."""
        self._wire.call("weights.finish")
        arrived = self._wire.facts["arrived"]
        if arrived is None:
            self._forget()
            return
        name, folder = arrived
        try:
            if self.registered is not None:
                self.registered(name, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.unpublished = name

    def publish(self, version: str | None) -> None:
        """Publish there, and let the server go on."""
        self._wire.call("weights.publish", version)
        self.unpublished = None
        self._release()

    def abort(self) -> None:
        """Give the update up; a server whose weights are unfit stays halted until another update heals it."""
        if self.unpublished is not None and self.dropped is not None:
            with contextlib.suppress(Exception):  # the worker forgets it below in any case
                self.dropped(self.unpublished)
        self.unpublished = None
        with contextlib.suppress(Exception):  # told by `state`
            self._wire.call("weights.abort")
            if self.state == "steady":
                self._release()

    def _release(self) -> None:
        if self._halted:
            self._go_on()
            self._halted = False


class RemoteEndpoint:
    """Stands for an endpoint in vLLM's worker: each of its operations is a command."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire, self._number = wire, number

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_"):
            raise AttributeError(op)

        def call(**payload: Any) -> Any:
            return self._wire.call("endpoint.call", self._number, op, payload)

        return call

    def close(self) -> None:
        """Close it there; one whose worker is gone is closed already."""
        if not self._wire.lost:
            self._wire.call("endpoint.close", self._number)

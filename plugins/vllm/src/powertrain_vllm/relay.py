"""The line between an engine and a worker of its vLLM server: a Unix socket that carries core's own messages.

A message is the three frames of `powertrain.runtime.wire` (never pickle) behind a head with their lengths. The engine
asks, the worker answers, one at a time. Every wait has a deadline but one: that of a worker for the next question.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from powertrain.errors import ConfigError, DeadlineError, StateError
from powertrain.runtime import wire

MAGIC: Final = b"ptv1"
HEAD: Final = struct.Struct("!4sQQH")
MOST: Final = (wire.MAX_PLAIN, 1 << 30, 255)
"""Bytes that a frame may have: plain data, arrays, the name of a segment."""
PART_SECONDS: Final = 60.0
"""Most seconds from the first byte of a message to its last."""
LINE_ENDED: Final = "the other end of the line has gone"


class LineClosed(ConnectionError):
    """The other end has gone, or the line was closed here."""


class Line:
    """One connected socket. Not for several threads at once."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, frames: Sequence[bytes], seconds: float = PART_SECONDS) -> None:
        """Send a message; TimeoutError when it is not taken in time, `LineClosed` when nobody is there."""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(HEAD.pack(MAGIC, *map(len, frames)) + b"".join(frames))
        except TimeoutError:
            raise
        except OSError as exc:
            raise LineClosed(LINE_ENDED) from exc

    def receive(self, seconds: float | None) -> list[bytes]:
        """Return the next message's frames. seconds: how long to wait for its first byte (None: for ever).

        TimeoutError, `LineClosed`, and ConfigError for what is no message of ours.
        """
        first = self._take(1, seconds)
        end = time.monotonic() + PART_SECONDS
        magic, *lengths = HEAD.unpack(first + self._take(HEAD.size - 1, PART_SECONDS))
        if magic != MAGIC or any(n > most for n, most in zip(lengths, MOST, strict=True)):
            message = (
                f"a message begins with {magic!r} and lengths {lengths}; the most are {list(MOST)} after {MAGIC!r}"
            )
            raise ConfigError(message)
        return [self._take(n, end - time.monotonic()) for n in lengths]

    def _take(self, count: int, seconds: float | None) -> bytes:
        found = bytearray(count)
        view, end = memoryview(found), None if seconds is None else time.monotonic() + seconds
        while view:
            self._socket.settimeout(None if end is None else max(1e-3, end - time.monotonic()))
            try:
                got = self._socket.recv_into(view)
            except TimeoutError:
                raise
            except OSError as exc:
                raise LineClosed(LINE_ENDED) from exc
            if not got:
                raise LineClosed(LINE_ENDED)
            view = view[got:]
        return bytes(found)

    def close(self) -> None:
        """Close; a thread that waits here hears of it. May be called twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Caller:
    """The engine's end. who: what messages call the other end. prefix: of the names of segments, for both ends.

    lost: says why the other end has gone, in place of "the line ended".
    """

    def __init__(self, path: str, *, prefix: str, who: str, lost: Callable[[], str] = str) -> None:
        self._prefix, self._who, self._lost = prefix, who, lost
        self._lock = threading.Lock()
        self._line: Line | None = None
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(PART_SECONDS)
        try:
            made.connect(path)
        except OSError as exc:
            made.close()
            message = f"{who} cannot be reached at {path}: {exc}; an engine and its server share a host and its files"
            raise ConfigError(message) from exc
        self._line = Line(made)

    def call(self, op: str, *args: Any, seconds: float) -> Any:
        """Ask and return the answer; raises what the other end raised, StateError when it has gone.

        After DeadlineError the line is closed, since an answer that comes late would be taken for the next one's.
        """
        if not self._lock.acquire(timeout=seconds):
            raise self._late(op, seconds)
        try:
            if self._line is None:
                message = f"{self._who} cannot be asked for {op!r}: {self._lost() or 'the line to it was closed'}"
                raise StateError(message)
            frames = wire.pack([op, list(args)], prefix=self._prefix)
            try:
                self._line.send(frames)
                told = self._line.receive(seconds)
                found = wire.unpack(told, prefix=self._prefix)
            except BaseException as exc:
                self._end()
                if isinstance(exc, TimeoutError):
                    raise self._late(op, seconds) from exc
                if isinstance(exc, LineClosed):
                    message = f"{self._who} has gone while it was asked for {op!r}: {self._lost() or exc}"
                    raise StateError(message) from exc
                raise
            finally:
                wire.release(frames)
            wire.release(told)
        finally:
            self._lock.release()
        if found["fault"] is not None:
            raise wire.rebuilt(found["fault"], engine=self._who, rank=found["rank"])
        return found["value"]

    def _late(self, op: str, seconds: float) -> DeadlineError:
        message = f"{self._who} did not answer {op!r} within {seconds:g} s"
        return DeadlineError(message, who=self._who, what=op, seconds=seconds)

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def close(self) -> None:
        """Hang up, also under a call that waits. May be called twice."""
        line = self._line
        if line is not None:
            line.close()
        if self._lock.acquire(timeout=1.0):
            self._end()
            self._lock.release()


class Desk:
    """The worker's end: answers one engine at a time, on threads of its own.

    answer(op, args) is called for each question and may raise; left() once an engine has gone. begin() is called first
    on every thread that answers. A second engine is told who is here already.
    """

    def __init__(
        self,
        path: Path,
        *,
        prefix: str,
        rank: int,
        answer: Callable[[str, list[Any]], Any],
        left: Callable[[], None],
        begin: Callable[[], object] = int,
    ) -> None:
        self._prefix, self._rank, self._answer, self._left, self._begin = prefix, rank, answer, left, begin
        self._busy = threading.Lock()
        self._guest = 0
        self._lines: list[Line] = []
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        path.chmod(0o600)
        self._listening.listen(4)
        self._path = path
        threading.Thread(target=self._listen, name="powertrain-desk", daemon=True).start()

    def close(self) -> None:
        """Take no more engines, and hang up on the one that is here."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._path.unlink(missing_ok=True)
        for line in self._lines:
            line.close()

    def _listen(self) -> None:
        while True:
            try:
                guest, _ = self._listening.accept()
            except OSError:
                return
            pid, user, _ = struct.unpack("3i", guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                guest.close()
                continue
            threading.Thread(target=self._serve, args=(Line(guest), pid), name="powertrain-line", daemon=True).start()

    def _serve(self, line: Line, pid: int) -> None:
        here = self._busy.acquire(timeout=2.0)  # one that has just gone is leaving
        try:
            if here:
                self._guest = pid
                self._lines.append(line)
                self._begin()
            self._converse(line, here)
        finally:
            line.close()
            if here:
                self._lines.remove(line)
                try:
                    self._left()
                finally:
                    self._busy.release()

    def _converse(self, line: Line, here: bool) -> None:
        while True:
            try:
                frames = line.receive(None if here else PART_SECONDS)
                value, fault = None, None
                try:
                    op, args = wire.unpack(frames, prefix=self._prefix)
                    if not here:
                        message = f"the engine of process {self._guest} has this server; one at a time may"
                        raise StateError(message)
                    value = self._answer(op, args)
                    told = wire.pack({"value": value, "fault": None, "rank": self._rank}, prefix=self._prefix)
                except Exception as exc:  # noqa: BLE001 - the engine gets it
                    fault = wire.told(exc)
                    told = wire.pack({"value": None, "fault": fault, "rank": self._rank}, prefix=self._prefix)
                line.send(told)
            except (OSError, ConfigError):  # gone, stuck, or no engine of ours
                return
            if not here:
                return

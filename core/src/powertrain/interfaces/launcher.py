"""The launcher's interface: what starts processes, tells of their health and ends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """One process to start.

    name: unique in the run; its log is `<logs>/<name>.log`. argv: the command, its interpreter first. env: the whole
    environment, made by `powertrain.env`; nothing is inherited beside it. ready: "" for a worker (it registers by
    itself), or an http URL that answers 200 once a server is ready. node: index of the host it belongs on.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = ""
    ready: str = ""
    node: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """What is known of one process. code: None while it runs, else its exit status. log: path. tail: its last lines."""

    name: str
    pid: int
    code: int | None
    log: str
    tail: str = field(default="", repr=False)


class Launcher(ABC):
    """Starts workers and servers. The driver owns it; `close` ends all that it has started, children included."""

    def __init__(self, options: Mapping[str, Any], *, logs: str) -> None:
        self.options = options
        self.logs = logs

    @abstractmethod
    def start(self, processes: Sequence[ProcessSpec]) -> None:
        """Start all of them, or none: a failure ends those that were started. Does not wait for readiness."""

    @abstractmethod
    def wait_ready(self, names: Sequence[str], *, deadline: float) -> None:
        """Return when each server answers its `ready` URL; DeadlineError or WorkerError (died) names process, log."""

    @abstractmethod
    def status(self) -> list[ProcessStatus]:
        """Return the state of every process started, in start order; cheap."""

    @abstractmethod
    def stop(self, names: Sequence[str], *, grace: float = 10.0) -> None:
        """End the named processes and their children: ask first, kill after `grace` seconds."""

    @abstractmethod
    def close(self) -> None:
        """End everything; may be called twice, from a signal handler's path too."""

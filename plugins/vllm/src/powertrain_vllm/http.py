"""A vLLM server as a process of ours: how it is started, watched and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import powertrain.launch.child as child
from powertrain.errors import WorkerError
from powertrain_vllm.relay import SOCKETS

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a trainer's ranks, which vLLM's workers would take for their own."""
EXTENSION = "powertrain_vllm.extension.WorkerExtension"
ASK_SECONDS, KILL_SECONDS = 8.0, 6.0
"""Seconds that a server has to end by itself, and after that until its whole tree is gone."""


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as command-line flags; None and empty mappings are left out."""
    found: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value == {}:
            continue
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, Mapping):
            found.append(f"{flag}={json.dumps(dict(value))}")
        elif isinstance(value, list | tuple):
            found += [flag, *map(str, value)]
        else:
            found.append(f"{flag}={value}")
    return found


def environment(folder: Path, key: str, *, lora: bool) -> dict[str, str]:
    """Return the server's variables: ours without a trainer's ranks; the key stands here and nowhere else."""
    kept = {
        name: value for name, value in os.environ.items() if name not in RANKS and not name.startswith("TORCHELASTIC_")
    }
    kept.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # of an engine in this process
    kept |= {SOCKETS: str(folder), "VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if lora:
        kept["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return kept


class Process:
    """The server's tree of processes, under core's small parent: it ends with us, and nothing is left of it."""

    def __init__(self, argv: list[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self._parent = subprocess.Popen(
                [sys.executable, "-I", child.__file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={},
                start_new_session=True,
            )
        order = json.dumps({"argv": argv, "env": dict(env), "cwd": None}).encode()
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        with self._parent.stdin as pipe:
            pipe.write(order)
        with self._parent.stdout as pipe:
            told = pipe.read().decode()
        if not told.isdigit():
            self._parent.wait(KILL_SECONDS)
            message = f"vLLM's server could not be started: {told}"
            raise WorkerError(message, worker="vLLM's server")
        self.pid = int(told)
        self._segments: set[str] = set()

    def ended(self) -> int | None:
        """Return the server's exit status once its whole tree is gone, None before."""
        return self._parent.poll()

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def note(self) -> None:
        """Note the shared memory that the tree has mapped, since a killed process leaves it behind."""
        import psutil

        for process in psutil.Process(self._parent.pid).children(recursive=True):
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            self._segments |= {line.split()[-1] for line in maps.splitlines() if "/dev/shm/psm_" in line}

    def end(self, *, ask: bool = True) -> None:
        """End the whole tree: ask it, then kill it; returns when it is gone."""
        for number, seconds in ((child.ASK, ASK_SECONDS), (child.KILL, KILL_SECONDS), (signal.SIGKILL, 1.0)):
            if number == child.ASK and not ask:
                continue
            if self._parent.poll() is None:
                self._parent.send_signal(number)
                try:
                    self._parent.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue
        for segment in self._segments:
            Path(segment).unlink(missing_ok=True)

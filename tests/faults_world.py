"""Runs of the real command on a tiny random model, in sessions of their own, and what they must not leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from powertrain.testing.tensors.models import character_model

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-c", "import sys; from powertrain.cli import main; sys.exit(main())"]
SHARED = Path("/dev/shm")
CONFIG = """
recipe: ppo
engines: {engines}
model: model
device: cpu
seed: 5
keep_last: 2
optim: {{lr: 1.0e-2}}
timeouts: {{start: 90, step: 60, generate: 60, update: 60, engine: 60}}
ppo:
  steps: 16
  prompts_per_step: 3
  group_size: 4
  max_tokens: 4
  data: rows.jsonl
  reward: mine.py:sevens
  held_out: 5
  eval_every: 4
  save_every: 1
  plot: false
"""
REWARDS = """
import time

def sevens(record, text, tokens):
    return text.count("7") / 4 + text.count("1") / 8

def unknown_name(record, text, tokens):
    return len(record["answer"])

def nothing(record, text, tokens):
    pass

def hangs(record, text, tokens):
    time.sleep(3600)
"""


def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Yield a folder as a file system of its own, of that size; skips the test where this user may not mount one."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def steady(folder: Path) -> list[str]:
    """Return a run's metrics without what may differ between equal runs, each row as exact text."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ({k: v for k, v in row.items() if not k.startswith("time/") and k != "weight_version"} for row in rows)
    return [json.dumps(row) for row in kept]


def versions(folder: Path) -> list[str]:
    """Return every weight version that a metrics file of the run names, those that were cut off too."""
    lines = {line for file in folder.glob("metrics.jsonl*") for line in file.read_text().split("\n")[:-1]}
    return [json.loads(line)["weight_version"] for line in lines]


@dataclass(frozen=True)
class Ended:
    """How a command ended. told: what its processes told, see faults_site."""

    code: int
    out: str
    err: str
    told: list[dict]

    @property
    def met(self) -> list[str]:
        """Places at which a fault struck."""
        return [fact["met"] for fact in self.told if "met" in fact]


class Started:
    """A command under way; everything that it starts can be found by its tag."""

    def __init__(self, process: subprocess.Popen, tag: str, told: Path) -> None:
        self.process, self.tag, self._told = process, tag, told

    @property
    def told(self) -> list[dict]:
        """What the processes have told so far."""
        lines = self._told.read_text().splitlines() if self._told.exists() else []
        return [json.loads(line) for line in lines]

    def until(self, seen, seconds: float = 90.0) -> None:
        """Wait until something is seen, the command still running."""
        end = time.monotonic() + seconds
        while not seen(self):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, self.told
            time.sleep(0.02)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Signal the whole foreground group, as a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, number)

    def end(self, seconds: float = 120.0) -> Ended:
        """Wait for the command and for all that it has started; fails for anything left behind."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        finally:
            left = self._wait_alone(20.0)
            for process in left:
                process.kill()
        assert not left, [process.info for process in left]
        ended = Ended(self.process.returncode, out, err, self.told)
        assert not listening(ended), "a port is still in use"
        return ended

    def _wait_alone(self, seconds: float) -> list[psutil.Process]:
        """Return what still runs after a while, of all processes that carry the tag."""
        end = time.monotonic() + seconds
        while (left := list(tagged(self.tag))) and time.monotonic() < end:
            time.sleep(0.05)
        return left


def tagged(tag: str):
    """Yield every process that inherited a tag."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if process.environ().get("FAULTS_TAG") == tag and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def listening(ended: Ended) -> list[int]:
    """Return the ports of a run on which something still listens."""
    taken = []
    for port in {port for fact in ended.told for port in fact.get("ports", ())}:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                taken.append(port)
    return taken


def segments(ended: Ended) -> list[str]:
    """Return the files in shared memory that a run's processes have left."""
    prefixes = {fact["prefix"] for fact in ended.told if fact.get("prefix")}
    prefixes |= {f"powertrain-stage-{fact['pid']}-" for fact in ended.told}
    return [path.name for path in SHARED.iterdir() if path.name.startswith(tuple(prefixes))]


class World:
    """A folder with the model, data and rewards; starts commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        character_model(folder / "model")
        rows = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "mine.py").write_text(REWARDS)

    def recipe(self, engines: str) -> Path:
        """Return a recipe file of that layout."""
        file = self.folder / f"{engines.replace('|', '-').replace(':', '')}.yaml"
        file.write_text(CONFIG.format(engines=engines))
        return file

    def start(self, *words: object, faults: list[dict] | None = None, before: list[str] | None = None) -> Started:
        """Start `powertrain WORDS` in a session of its own; before: a command that starts the command."""
        self._count += 1
        tag, told = f"{self.folder}-{self._count}", self.folder / f"told-{self._count}.jsonl"
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        paths = [str(HERE / "faults_site"), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        env |= {"FAULTS_TAG": tag, "FAULTS_TOLD": str(told), "FAULTS": json.dumps(faults or [])}
        process = subprocess.Popen(
            [*(before or []), *COMMAND, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=self.folder,
            start_new_session=True,
        )
        return Started(process, tag, told)

    def run(self, *words: object, **how) -> Ended:
        """Run a command to its end."""
        return self.start(*words, **how).end()

"""What the benchmarks of transfers share: engines of made-up weights in processes of their own, and a result's head.

A trainer's rank holds rows of every tensor, an engine's rank all of it, or columns. Every number depends on its place
in its tensor and on the step, so that a checksum tells whether the right ones have arrived.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import threading
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from powertrain.errors import PowertrainError, WorkerError
from powertrain.interfaces.build import RankSpec
from powertrain.interfaces.weights import WeightSource
from powertrain.registry import Registry
from powertrain.tensors.sink import BoxSink
from powertrain.tensors.verify import Comparison
from powertrain.testing.tensors.world import share
from powertrain.weights import Box, Entry, Manifest, Update, WeightVersion

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "pyzmq", "powertrain")
PERIOD = 1_000_003
Shapes = Mapping[str, tuple[int, ...]]
THREADS = ThreadPoolExecutor(32)
"""For calls that must run at the same time; asyncio's own pool has few threads where there are few cores."""


def holdings(shapes: Shapes, axis: int, place: RankSpec) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return a rank's manifest and its storages on its device, bfloat16, zero but in memory."""
    entries, storages = [], {}
    for name, shape in shapes.items():
        start, size = share(shape, axis, place.rank, place.world)
        storages[name] = torch.empty(size, dtype=torch.bfloat16, device=place.device).fill_(0)
        boxes = (Box(start, size, name, 0, storages[name].stride()),) if storages[name].numel() else ()
        entries.append(Entry(name, "bfloat16", shape, boxes))
    return Manifest(place.rank, place.world, tuple(entries)), storages


class Source(WeightSource):
    """A trainer's rank: rows."""

    def __init__(self, shapes: Shapes, place: RankSpec) -> None:
        self._manifest, self._storages = holdings(shapes, 0, place)
        self._pattern = torch.arange(PERIOD, device=place.device).remainder_(251).to(torch.bfloat16)
        self._steps = -1
        self.train()

    def train(self) -> None:
        """Give every element another number."""
        self._steps += 1
        for entry in self._manifest:
            for box in entry.boxes:
                flat = self._storages[entry.name].view(-1)
                row = flat.numel() // box.size[0] if box.size else 1
                at = (
                    (box.start[0] if box.start else 0) * row + 7919 * self._steps + zlib.crc32(entry.name.encode())
                ) % PERIOD
                done = 0
                while done < flat.numel():
                    count = min(PERIOD - at, flat.numel() - done)
                    flat[done : done + count] = self._pattern[at : at + count]
                    done, at = done + count, 0

    def manifest(self) -> Manifest:
        """Return what it holds."""
        return self._manifest

    def tensors(self) -> Mapping[str, Any]:
        """Return its storages."""
        return self._storages

    def changes(self) -> int:
        """Return the number of steps."""
        return self._steps

    def fence(self) -> None:
        """Wait for a card."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


class Sink(BoxSink):
    """An engine's rank: columns where it is one of several."""

    def __init__(self, shapes: Shapes, place: RankSpec) -> None:
        super().__init__(*holdings(shapes, 1, place))


class Rank:
    """One rank's weights and endpoints, as a host keeps them."""

    def __init__(self, side: str, shapes: Shapes, place: RankSpec) -> None:
        self.weights: Any = (Source if side == "source" else Sink)(shapes, place)
        self._side, self._place = side, place
        self._endpoints: dict[str, Any] = {}

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Run one command of the driver."""
        if method == "series":
            answers = []
            for command, rest in args:
                begun = time.perf_counter()
                answer = self.call(command, rest)
                answers.append((time.perf_counter() - begun, answer))
            return answers
        if method == "pause":
            return None
        if method == "resume":
            return self.weights.publish(*args)
        if method == "run":  # a function of the benchmark's own
            return args[0](self, *args[1:])
        if method == "endpoint.call":
            name, op, payload = args
            if name not in self._endpoints:
                spec = Registry().transfer(name)
                self._endpoints[name] = Registry().load_class(spec, self._side)(self.weights, self._place)
            return getattr(self._endpoints[name], op)(**payload)
        found = getattr(self.weights, method.removeprefix("weights."))
        return found(*args) if callable(found) else found


def serve(pipe: Any, side: str, shapes: Shapes, place: RankSpec) -> None:
    """Be one rank until the pipe closes."""
    torch.set_num_threads(1)
    rank = Rank(side, shapes, place)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, rank.call(method, args)))
        except Exception as exc:  # noqa: BLE001 - told to the parent
            traceback.print_exc()
            pipe.send((False, f"{type(exc).__name__}: {exc}"))


class Process:
    """The driver's end of a rank in a process of its own."""

    def __init__(self, side: str, shapes: Shapes, place: RankSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, side, shapes, place), daemon=True)
        self._process.start()
        child.close()
        self._lock = threading.Lock()

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Run one command there."""
        with self._lock:
            self._pipe.send((method, args))
            if not self._pipe.poll(300):
                raise TimeoutError(method)
            good, answer = self._pipe.recv()
        if not good:
            raise WorkerError(answer)
        return answer

    def stop(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(30)


class Handle:
    """An engine as the driver sees it."""

    def __init__(self, name: str, ranks: Sequence[Any]) -> None:
        self.name, self.ranks = name, ranks
        self.version: str | None = None

    async def call(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """Run a command on all ranks at once."""
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(THREADS, rank.call, method, args) for rank in self.ranks))

    def stop(self) -> None:
        """End what runs in processes of its own."""
        for rank in self.ranks:
            if isinstance(rank, Process):
                rank.stop()


class World:
    """A trainer and one engine with a transfer between them. inline: both, of one rank each, in this process."""

    def __init__(
        self,
        kind: str,
        shapes: Shapes,
        *,
        trainer: int = 1,
        engine: int = 1,
        options: Mapping[str, Any] | None = None,
        device: str = "cpu",
    ) -> None:
        def ranks(side: str, world: int) -> list[Any]:
            places = [RankSpec(rank=rank, world=world, device=device) for rank in range(world)]
            return [(Rank if kind == "local" else Process)(side, shapes, place) for place in places]

        self.source, self.sink = Handle("actor", ranks("source", trainer)), Handle("rollout/0", ranks("sink", engine))
        registry = Registry()
        spec = registry.transfer(kind)
        given = {option.name: option.default for option in spec.options} | dict(options or {})
        self.transfer = registry.load_class(spec)(kind, given)
        self.transfer.source, self.transfer.sinks = self.source, [self.sink]
        self._count, self._bytes = 0, bytes_of(shapes)

    async def start(self) -> None:
        """Wait until all ranks are there, and give the engine its first version."""
        await self.source.call("weights.changes", deadline=300.0)
        await self.sink.call("resume", "1.0", deadline=300.0)

    async def push(self) -> tuple[float, Any]:
        """Run one update; returns its seconds and its report."""
        self._count += 1
        begun = time.perf_counter()
        report = await self.transfer.push(Update(version=WeightVersion(1, self._count)), deadline=300.0)
        return time.perf_counter() - begun, report

    async def measure(self, repeats: int) -> dict[str, Any]:
        """Start, take a first update, one that does not count, and `repeats` more; close, whatever happens."""
        try:
            await self.start()
            first, _ = await self.push()
            await self.push()
            taken = [await self.push() for _ in range(repeats)]
            checksum = await self.check()
        finally:
            await self.close()
        seconds = [one for one, _ in taken]
        return {
            "first_seconds": first,
            "seconds": seconds,
            "median_seconds": statistics.median(seconds),
            "gb_per_s": self._bytes / 1e9 / statistics.median(seconds),
            "phases_median_seconds": {
                name: statistics.median(report.seconds[name] for _, report in taken) for name in taken[0][1].seconds
            },
            "checksum_after_update": checksum,
        }

    async def check(self) -> str:
        """Change the weights, push them, compare both sides; returns the digest of the checksums."""
        await self.source.call("weights.train", deadline=300.0)
        await self.push()
        return await digest(self.transfer)

    async def close(self) -> None:
        """End the transfer and all ranks."""
        await self.transfer.close()
        for handle in (self.source, self.sink):
            handle.stop()


async def digest(transfer: Any) -> str:
    """Compare the checksum of every tensor on both sides after an update; returns a digest of the engine's."""
    source, [sink] = transfer.source, transfer.sinks
    comparison = Comparison.of(await transfer.plan(source, [sink], deadline=300.0), transfer._made[0])
    ours = await transfer._call(source, "checksums", wanted=comparison.source, deadline=300.0)
    theirs = await transfer._call(sink, "checksums", wanted=comparison.sinks[0], deadline=300.0)
    faults = list(comparison.faults(ours, [theirs]))
    if faults:
        raise PowertrainError(str(faults[:3]))
    return hashlib.sha256(json.dumps(theirs).encode()).hexdigest()


def like_model(size: int, *, hidden: int = 896) -> dict[str, tuple[int, ...]]:
    """Return shapes as a small dense model's, of `size` bytes in bfloat16 or a little less than a layer more."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (size // 8 // (2 * hidden) // 8 * 8, hidden), "norm": (hidden,)}
    layer = {"q": (hidden, hidden), "k": (128, hidden), "v": (128, hidden), "o": (hidden, hidden), "qb": (hidden,)}
    layer |= {"gate": (4864, hidden), "up": (4864, hidden), "down": (hidden, 4864), "n1": (hidden,), "n2": (hidden,)}
    number = 0
    while bytes_of(shapes) < size:
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    return shapes


def bytes_of(shapes: Shapes) -> int:
    """Return the bytes of all tensors in bfloat16."""
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def head(*scripts: str) -> dict[str, Any]:
    """Return what every result says of where it comes from. scripts: the files that made it."""
    folder = Path(__file__).parent
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": os.environ.get("COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "script_sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in scripts},
        "device": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")

"""A small world for transfers: engines of several ranks in this process, each rank on a thread of its own.

Weights are numbers that are all different. A trainer's rank holds a range of rows of each tensor, an engine's rank a
range of columns; scalars are held by all. What a rank can be made to do wrong is an attribute of its weights.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from powertrain.errors import DeadlineError, PowertrainError
from powertrain.interfaces.build import RankSpec
from powertrain.interfaces.weights import WeightSource
from powertrain.tensors.sink import BoxSink
from powertrain.weights import Box, Entry, Manifest, TransferPlan

SHAPES: Final[Mapping[str, tuple[int, ...]]] = {"embed": (11, 6), "cube": (3, 2, 5), "norm": (7,), "scalar": ()}


def value(name: str, step: int) -> Any:
    """Return the whole tensor after `step` steps; no two tensors or steps have a number in common."""
    import torch

    shape = torch.Size(SHAPES[name])
    first = 1 + 100 * list(SHAPES).index(name) + 1000 * step
    return torch.arange(first, first + max(1, shape.numel()), dtype=torch.float32).reshape(shape)


def share(shape: tuple[int, ...], axis: int, rank: int, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (start, size) of one rank's range along an axis; the last ranks may have less, or nothing."""
    if axis >= len(shape):
        return (0,) * len(shape), shape
    step = -(-shape[axis] // world)
    begin = min(rank * step, shape[axis])
    size = min(step, shape[axis] - begin)
    start = tuple(begin if i == axis else 0 for i in range(len(shape)))
    return start, (*shape[:axis], size, *shape[axis + 1 :])


def cut(tensor: Any, place: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Return the range of a whole tensor."""
    return tensor[tuple(slice(s, s + n) for s, n in zip(*place, strict=True))]


def manifest(place: RankSpec, axis: int, kind: str = "full") -> tuple[Manifest, dict[str, Any]]:
    """Return one rank's manifest, sharded along an axis, and its storages, which begin with unused elements."""
    import torch

    entries, storages = [], {}
    for name, shape in SHAPES.items():
        start, size = share(shape, axis, place.rank, place.world)
        count = torch.Size(size).numel()
        storages[name] = torch.full((count + 3,), -1.0)
        stride = tuple(torch.empty(size).stride())
        boxes = (Box(start, size, name, 3, stride),) if count else ()
        entries.append(Entry(name, "float32", shape, boxes, () if axis == 0 else ("bfloat16",)))
    return Manifest(place.rank, place.world, tuple(entries), kind=kind), storages


class Source(WeightSource):
    """A trainer's rank. broken: reading its tensors raises."""

    def __init__(self, place: RankSpec, kind: str = "full") -> None:
        self._manifest, self._storages = manifest(place, 0, kind)
        self.steps, self.broken = 0, False
        self._fill()

    def _fill(self) -> None:
        for entry in self._manifest:
            for box in entry.boxes:
                whole = cut(value(entry.name, self.steps), (box.start, box.size))
                self._storages[entry.name][3:].view(box.size).copy_(whole)

    def manifest(self) -> Manifest:
        """Return this rank's rows."""
        return self._manifest

    def tensors(self) -> Mapping[str, Any]:
        """Return its storages."""
        if self.broken:
            message = "this trainer broke"
            raise PowertrainError(message)
        return self._storages

    def changes(self) -> int:
        """Return the number of steps."""
        return self.steps

    def train(self) -> None:
        """Take a step: every number becomes another."""
        self.steps += 1
        self._fill()


class Sink(BoxSink):
    """An engine's rank.

    broken: its next `apply` raises after a first piece. stuck: `apply` waits for `go`. slow: seconds before `finish`.
    """

    def __init__(self, place: RankSpec) -> None:
        super().__init__(*manifest(place, 1))
        self.broken = self.stuck = False
        self.slow = 0.0
        self.go = threading.Event()
        self.adapters: dict[str, Mapping[str, Any]] = {}

    def apply(self, pieces: Any) -> None:
        """Copy pieces into place."""
        if self.stuck:
            self.go.wait(120)
        if self.broken:
            self.broken = False
            super().apply([next(iter(pieces))])
            message = "this rank broke"
            raise PowertrainError(message)
        super().apply(pieces)

    def finish(self) -> None:
        """Finish, when its time has come."""
        time.sleep(self.slow)
        super().finish()

    def add_adapter(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Keep an adapter."""
        self.adapters[name] = dict(tensors)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self.adapters.pop(name, None)

    def wrong(self, step: int) -> list[str]:
        """Return the tensors that are not as the trainer's were after `step` steps, or where something else was hit."""
        import torch

        found = []
        for entry in self.manifest():
            for box in entry.boxes:
                storage = self.tensors()[entry.name]
                right = cut(value(entry.name, step), (box.start, box.size))
                if not torch.equal(storage[3:].view(box.size), right) or not bool((storage[:3] == -1).all()):
                    found.append(entry.name)
        return found


def values(weights: Source | Sink) -> dict[str, Any]:
    """Return what a rank holds, without the unused elements, in float32."""
    return {name: tensor[3:].float() for name, tensor in weights.tensors().items()}


class Rank:
    """One rank's weights and endpoints, as a host keeps them, on a thread of its own."""

    def __init__(self, weights: Source | Sink, place: RankSpec, endpoints: Mapping[str, Any]) -> None:
        self.weights, self.place = weights, place
        self._classes, self._made = endpoints, dict[str, Any]()
        self.thread = ThreadPoolExecutor(1)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Run one command of the driver."""
        if method == "pause":
            return None
        if method == "resume":
            return self.weights.publish(*args)  # type: ignore[union-attr]
        if method == "endpoint.call":
            name, op, payload = args
            if name not in self._made:
                side = "sink" if isinstance(self.weights, Sink) else "source"
                self._made[name] = self._classes[side](self.weights, self.place)
            return getattr(self._made[name], op)(**payload)
        if method == "endpoint.close":
            return self._made.pop(args[0]).close() if args[0] in self._made else None
        if method == "series":
            return [(0.0, self.call(*command)) for command in args]
        found = getattr(self.weights, method.removeprefix("weights."))
        return found(*args) if callable(found) else found

    def close(self) -> None:
        """Close endpoints and end the thread."""
        for endpoint in self._made.values():
            endpoint.close()
        if isinstance(self.weights, Sink):
            self.weights.go.set()
        self.thread.shutdown(wait=False)


class Handle:
    """An `EngineHandle` over ranks. events: (engine, method, arguments) of every call as it begins, shared by all.

    A call that ended well is noted as (engine, "ended METHOD", arguments).
    """

    def __init__(self, name: str, ranks: list[Rank], events: list[tuple[str, str, tuple[Any, ...]]]) -> None:
        self.name, self.ranks, self.events = name, ranks, events
        self.version: str | None = None
        self.unfit = False

    async def call(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """Call all ranks at once; DeadlineError names the engine."""
        if method == "series":
            return await self._series(args, deadline)
        self.events.append((self.name, method, args))
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(rank.thread, rank.call, method, args) for rank in self.ranks]
        done, late = await asyncio.wait(calls, timeout=deadline)
        fault = next((call.exception() for call in done if call.exception()), None)
        if fault is not None:
            raise fault
        if late:
            message = f"{self.name} did not answer {method!r} within {deadline:g} s"
            raise DeadlineError(message, who=self.name, what=method, seconds=deadline)
        if method == "resume" and args[0] is not None:
            self.version = args[0]
        self.events.append((self.name, f"ended {method}", args))
        return [call.result() for call in calls]

    async def _series(self, commands: Sequence[Any], deadline: float) -> list[Any]:
        """Run commands one after another; an error says in `during` which one it came from."""
        answers: list[list[tuple[float, Any]]] = [[] for _ in self.ranks]
        for method, args in commands:
            begun = time.perf_counter()
            try:
                found = await self.call(method, *args, deadline=deadline)
            except PowertrainError as exc:
                exc.during = method
                raise
            for rank, answer in zip(answers, found, strict=True):
                rank.append((time.perf_counter() - begun, answer))
        return answers


class World:
    """A trainer and engines, all with version 1.0. endpoints: a transfer's classes by side."""

    def __init__(self, endpoints: Mapping[str, Any], *, trainer: int = 1, engines: tuple[int, ...] = (1,)) -> None:
        self.events: list[tuple[str, str, tuple[Any, ...]]] = []
        self._endpoints = endpoints
        self.source = Handle("actor", self.ranks(Source, trainer), self.events)
        self.sinks = [Handle(f"rollout/{n}", self.ranks(Sink, size), self.events) for n, size in enumerate(engines)]
        for sink in self.weights:
            sink.publish("1.0")

    def ranks(self, kind: Any, world: int, *more: Any) -> list[Rank]:
        """Return new ranks of a trainer or an engine."""
        places = [RankSpec(rank=rank, world=world) for rank in range(world)]
        return [Rank(kind(place, *more), place, self._endpoints) for place in places]

    @property
    def weights(self) -> list[Any]:
        """All engines' sinks."""
        return [rank.weights for handle in self.sinks for rank in handle.ranks]

    @property
    def versions(self) -> list[str]:
        """The version that each engine's rank has published."""
        return [sink.version for sink in self.weights]

    def train(self) -> None:
        """Let all ranks of the trainer take a step."""
        for rank in self.source.ranks:
            rank.weights.train()  # type: ignore[union-attr]

    def send_bfloat16(self) -> None:
        """Let the trainer, of one rank, hold its weights in bfloat16."""
        import dataclasses

        weights: Any = self.source.ranks[0].weights
        weights._storages = {name: tensor.bfloat16() for name, tensor in weights._storages.items()}
        entries = [dataclasses.replace(entry, dtype="bfloat16") for entry in weights._manifest]
        weights._manifest = dataclasses.replace(weights._manifest, entries=tuple(entries))

    def close(self) -> None:
        """End all ranks."""
        for handle in (self.source, *self.sinks):
            for rank in handle.ranks:
                rank.close()

    @staticmethod
    def elements(plan: TransferPlan) -> list[int]:
        """Return how many elements each rank of the engines reads by a plan."""
        from math import prod

        return [sum(prod(read.size) for read in reads) for engine in plan.reads for reads in engine]

"""A small world for transfer tests: engines of several ranks, each rank in this process or in one of its own."""

import asyncio
import dataclasses
import multiprocessing
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch

from powertrain.errors import PowertrainError, WorkerError
from powertrain.interfaces.build import RankSpec
from powertrain.tensors.disk import DiskSink, DiskSource
from powertrain.tensors.ipc import IpcSink, IpcSource
from powertrain.tensors.local import LocalSink, LocalSource
from powertrain.tensors.p2p import P2pSink, P2pSource
from powertrain.tensors.shm import ShmSink, ShmSource
from powertrain.tensors.sink import BoxSink, whole_manifest
from powertrain.weights import Box, Entry, Manifest

ENDPOINTS = {("local", "source"): LocalSource, ("local", "sink"): LocalSink}
ENDPOINTS |= {("shm", "source"): ShmSource, ("shm", "sink"): ShmSink}
ENDPOINTS |= {("disk", "source"): DiskSource, ("disk", "sink"): DiskSink}
ENDPOINTS |= {("p2p", "source"): P2pSource, ("p2p", "sink"): P2pSink}
ENDPOINTS |= {("ipc", "source"): IpcSource, ("ipc", "sink"): IpcSink}
THREADS = ThreadPoolExecutor(32)
"""For calls that must run at the same time; asyncio's own pool has few threads where there are few cores."""
SHAPES = {"embed": (10, 6), "norm": (6,), "scalar": ()}


def value(name, step):
    """Return the whole tensor `name` after `step` steps; no two tensors or steps have a number in common."""
    shape = SHAPES[name]
    first = 1 + 100 * list(SHAPES).index(name) + 1000 * step
    return torch.arange(first, first + max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)


class Source:
    """A training rank whose tensors are sharded along their first dimension, as FSDP does; scalars are replicated."""

    def __init__(self, rank, world):
        self.rank, self.world, self.step = rank, world, 0
        self.named = {name: self.shard(value(name, 0)).clone() for name in SHAPES}
        self.adapter = False

    def shard(self, tensor):
        if tensor.dim() == 0:
            return tensor
        rows = -(-tensor.shape[0] // self.world)
        return tensor[self.rank * rows : (self.rank + 1) * rows]

    def manifest(self):
        entries = []
        for name, shape in SHAPES.items():
            mine = self.named[name]
            rows = -(-shape[0] // self.world) if shape else 0
            start = (min(self.rank * rows, shape[0]), *[0] * (len(shape) - 1)) if shape else ()
            boxes = (Box(start, tuple(mine.shape), name, 0, mine.stride()),) if mine.numel() else ()
            entries.append(Entry(name, "float32", shape, boxes))
        return Manifest(self.rank, self.world, tuple(entries), kind="adapter" if self.adapter else "full")

    def tensors(self):
        return self.named

    def changes(self):
        return self.step

    def fence(self):
        return None

    def train(self):
        self.step += 1
        for name, tensor in self.named.items():
            tensor.copy_(self.shard(value(name, self.step)))

    def become_adapter(self):
        self.adapter = True


class Sink(BoxSink):
    """An inference rank that holds everything whole. slow: seconds before each copy; broken: fail at that apply."""

    def __init__(self, rank=0, world=1, slow=0.0):
        named = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        super().__init__(whole_manifest(named, rank=rank, world=world), named)
        self.slow, self.broken, self.adapters = slow, False, {}

    def apply(self, pieces):
        if self.broken:
            self.broken = False
            super().apply([next(iter(pieces))])
            message = "this rank broke"
            raise PowertrainError(message)
        if self.slow:
            import time

            time.sleep(self.slow)
        super().apply(pieces)

    def replay(self, prepared):
        """Copy what was worked out; broken: with a part of it in place."""
        if self.broken:
            self.broken, self._intact = False, False
            message = "this rank broke"
            raise PowertrainError(message)
        return super().replay(prepared)

    def add_adapter(self, name, config, tensors):
        self.adapters[name] = tensors

    def break_once(self):
        self.broken = True

    def values(self):
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def adapter_values(self, name):
        return dict(self.adapters[name])


class CudaSource(Source):
    """The same on a card. train_late: the new values are queued behind a kernel that takes long."""

    def __init__(self, rank, world):
        super().__init__(rank, world)
        self.named = {name: tensor.cuda() for name, tensor in self.named.items()}
        self.fenced, self.moves = True, 0

    def places(self):
        return self.moves

    def fence(self):
        if self.fenced:
            torch.cuda.synchronize()

    def set_fence(self, fenced):
        self.fenced = fenced

    def train_late(self):
        ahead = {name: self.shard(value(name, self.step + 1)).cuda() for name in SHAPES}
        self.step += 1
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        for name, tensor in self.named.items():
            tensor.copy_(ahead[name])

    def move(self):
        self.moves += 1
        self.named = {name: tensor.clone() for name, tensor in self.named.items()}

    def offload(self):
        self.moves += 1
        self.named = {name: tensor.cpu() for name, tensor in self.named.items()}

    def elsewhere(self):
        from powertrain.tensors import ipc

        ipc.card = lambda: "another card"


class CudaSink(Sink):
    """The same on a card."""

    def __init__(self, rank=0, world=1):
        named = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
        BoxSink.__init__(self, whole_manifest(named, rank=rank, world=world), named)
        self.slow, self.broken, self.adapters = 0.0, False, {}
        self.pending, self.restore = False, lambda: None
        self.look()

    def look(self):
        """Note, when a barrier for completion begins, whether the device has work left."""
        from powertrain.tensors.sidecar import Groups

        barrier = Groups.barrier

        def looking(groups, phase):
            if phase == "completion":
                self.pending = not torch.cuda.current_stream().query()
            return barrier(groups, phase)

        Groups.barrier = looking

    def values(self):
        return {name: tensor.cpu() for name, tensor in self.tensors().items()}

    def spoil_next(self):
        """Let the next update leave one wrong number."""
        abort, apply, replay = self.abort, self.apply, self.replay

        def spoiled(load):
            def wrong(*args):
                answer = load(*args)
                self.tensors()["embed"].view(-1)[0] += 1
                return answer

            return wrong

        def healed():
            if self.state != "steady":  # `begin` aborts too
                self.apply, self.replay, self.abort = apply, replay, abort
            abort()

        self.apply, self.replay, self.abort = spoiled(apply), spoiled(replay), healed

    def delay_copies(self, waited):
        """Put a long kernel before the copies, and do not wait for them in `apply`; waited: elsewhere neither."""
        apply, here, anywhere = self.apply, torch.cuda.synchronize, torch.accelerator.synchronize

        def late(pieces):
            pieces = [dataclasses.replace(piece, tensor=piece.tensor.cuda()) for piece in pieces]
            torch.cuda._sleep(2_000_000_000)
            torch.cuda.synchronize = lambda *args: None
            try:
                apply(pieces)
            finally:
                torch.cuda.synchronize = here

        def restore():
            self.apply, torch.accelerator.synchronize = apply, anywhere

        self.apply, self.restore = late, restore
        if not waited:
            torch.accelerator.synchronize = lambda *args: None

    def pending_at_completion(self):
        """Tell whether the last barrier for completion began with work left on the device; ends `delay_copies`."""
        self.restore()
        return self.pending

    def held(self):
        import psutil

        process = psutil.Process()
        return process.num_fds(), process.num_threads(), torch.cuda.mem_get_info()[0]


class Rank:
    """One rank's weights and endpoints, as a host keeps them."""

    def __init__(self, weights, place):
        self.weights, self.place, self.endpoints = weights, place, {}

    def call(self, method, args):
        if method == "pause":
            return None
        if method == "resume":
            return self.weights.publish(*args)
        if method == "endpoint.call":
            transfer, op, payload = args
            side = "sink" if isinstance(self.weights, Sink) else "source"
            if transfer not in self.endpoints:
                self.endpoints[transfer] = ENDPOINTS[transfer, side](self.weights, self.place)
            return getattr(self.endpoints[transfer], op)(**payload)
        if method == "series":
            return [(0.25, self.step(*command)) for command in args]
        found = getattr(self.weights, method.removeprefix("weights."))
        return found(*args) if callable(found) else found

    def step(self, method, args):
        try:
            return self.call(method, args)
        except PowertrainError as exc:
            exc.during = method
            raise


def serve(pipe, kind, rank, world):
    """Run a rank in a process of its own until the pipe closes."""
    torch.set_num_threads(1)
    kinds = {"source": Source, "sink": Sink, "cuda-source": CudaSource, "cuda-sink": CudaSink}
    place = RankSpec(rank=rank, world=world)
    here = cut_rank(kind, place) if kind in {"rows", "columns"} else Rank((kinds.get(kind) or kind)(rank, world), place)
    while True:
        try:
            number, method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((number, True, MOMENTS[method](*args) if method in MOMENTS else here.call(method, args)))
        except Exception as exc:  # noqa: BLE001 - told to the parent
            traceback.print_exc()
            pipe.send((number, False, str(exc)))


def cut_rank(kind, place):
    """Return a rank of the suite's world, which cuts a trainer's tensors in rows and an engine's in columns."""
    from powertrain.testing.tensors import world

    weights = {"rows": world.Source, "columns": world.Sink}[kind](place)
    return world.Rank(weights, place, {"source": P2pSource, "sink": P2pSink})


def arm(moment, sign):
    """Let this process send itself a signal when it next comes to a moment of an update over p2p."""
    import os

    from powertrain.tensors.sidecar import Groups

    name = "finish" if moment == "wire" else "barrier"
    original = getattr(Groups, name)

    def hit(self, *args):
        if moment in {"wire", *args}:
            setattr(Groups, name, original)
            os.kill(os.getpid(), sign)
        return original(self, *args)

    setattr(Groups, name, hit)


def fail_reads(code):
    """Let the system call that reads another process's memory answer with an errno here; 0: as it does.

    A negative one is the answer from the next weights on: tokens are read as ever.
    """
    from powertrain.tensors import direct, direct_copies

    plain = direct_copies.plain = getattr(direct_copies, "plain", direct_copies.read_memory)
    direct_copies.read_memory = (lambda *args: -abs(code)) if code else plain
    direct.read_memory = (lambda *args: -code) if code > 0 else plain


def spoil_token():
    """Let offers tell another token than lies there."""
    from powertrain.tensors import direct

    make = direct.Offers.make

    def other(*args):
        made = make(*args)
        return made if isinstance(made, str) else {**made, "token": bytes(16)}

    direct.Offers.make = other


MOMENTS = {"arm": arm, "fail_reads": fail_reads, "spoil_token": spoil_token}
"""What a rank's process is told, not its weights."""


class Process:
    """The parent's end of a rank in a process of its own."""

    def __init__(self, kind, rank, world, start="spawn"):
        context = multiprocessing.get_context(start)
        self.seconds, self.number = 60, 0
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child, kind, rank, world), daemon=True)
        self.process.start()
        child.close()
        self.lock = threading.Lock()

    def call(self, method, args):
        with self.lock:
            self.number += 1
            self.pipe.send((self.number, method, args))
            number = 0
            while number != self.number:  # answers to calls that were given up come late
                if not self.pipe.poll(self.seconds):
                    raise TimeoutError(method)
                number, good, answer = self.pipe.recv()
        if not good:
            raise WorkerError(answer)
        return answer

    def stop(self):
        self.pipe.close()
        self.process.join(10)


class Handle:
    """An `EngineHandle` over ranks."""

    def __init__(self, name, ranks):
        self.name, self.ranks = name, ranks
        self.version, self.called, self.errors = None, [], []

    async def call(self, method, *args, deadline):
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(
            *(loop.run_in_executor(THREADS, rank.call, method, args) for rank in self.ranks), return_exceptions=True
        )
        self.errors += [(method, answer) for answer in answers if isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        self.called.append(method)
        return answers

    async def ranks_call(self, rank, method):
        """Call one rank's weights alone."""
        return await asyncio.to_thread(self.ranks[rank].call, f"weights.{method}", ())


def inline_source(name="actor"):
    """Return a one-rank training engine in this process."""
    return Handle(name, [Rank(Source(0, 1), RankSpec())])


def inline_sink(name="rollout/0", **more):
    """Return a one-rank inference engine in this process, with its first version."""
    handle = Handle(name, [Rank(Sink(**more), RankSpec())])
    handle.ranks[0].weights.publish("1.0")
    return handle


def pair(transfer, source, sinks):
    """Set a transfer's two sides."""
    transfer.source, transfer.sinks = source, sinks
    return transfer

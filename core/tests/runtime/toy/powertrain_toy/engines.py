"""The toy engines. A training step does what its loss is called; a request does what its id says."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np

from powertrain.errors import ConfigError, StateError, UnfitError
from powertrain.interfaces.data import Completion, GenerateResult, Segment, StepResult
from powertrain.interfaces.infer import InferEngine
from powertrain.interfaces.train import TrainEngine
from powertrain.interfaces.weights import WeightSink, WeightSource
from powertrain.weights import Box, Entry, Manifest


def manifest(place):
    box = Box((0,), (4,), "w", 0, (1,))
    return Manifest(place.rank, place.world, (Entry("w", "float32", (4,), (box,)),))


class Common:
    def prepare(self, env):
        self.env = dict(env)
        self.missing = [name for name, value in env.items() if os.environ.get(name) != value]
        if env.get("TOY_FAIL") == "prepare":
            raise ConfigError("prepare fails on order")

    def _build(self, spec):
        self.spec = spec
        self.w = np.zeros(4, np.float32)
        print(f"toy rank {spec.place.rank} builds", flush=True)
        if spec.options["fail"] == "build":
            raise KeyError("build fails on order")
        if spec.options["fail"] == "hang":
            time.sleep(60)
        if spec.options["fail"] == "die":
            print("last words before the end", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def health(self):
        place = self.spec.place
        return {
            "state": self.state,
            "pid": os.getpid(),
            "asked": self.env,
            "missing": self.missing,
            "place": [place.rank, place.world, place.rendezvous, place.instance],
            "rank_env": {k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "MASTER_PORT") if k in os.environ},
            "hash_seed": os.environ.get("PYTHONHASHSEED"),
            "python": __import__("sys").executable,
            "w": float(self.w[0]),
            **self.facts,
        }


class ToyTrain(Common, TrainEngine):
    def __init__(self):
        self.facts = {"steps": [], "closed": 0}

    def prepare(self, env):
        super().prepare(env)

    def build(self, spec):
        self._build(spec)

    def train_step(self, batch, loss):
        rank = self.spec.place.rank
        order, config = loss.name, loss.config
        concerned = rank == config.get("rank", rank)
        if order == "reset":
            self.facts["steps"], self.w[:] = [], 0
            return StepResult(loss=0.0, grad_norm=0.0, lr=0.0, tokens=0, step=0)
        self.facts["steps"].append(order)
        if order == "refuse":
            raise ConfigError(f"rank {rank} refuses 1 of 2")
        if order == "break" and concerned:
            {}["missing key"]
        if order == "break":
            time.sleep(config.get("stuck", 0))
        if order == "sleep" and concerned:
            time.sleep(config["seconds"])
        if order == "die" and concerned:
            print("last words before the end", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "die":
            time.sleep(60)
        if order == "scribble":
            batch.tokens[:] = -1
        self.w += 1
        self.facts["thread"] = __import__("threading").current_thread().name
        return StepResult(
            loss=float("nan"), grad_norm=float("inf"), lr=0.0, tokens=len(batch.tokens), step=int(self.w[0])
        )

    def logprobs(self, batch, temperature=1.0):
        self.last = batch.tokens.astype(np.float32) * temperature
        return self.last

    def weights(self):
        return ToySource(self)

    def save(self, folder):
        Path(folder, f"rank{self.spec.place.rank}").write_text(str(self.w[0]))

    def load(self, folder):
        self.w[:] = float(Path(folder, f"rank{self.spec.place.rank}").read_text())

    def export(self, folder):
        raise NotImplementedError("no export")

    def offload(self):
        return object()  # not a thing that may cross a border

    def onload(self):
        pass

    def close(self):
        self.facts["closed"] += 1
        print("toy engine closes", flush=True)


class ToySource(WeightSource):
    def __init__(self, engine):
        self.engine = engine

    def manifest(self):
        return manifest(self.engine.spec.place)

    def tensors(self):
        return {"w": self.engine.w}

    def changes(self):
        return int(self.engine.w[0])


class ToyInfer(Common, InferEngine):
    def __init__(self):
        self.facts = {"batches": [], "cancelled": [], "version": "0.0"}
        self.sink = ToySink(self)
        self.going = None

    def prepare(self, env):
        super().prepare(env)

    async def build(self, spec):
        self.going = asyncio.Event()
        self.going.set()
        self._build(spec)

    async def generate(self, request):
        await self.going.wait()
        if request.request_id == "reset":
            self.facts |= {"batches": [], "cancelled": [], "aborted": []}
        if self.sink.state == "unfit":
            raise UnfitError("the weights are neither old nor new")
        if request.request_id.startswith("sleep"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.facts["cancelled"].append(request.request_id)
                raise
        if request.request_id.startswith("refuse"):
            raise ConfigError(f"{request.request_id} has 9 tokens, the most is 8")
        if request.request_id.startswith("die"):
            print("last words before the end", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = request.prompt[::-1].copy()
        logprobs = np.full(len(tokens), -np.inf, np.float32)
        segment = Segment(0, len(tokens), self.facts["version"])
        done = Completion(tokens=tokens, logprobs=logprobs, logprobs_t1=logprobs, finish="length", segments=(segment,))
        return GenerateResult(request_id=f"{request.request_id}@{self.spec.place.instance}", completions=(done,))

    async def generate_batch(self, requests):
        self.facts["batches"].append([request.request_id for request in requests])
        return await super().generate_batch(requests)

    async def abort(self, request_ids):
        self.facts["aborted"] = list(request_ids)

    async def pause(self, mode="wait"):
        self.going.clear()

    async def resume(self, version=None):
        self.sink.publish(version)
        self.going.set()

    def weights(self):
        return self.sink

    async def load_adapter(self, name, folder):
        pass

    async def unload_adapter(self, name):
        pass

    async def release_memory(self):
        pass

    async def resume_memory(self):
        pass

    async def close(self):
        print("toy engine closes", flush=True)


class ToySink(WeightSink):
    def __init__(self, engine):
        self.engine = engine
        self._state = "steady"

    @property
    def state(self):
        return self._state

    def manifest(self):
        return manifest(self.engine.spec.place)

    def tensors(self):
        return {"w": self.engine.w}

    @property
    def version(self):
        return self.engine.facts["version"]

    def begin(self, update):
        if self._state == "updating":
            raise StateError("an update is open")
        self._state, self.written = "updating", False

    def apply(self, pieces):
        for piece in pieces:
            self.written = True
            self.engine.w[:] = piece.tensor

    def finish(self):
        self._state = "finished"

    def publish(self, version):
        if self._state == "unfit":
            raise UnfitError("unfit")
        self._state = "steady"
        if version is not None:
            self.engine.facts["version"] = version

    def abort(self):
        if self._state != "steady":
            self._state = "unfit" if self.written else "steady"

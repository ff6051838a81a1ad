"""A transfer between engines of one rank in one process: what the plan reads is picked up there and let go here."""

import torch

from powertrain import Transfer
from powertrain.interfaces.transfer import Endpoint
from powertrain.interfaces.weights import Piece
from powertrain.weights import Box, plan_transfer


class PigeonDriver(Transfer):
    async def plan(self, source, sinks, *, deadline):
        self.manifests = await source.call("weights.manifest", deadline=deadline)
        wanted = [await sink.call("weights.manifest", deadline=deadline) for sink in sinks]
        return plan_transfer(self.manifests, wanted)

    async def move(self, plan, update, meter, *, deadline):
        for sink, (reads,) in zip(self.sinks, plan.reads, strict=True):
            with meter.phase("gather"):
                (pieces,) = await self.ask(self.source, "pick_up", {"reads": reads}, deadline)
            with meter.phase("load"):
                await self.ask(sink, "let_go", {"pieces": pieces}, deadline)
        meter.bytes += plan.bytes

    async def ask(self, engine, operation, payload, deadline):
        return await engine.call("endpoint.call", self.name, operation, payload, deadline=deadline)

    async def close(self):
        for engine in (self.source, *self.sinks):
            await engine.call("endpoint.close", self.name, deadline=10.0)


class PigeonEnd(Endpoint):
    def __init__(self, weights, place):
        self.weights = weights

    def close(self):
        pass


class PigeonSource(PigeonEnd):
    def pick_up(self, reads):
        self.weights.fence()
        return [Piece(read.name, read.start, self.view(read)) for read in reads]

    def view(self, read):
        block = read.block
        held = Box(block.start, block.size, block.storage, block.place, block.stride)
        storage = self.weights.tensors()[block.storage]
        return torch.as_strided(storage, read.size, block.stride, storage.storage_offset() + held.place(read.start))


class PigeonSink(PigeonEnd):
    def let_go(self, pieces):
        self.weights.apply(pieces)

"""A transfer that sends whole tensors through endpoint calls, as only a toy may."""

from __future__ import annotations

from powertrain.interfaces.transfer import Endpoint, Transfer
from powertrain.interfaces.weights import Piece


class ToyCopy(Transfer):
    async def plan(self, source, sinks, *, deadline):
        self.manifests = await source.call("weights.manifest", deadline=deadline)

    async def move(self, plan, update, meter, *, deadline):
        with meter.phase("gather"):
            ranks = await self.source.call("endpoint.call", self.name, "read", {}, deadline=deadline)
        self.read = ranks[0]["w"]
        with meter.phase("load"):
            for sink in self.sinks:
                await sink.call("endpoint.call", self.name, "write", {"found": ranks[0]}, deadline=deadline)
                if self.options["fail"] == "move":
                    raise RuntimeError("the wire was cut")
        meter.bytes += ranks[0]["w"].nbytes

    async def close(self):
        for handle in (self.source, *self.sinks):
            await handle.call("endpoint.close", self.name, deadline=5.0)


class ToyCopySource(Endpoint):
    def __init__(self, weights, place):
        self.weights = weights

    def read(self):
        return dict(self.weights.tensors())

    def close(self):
        print("toy source closes", flush=True)


class ToyCopySink(Endpoint):
    def __init__(self, weights, place):
        self.weights = weights

    def write(self, found):
        self.weights.apply([Piece(name, (0,), value) for name, value in found.items()])

    def close(self):
        print("toy sink closes", flush=True)

"""An engine without a model: it answers with the prompt, as many times over as its own axis is long."""

import numpy

import powertrain as pt


class Echo(pt.InferEngine):
    def prepare(self, env):
        self.version = "0.0"

    async def build(self, spec):
        self.echoes = spec.axes["k"]

    async def generate(self, request: pt.GenerateRequest) -> pt.GenerateResult:
        tokens = numpy.tile(request.prompt, self.echoes)[: request.sampling.max_tokens]
        zeros = numpy.zeros(len(tokens), "float32")
        whole = (pt.Segment(0, len(tokens), self.version),)  # `resume(version)` gives it
        one = pt.Completion(tokens=tokens, logprobs=zeros, logprobs_t1=zeros, finish="stop", segments=whole)
        return pt.GenerateResult(request_id=request.request_id, completions=(one,) * request.sampling.n)

    async def resume(self, version=None):
        self.version = version or self.version

    def weights(self):
        message = "echo has no weights to update"
        raise NotImplementedError(message)

    async def abort(self, request_ids):
        pass

    async def pause(self, mode="wait"):
        pass

    async def load_adapter(self, name, folder):
        pass

    async def unload_adapter(self, name):
        pass

    async def release_memory(self):
        pass

    async def resume_memory(self):
        pass

    async def close(self):
        pass

"""What the tests on a real vLLM are written in: engines, requests that are surely in flight, and what is right."""

import copy
import itertools
import time

import numpy as np

from powertrain import EngineSpec, GenerateRequest, SamplingParams
from powertrain.interfaces.weights import Piece
from powertrain.testing.calls import Bounded
from powertrain.testing.tensors.models import checkpoint, plain_model
from powertrain.testing.tensors.reference import replay
from powertrain.testing.tensors.weights import LORA_CONFIG, pieces
from powertrain.weights import Update, WeightVersion
from powertrain_vllm.engine import VllmEngine

SECONDS = 120.0
CLOSE = 1e-4
"""Log-probs of the same weights, in float32, are no further apart."""
LONG = 400
_count = itertools.count()


def opened(model, *, version="1.1", options=None, **spec):
    """Return a running engine whose methods block, each with a deadline."""
    engine = Bounded(VllmEngine(), SECONDS)
    engine.prepare({})
    try:
        engine.build(EngineSpec(backend="vllm", role="infer", model=model, options=options or {}, **spec))
        engine.resume(version)
    except BaseException:
        engine.release()
        raise
    return engine


def ask(prompt, *, adapter=None, name="", **sampling):
    """Return a request that is sampled at temperature 1, under a name of its own."""
    params = SamplingParams(**{"max_tokens": 16, "temperature": 1.0, **sampling})
    name = name or f"request-{next(_count)}"
    return GenerateRequest(request_id=name, prompt=np.asarray(prompt), sampling=params, adapter=adapter)


def start(engine, request, tokens=4):
    """Begin a request and return its future once every sample has some tokens, and none has all."""
    future = engine.start("generate", request)
    until(lambda: min(drawn(engine, request) or [0]) >= tokens or future.done())
    assert not future.done(), "the request was not in flight any more"
    return future


def drawn(engine, request):
    """Return how many tokens each sample of a request in flight has."""
    item = engine.target._items.get(request.request_id)
    return [len(row.tokens) for row in item.rows] if item else []


def until(true, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.002)


def answer(engine, future):
    return engine.wait(future, "generate").completions


def send(engine, counter, tensors, *, adapter="", mode="keep", publish=True):
    """Publish weights (HF name -> tensor), or an adapter, as the driver does: pause, update, resume."""
    update = Update(version=WeightVersion(1, counter))
    if adapter:
        update = Update(
            version=WeightVersion(1, counter), kind="adapter", adapter=adapter, adapter_config=dict(LORA_CONFIG)
        )
    engine.pause(mode)
    sink = engine.weights()
    sink.begin(update)
    whole = [Piece(key, (0, 0), t) for key, t in tensors.items()] if adapter else pieces(sink.manifest(), tensors)
    sink.apply(whole)
    sink.finish()
    if publish:
        engine.resume(f"1.{counter}")


def weights(folder):
    return checkpoint(folder)


def with_adapter(model, folder):
    """Return the float32 model of transformers with an adapter by PEFT, read from its folder."""
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(plain_model(model)), folder).eval()


def gap(model, request, completion, segment=None):
    """Return the greatest difference of log-probs from the model's, of one segment or of all tokens."""
    right = replay(model, request.prompt.tolist(), completion.tokens.tolist())
    part = slice(segment.start, segment.end) if segment else slice(None)
    assert len(completion.tokens[part])
    return float(np.abs(right - completion.logprobs_t1)[part].max())

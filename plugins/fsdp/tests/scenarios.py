"""What each rank of a multi-rank test does; run by path in a child process, the result goes into a file."""

import dataclasses
import threading
import traceback
from pathlib import Path

import torch

from powertrain.errors import PowertrainError
from powertrain.interfaces.build import RankSpec
from powertrain.interfaces.data import LossSpec
from powertrain_fsdp.engine import FsdpEngine

LOSS = LossSpec(name="powertrain_fsdp_test_losses:policy", entropy=True)


def opened(spec, rank, world, folder, tag="a"):
    place = RankSpec(
        rank=rank, world=world, local_rank=rank, rendezvous=f"file://{folder}/meet-{tag}" if world > 1 else ""
    )
    engine = FsdpEngine()
    engine.prepare({})
    engine.build(dataclasses.replace(spec, place=place))
    return engine


def whole_weights(engine):
    from torch.distributed.tensor import DTensor

    named = engine._built.parameters
    return {
        name: (p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()).clone() for name, p in named.items()
    }


def pieces(engine):
    source = engine.weights()
    return source.manifest(), {name: tensor.clone() for name, tensor in source.tensors().items()}


def plain(result):
    return dataclasses.replace(result, seconds={})


def train(rank, world, folder, spec, batches, loss=LOSS):
    with opened(spec, rank, world, folder) as engine:
        before = engine.logprobs(batches[0], 0.8)
        results = [plain(engine.train_step(batch, loss)) for batch in batches]
        return {
            "before": before,
            "results": results,
            "after": engine.logprobs(batches[0], 0.8),
            "weights": whole_weights(engine),
            "pieces": pieces(engine),
            "changes": engine.weights().changes(),
        }


def faults(rank, world, folder, spec, batches, losses):
    with opened(spec, rank, world, folder) as engine:
        start = whole_weights(engine)
        told = []
        for loss in losses:
            try:
                engine.train_step(batches[0], loss)
            except PowertrainError as exc:
                told.append((type(exc).__name__, str(exc)))
        same = all(torch.equal(a, b) for a, b in zip(start.values(), whole_weights(engine).values(), strict=True))
        return {"told": told, "same": same, "state": engine.state, "next": plain(engine.train_step(batches[0], LOSS))}


def resume(rank, world, folder, spec, batches, checkpoint, first=1):
    """Train `first` steps, save, train on; then load into a new engine and train on again."""
    with opened(spec, rank, world, folder) as engine:
        for batch in batches[:first]:
            engine.train_step(batch, LOSS)
        engine.save(checkpoint)
        draw = float(torch.rand(1))
        results = [plain(engine.train_step(batch, LOSS)) for batch in batches[first:]]
        unbroken = whole_weights(engine)
    with opened(spec, rank, world, folder, "b") as engine:
        engine.load(checkpoint)
        again_draw = float(torch.rand(1))
        again = [plain(engine.train_step(batch, LOSS)) for batch in batches[first:]]
        return {
            "draws": (draw, again_draw),
            "results": (results, again),
            "weights": (unbroken, whole_weights(engine)),
            "changes": engine.weights().changes(),
        }


def go_on(rank, world, folder, spec, batches, checkpoint):
    with opened(spec, rank, world, folder) as engine:
        engine.load(checkpoint)
        results = [plain(engine.train_step(batch, LOSS)) for batch in batches]
        return {"results": results, "weights": whole_weights(engine)}


def load_fault(rank, world, folder, spec, checkpoint):
    with opened(spec, rank, world, folder) as engine:
        try:
            engine.load(checkpoint)
        except PowertrainError as exc:
            return type(exc).__name__, str(exc), engine.state
        return None


def export(rank, world, folder, spec, target):
    with opened(spec, rank, world, folder) as engine:
        engine.export(target)
        return whole_weights(engine)


def threads(rank, world, folder, spec, batches):
    before = set(threading.enumerate())
    with opened(spec, rank, world, folder) as engine:
        engine.train_step(batches[0], LOSS)
    engine.close()
    left = sorted(thread.name for thread in set(threading.enumerate()) - before)
    return left, torch.distributed.is_initialized(), engine.state


if "SCENARIO" in globals():
    import sys

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent / "modules"))
    folder = Path(FOLDER)  # noqa: F821 - given by the caller
    try:
        answer = globals()[SCENARIO](RANK, WORLD, FOLDER, **ARGUMENTS)  # noqa: F821
        torch.save(answer, folder / f"result-{RANK}.pt")  # noqa: F821
    except BaseException:
        (folder / f"error-{RANK}").write_text(traceback.format_exc())  # noqa: F821
        raise

"""How the suites of engines build the plugin's engine, and what they feed it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from powertrain.interfaces.build import EngineSpec, LoraSpec, OptimSpec
from powertrain.interfaces.data import LossSpec, TrainBatch
from powertrain.registry import Registry
from powertrain.testing.calls import Bounded, Shelf
from powertrain.testing.suite import Suite

if TYPE_CHECKING:
    from powertrain.interfaces.infer import InferEngine
    from powertrain.interfaces.train import TrainEngine
    from powertrain.weights import Entry

FIRST: Final = "1.1"
"""Version with which an inference engine begins."""
OPTIM: Final = OptimSpec(lr=1e-2, eps=1e-5, weight_decay=0.1, clip=0.5)
LOSS: Final = LossSpec(name="powertrain.tensors.loss:cross_entropy")
LORA: Final = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


class EngineSuite(Suite):
    """Base of the suites of engines. backend: the plugin's name. options: backend options for every test."""

    KIND = "backend"
    NAMED_BY = "backend"
    OPEN = Suite.OPEN | {"backend", "options", "make"}
    backend: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def make(self) -> TrainEngine | InferEngine:
        """Return a new engine in state `new`; override it for one that is not made by calling its class."""
        engine: TrainEngine | InferEngine = Registry().load_class(self.spec())()
        return engine

    def engine_spec(self, **changes: Any) -> EngineSpec:
        """Return what a test's engine is built from: a tiny model with float32 weights, unless changed."""
        from powertrain.options import resolve
        from powertrain.testing.tensors.models import tiny_model

        spec = self.spec()
        given = {**self.options, **changes.pop("options", {})}
        options = resolve(spec.options, given, where=f"backend {self.backend}")
        fields = {"model": tiny_model(), "timeout": self.patience, "options": options, **changes}
        return EngineSpec(backend=self.backend, role=spec.role, **fields)

    @pytest.fixture(scope="class")
    @classmethod
    def _shelf(cls) -> Iterator[Shelf]:
        from powertrain.testing.tensors.models import plain_model, tiny_model

        plain_model(tiny_model())
        shelf = Shelf()
        # Engines collect garbage when they close. What libraries hold for good need not be looked at each time.
        gc.freeze()
        yield shelf
        shelf.clear()
        gc.unfreeze()

    @pytest.fixture
    def engine(self, _shelf: Shelf) -> Bounded:
        """An engine as new, ready; shared with the tests before it as long as they changed nothing."""
        return _shelf.get(self.opened)

    @pytest.fixture
    def build(self) -> Iterator[Callable[..., Bounded]]:
        """A function that builds an engine of the test's own, with changes to its spec; closed at the end."""
        made: list[Bounded] = []

        def build(**changes: Any) -> Bounded:
            made.append(self.opened(**changes))
            return made[-1]

        yield build
        for engine in made:
            engine.release()

    @pytest.fixture
    def unbuilt(self) -> Iterator[Bounded]:
        """An engine in state `new`."""
        engine = Bounded(self.make(), self.patience)
        yield engine
        engine.release()

    def opened(self, **changes: Any) -> Bounded:
        """Return an engine that is ready; an inference engine with its first version."""
        engine = Bounded(self.make(), self.patience)
        engine.prepare({})
        engine.build(self.engine_spec(**changes))
        return engine


def sample(seed: int = 0, **more: Any) -> TrainBatch:
    """Return a batch of 6 sequences of 3 prompts with uneven lengths and weights, and fields for the `policy` loss."""
    import numpy as np

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 60, n).tolist() for n in (5, 1, 9)]
    groups = [0, 0, 1, 2, 2, 0]
    completions = [rng.integers(1, 60, n).tolist() for n in (4, 7, 1, 3, 6, 2)]
    batch = TrainBatch.from_sequences(
        [prompts[group] for group in groups],
        completions,
        token_fields={"advantages": [rng.normal(size=len(c)).tolist() for c in completions]},
        sample_fields={"scale": rng.uniform(0.5, 1.5, len(groups)).tolist()},
        **{"groups": groups, **more},
    )
    batch.weights[:] *= rng.uniform(0.5, 1.5, len(batch.weights)).astype(np.float32)
    return batch


def pairs(batch: TrainBatch) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, completion) of each sequence."""
    cuts = zip(batch.starts[:-1], batch.prompt_lens, batch.starts[1:], strict=True)
    return [(batch.tokens[b : b + p].tolist(), batch.tokens[b + p : e].tolist()) for b, p, e in cuts]


def apart(one: Any, other: Any) -> float:
    """Return the greatest difference of two arrays of one shape; infinite where one of them is not a number."""
    import numpy as np

    left, right = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert left.shape == right.shape, (left.shape, right.shape)
    found = np.abs(left - right).max(initial=0.0)
    return float(found) if np.isfinite(found) else float("inf")


def one_by_one(pairs: Sequence[tuple[list[int], list[int]]], **more: Any) -> TrainBatch:
    """Return a plain batch of (prompt, completion) pairs."""
    return TrainBatch.from_sequences([p for p, _ in pairs], [c for _, c in pairs], **more)


def times_held(entry: Entry) -> list[int]:
    """Return for each element of a tensor how many of the entry's boxes hold it."""
    import numpy as np

    count = np.zeros(entry.shape, np.int64)
    for box in entry.boxes:
        count[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))] += 1
    return [int(number) for number in count.flat]

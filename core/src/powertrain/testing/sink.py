"""The suite of an engine's `WeightSink`: its states, what is written where, and what is left after a fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from powertrain.errors import ConfigError, PowertrainError, StateError, UnfitError
from powertrain.interfaces.data import Completion, GenerateRequest, SamplingParams
from powertrain.testing.calls import Bounded
from powertrain.testing.engines import FIRST, EngineSuite, apart, times_held
from powertrain.testing.suite import needs
from powertrain.weights import Update, WeightVersion

_count = itertools.count()


def ask(prompt: Sequence[int], *, name: str = "", adapter: str | None = None, **sampling: Any) -> GenerateRequest:
    """Return a greedy request for 12 tokens, unless told otherwise, under a name of its own."""
    import numpy as np

    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **sampling})
    name = name or f"request-{next(_count)}"
    return GenerateRequest(request_id=name, prompt=np.asarray(prompt), sampling=params, adapter=adapter)


def update(counter: int, **more: Any) -> Update:
    """Return the update to version 1.`counter`."""
    return Update(version=WeightVersion(1, counter), **more)


class WeightSinkSuite(EngineSuite):
    """Tests of `InferEngine.weights()`; a stub of `InferEngineSuite` has them too. tolerance: of float32 log-probs."""

    OPEN = EngineSuite.OPEN | {"tolerance"}
    tolerance: ClassVar[float] = 1e-3

    def opened(self, **changes: Any) -> Bounded:
        """Return an engine that answers under its first version."""
        engine = super().opened(**changes)
        engine.resume(FIRST)
        engine.clean = True
        return engine

    @pytest.fixture
    def sink(self, engine: Bounded) -> Bounded:
        """The sink of an engine that is paused."""
        engine.pause()
        sink: Bounded = engine.weights()
        return sink

    @pytest.fixture
    def old(self) -> str:
        """The folder of the model that engines begin with."""
        from powertrain.testing.tensors.models import tiny_model

        return tiny_model()

    @pytest.fixture
    def new(self) -> str:
        """The folder of a model with other weights."""
        from powertrain.testing.tensors.models import tiny_model

        return tiny_model(1)

    def test_manifest_wants_the_checkpoints_tensors(self, engine: Bounded, old: str) -> None:
        """The sink wants a name that no trainer sends, or leaves out one that it needs. A tied head is an alias."""
        from powertrain.testing.tensors.models import checkpoint

        manifest = engine.weights().manifest()
        wanted = {entry.name for entry in manifest if not entry.frozen}
        assert wanted == set(checkpoint(old))
        assert dict(manifest.tied) == {"lm_head.weight": "model.embed_tokens.weight"}

    def test_manifest_has_the_checkpoints_shapes(self, engine: Bounded, old: str) -> None:
        """Shapes are those of the whole HF tensor, whatever the engine has fused or padded."""
        from powertrain.testing.tensors.models import checkpoint

        told = {entry.name: tuple(entry.shape) for entry in engine.weights().manifest() if not entry.frozen}
        assert told == {name: tuple(tensor.shape) for name, tensor in checkpoint(old).items()}

    def test_manifest_moves_nothing(self, engine: Bounded, old: str) -> None:
        """Making a manifest copied weights; it is asked for before every update."""
        from powertrain.testing.tensors.watch import made_by
        from powertrain.testing.tensors.weights import size_of

        assert engine.run(made_by, engine.weights().target.manifest) < size_of(old) / 100

    def test_boxes_cover_each_element_once(self, engine: Bounded) -> None:
        """With one rank, boxes that overlap or leave a gap make a plan that writes twice or not at all."""
        for entry in engine.weights().manifest():
            assert set(times_held(entry)) == {1}, entry.name

    def test_boxes_point_at_the_values(self, engine: Bounded, old: str) -> None:
        """A transfer that writes through the boxes directly would write elsewhere."""
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import furthest, read

        sink = engine.weights()
        assert furthest(read(sink.manifest(), sink.tensors()), checkpoint(old)) == 0

    def test_manifest_stays_over_an_update(self, sink: Bounded, new: str) -> None:
        """A plan is kept as long as manifests are equal; an update must not change what the sink wants."""
        before = sink.manifest()
        self._write(sink, update(2), new)
        assert sink.manifest() == before

    def test_states_follow_an_update(self, engine: Bounded, sink: Bounded, new: str) -> None:
        """From steady over updating and finished to steady: the driver decides by these words who must be healed."""
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import pieces

        seen = [sink.state]
        sink.begin(update(2))
        seen.append(sink.state)
        sink.apply(pieces(sink.manifest(), checkpoint(new)))
        sink.finish()
        seen.append(sink.state)
        engine.resume("1.2")
        assert [*seen, sink.state] == ["steady", "updating", "finished", "steady"]

    def test_second_update_cannot_begin_within_one(self, sink: Bounded) -> None:
        """Two updates mixed are neither; the first must be aborted by whoever gives it up."""
        sink.begin(update(2))
        with pytest.raises(StateError):
            sink.begin(update(3))

    def test_finish_and_apply_need_an_open_update(self, sink: Bounded, new: str) -> None:
        """A message that comes late, after an abort, must not write into weights that are served."""
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import pieces

        with pytest.raises(StateError):
            sink.apply(pieces(sink.manifest(), checkpoint(new)))
        with pytest.raises(StateError):
            sink.finish()

    def test_every_element_lands_where_it_belongs(self, sink: Bounded) -> None:
        """Whole tensors of numbers that are all different are read back: a name, a fuse or a transpose is wrong."""
        from powertrain.testing.tensors.weights import furthest, iota, read, write

        values = iota(sink.manifest())
        sink.run(write, sink.target, update(2), values)
        assert furthest(read(sink.manifest(), sink.tensors()), values) == 0

    def test_slices_land_where_they_belong(self, sink: Bounded) -> None:
        """Pieces of tensors, out of order, in memory that is used again at once: a start is ignored, or a view kept."""
        from powertrain.testing.tensors.weights import furthest, iota, pieces, read, sliced

        values = iota(sink.manifest())
        sink.begin(update(2))
        for piece in sliced(pieces(sink.manifest(), values)):
            sink.apply([piece])
        sink.finish()
        assert furthest(read(sink.manifest(), sink.tensors()), values) == 0

    def test_unknown_tensor_is_refused(self, sink: Bounded, new: str) -> None:
        """A name that fits nowhere was dropped in silence: the engine would answer with part of the old weights."""
        self._refuses(sink, new, lambda piece: ("model.layers.9.no_such.weight", piece.start, piece.tensor))

    def test_range_outside_the_tensor_is_refused(self, sink: Bounded, new: str) -> None:
        """A slice that does not lie in the tensor was clipped or written elsewhere."""
        self._refuses(sink, new, lambda piece: (piece.name, (1, *piece.start[1:]), piece.tensor))

    def test_gap_is_found_when_the_update_finishes(self, sink: Bounded, new: str) -> None:
        """An element that was never written must not be published; `finish` proves that all were."""
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import pieces

        sink.begin(update(2))
        sink.apply(pieces(sink.manifest(), checkpoint(new))[:-1])
        with pytest.raises(PowertrainError):
            sink.finish()

    def test_aborted_before_the_first_write_keeps_the_old_weights(
        self, engine: Bounded, sink: Bounded, old: str
    ) -> None:
        """Nothing was touched, so nothing need be healed: the engine goes on under its old version."""
        sink.begin(update(2))
        sink.abort()
        assert sink.state == "steady"
        engine.resume(None)
        assert self._answer(engine, [4, 8, 15], old).segments[0].version == FIRST

    def test_half_an_update_is_never_kept(self, engine: Bounded, sink: Bounded) -> None:
        """After a write and an abort the weights are no version at all; the engine must say so until it is healed."""
        self._half(sink)
        assert sink.state == "unfit"
        with pytest.raises(UnfitError):
            engine.resume(None)
        with pytest.raises(UnfitError):
            engine.generate(ask([4, 8, 16]))

    def test_finished_update_that_is_aborted_is_unfit(self, engine: Bounded, sink: Bounded, new: str) -> None:
        """Another engine failed: this one's weights are whole, but their version is never published."""
        self._write(sink, update(2), new)
        sink.abort()
        assert sink.state == "unfit"
        with pytest.raises(UnfitError):
            engine.resume(None)

    def test_next_update_heals(self, engine: Bounded, sink: Bounded, new: str) -> None:
        """Something of the broken update is in the way of the next one, which must be able to begin at once."""
        self._half(sink)
        self._write(sink, update(3), new)
        engine.resume("1.3")
        assert self._answer(engine, [4, 8, 17], new).segments[0].version == "1.3"

    def test_abort_of_a_steady_sink_does_nothing(self, engine: Bounded, sink: Bounded, old: str) -> None:
        """The driver aborts every sink after a fault, those included that had not begun."""
        sink.abort()
        sink.abort()
        engine.resume(None)
        assert self._answer(engine, [4, 8, 18], old).segments[0].version == FIRST

    def test_another_version_than_the_finished_one_is_refused(self, engine: Bounded, sink: Bounded, new: str) -> None:
        """A label that belongs to other weights makes every log-prob that it stands on a wrong one."""
        self._write(sink, update(2), new)
        with pytest.raises(StateError, match=r"1\.3"):
            engine.resume("1.3")

    def test_version_without_an_update_is_refused(self, engine: Bounded) -> None:
        """A new label on old weights. `None` is how an engine goes on as it is."""
        with pytest.raises(StateError, match=r"1\.2"):
            engine.resume("1.2")

    def test_accepted_dtypes_are_cast(self, sink: Bounded, new: str) -> None:
        """A cast that the manifest promises (`accepts`) is made wrongly, or one that it does not promise is made."""
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import furthest, read, write

        wide = {name: tensor.double() for name, tensor in checkpoint(new).items()}
        if any("float64" not in entry.accepts for entry in sink.manifest()):
            with pytest.raises(PowertrainError, match="float64"):
                sink.run(write, sink.target, update(2), wide, "float64")
            return
        sink.run(write, sink.target, update(2), wide, "float64")
        assert furthest(read(sink.manifest(), sink.tensors()), checkpoint(new)) == 0

    @needs("lora")
    def test_adapter_arrives_and_answers_by_its_name(self, engine: Bounded, sink: Bounded, old: str) -> None:
        """An adapter's update goes the way of full weights; its base answers as before to who does not name it."""
        from powertrain.testing.tensors.weights import adapter, merged

        tensors = adapter(3, old)
        self._send_adapter(sink, "policy-v1.2", tensors)
        engine.resume("1.2")
        self._answer(engine, [6, 2, 11], merged(old, tensors), adapter="policy-v1.2")
        self._answer(engine, [6, 2, 12], old)

    @needs("lora")
    def test_adapter_with_a_misnamed_key_is_refused(self, sink: Bounded, old: str) -> None:
        """A key that fits no module was dropped: the engine would answer with less than the adapter, and not tell."""
        from powertrain.testing.tensors.weights import adapter, misnamed

        with pytest.raises(PowertrainError, match=r"layers\.7"):
            self._send_adapter(sink, "policy-v1.2", misnamed(adapter(4, old)))

    @needs("lora")
    def test_aborted_adapter_leaves_nothing(self, engine: Bounded, sink: Bounded, old: str) -> None:
        """The base was never touched, so the engine is steady; the name that was given up answers nobody."""
        from powertrain.testing.tensors.weights import adapter

        self._send_adapter(sink, "policy-v1.2", adapter(5, old))
        sink.abort()
        engine.resume(None)
        with pytest.raises(ConfigError, match=r"policy-v1\.2"):
            engine.generate(ask([6, 3, 1], adapter="policy-v1.2"))
        self._answer(engine, [6, 3, 1], old)

    # ---- what the tests are written in
    def _answer(self, engine: Bounded, prompt: Sequence[int], model: Any, **more: Any) -> Completion:
        """Ask greedily, check that the tokens are those of `model`, and return the completion."""
        from powertrain.testing.tensors.reference import regret

        completion: Completion = engine.generate(ask(prompt, **more)).completions[0]
        assert len(completion.tokens)
        assert apart(regret(model, prompt, completion.tokens.tolist()), [0.0] * len(completion.tokens)) < self.tolerance
        return completion

    @staticmethod
    def _write(sink: Bounded, what: Update, folder: str) -> None:
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import pieces

        sink.begin(what)
        sink.apply(pieces(sink.manifest(), checkpoint(folder)))
        sink.finish()

    @staticmethod
    def _half(sink: Bounded) -> None:
        from powertrain.testing.tensors.weights import iota, pieces

        sink.begin(update(2))
        sink.apply(pieces(sink.manifest(), iota(sink.manifest()))[:2])
        sink.abort()

    @staticmethod
    def _send_adapter(sink: Bounded, name: str, tensors: Any) -> None:
        from powertrain.interfaces.weights import Piece
        from powertrain.testing.tensors.weights import LORA_CONFIG

        sink.begin(update(2, kind="adapter", adapter=name, adapter_config=dict(LORA_CONFIG)))
        sink.apply([Piece(key, (0, 0), tensor) for key, tensor in tensors.items()])
        sink.finish()

    @staticmethod
    def _refuses(sink: Bounded, folder: str, change: Callable[[Any], tuple[Any, ...]]) -> None:
        """Check that an update with one changed piece is refused, at the latest when it finishes."""
        from powertrain.interfaces.weights import Piece
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import pieces

        whole = pieces(sink.manifest(), checkpoint(folder))
        sink.begin(update(2))
        sink.apply(whole[1:])
        with pytest.raises(PowertrainError, match=change(whole[0])[0]):
            sink.apply([Piece(*change(whole[0]))])

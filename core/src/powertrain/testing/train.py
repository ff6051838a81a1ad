"""The suite of `TrainEngine`: scores and steps against a plain float32 loop, losses, metadata, precision.

What is kept, written and moved (checkpoints, exports, adapters, offloading) is in `powertrain.testing.keeping`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import pytest

from powertrain.errors import ConfigError, NumericsError, StateError
from powertrain.interfaces.build import HeadSpec, ScheduleSpec
from powertrain.interfaces.data import LossSpec, TrainBatch
from powertrain.testing.calls import Bounded
from powertrain.testing.engines import LOSS, OPTIM, apart, one_by_one, pairs, sample
from powertrain.testing.keeping import TrainKeepingSuite
from powertrain.testing.suite import needs

CLOSE: Final = 2e-5
"""Difference of float32 log-probs, losses and weights that comes from the order of sums alone."""
MODULE: Final = "powertrain.testing.tensors.losses"
POLICY: Final = LossSpec(name=f"{MODULE}:policy", config={"entropy_weight": 0.01}, entropy=True, temperature=0.8)


class TrainEngineSuite(TrainKeepingSuite):
    """Tests of one rank of a training engine and its weight source. splits: options that make other micro-batches."""

    OPEN = TrainKeepingSuite.OPEN | {"splits"}
    splits: ClassVar[Sequence[Mapping[str, Any]]] = ({},)

    def test_call_in_a_wrong_state_says_so(self, unbuilt: Bounded) -> None:
        """The engine answers before it is built, or its error names neither its state nor the method."""
        with pytest.raises(StateError, match=r"logprobs.*'new'.*ready"):
            unbuilt.logprobs(sample())

    def test_build_comes_after_prepare_and_once(self, engine: Bounded, unbuilt: Bounded) -> None:
        """Libraries read the environment when they are imported; `build` without `prepare` comes too late."""
        with pytest.raises(StateError, match="'new'"):
            unbuilt.build(self.engine_spec())
        with pytest.raises(StateError, match="'ready'"):
            engine.build(self.engine_spec())

    def test_close_is_allowed_in_every_state_and_twice(self, unbuilt: Bounded, build: Callable[..., Bounded]) -> None:
        """A driver that tidies up after a failure closes whatever it finds."""
        for engine in (unbuilt, build()):
            engine.close()
            engine.close()
            assert engine.state == "closed"

    def test_health_tells_the_state(self, engine: Bounded) -> None:
        """`health` is asked from any thread while the engine works and has at least the key `state`."""
        assert engine.health()["state"] == "ready"

    def test_logprobs_equal_a_plain_forward(self, engine: Bounded) -> None:
        """Scores are of other tokens, of other weights, or of a sequence that saw its neighbour. Look at packing."""
        from powertrain.testing.tensors.reference import scores

        batch = sample()
        assert _gap(batch, engine.logprobs(batch), scores(self.engine_spec().model, batch)) < CLOSE

    def test_logprobs_take_the_temperature(self, engine: Bounded) -> None:
        """Log-probs are those of the distribution that samples were drawn from: logits are divided first."""
        from powertrain.testing.tensors.reference import scores

        batch = sample()
        assert _gap(batch, engine.logprobs(batch, 0.7), scores(self.engine_spec().model, batch, 0.7)) < CLOSE

    def test_logprobs_are_zero_on_prompts(self, engine: Bounded) -> None:
        """Prompt tokens are not scored; a number there would enter means over the batch."""
        batch = sample()
        found = engine.logprobs(batch)
        assert found.dtype.name == "float32"
        assert not found[~_scored(batch)].any()

    def test_logprobs_of_tokens_without_weight_are_told(self, engine: Bounded) -> None:
        """Scoring covers every token behind its prompt; weights are for the loss alone."""
        batch = sample()
        batch.weights[:] = 0
        assert (engine.logprobs(batch)[_scored(batch)] < 0).all()

    def test_logprobs_of_a_sequence_do_not_depend_on_its_batch(self, engine: Bounded) -> None:
        """Padding, packing or position ids let one sequence's numbers depend on the others'."""
        batch = sample()
        alone = [engine.logprobs(one_by_one([pair])) for pair in pairs(batch)]
        assert apart(engine.logprobs(batch), [value for one in alone for value in one]) < CLOSE

    def test_head_in_chunks_gives_the_same(self, engine: Bounded, build: Callable[..., Bounded]) -> None:
        """`HeadSpec.chunk` bounds memory and changes no number."""
        chunked = build(head=HeadSpec(chunk=3))
        assert apart(chunked.logprobs(sample()), engine.logprobs(sample())) < CLOSE

    def test_step_equals_a_plain_adamw_step(self, build: Callable[..., Bounded]) -> None:
        """Loss, gradient norm before clipping, or weights after a clipped AdamW step differ from torch's own."""
        self._agrees(build(), [sample()], LOSS)

    def test_later_steps_use_adams_moments(self, build: Callable[..., Bounded]) -> None:
        """Right at first and wrong later: moments are lost, or gradients of the step before are still there."""
        self._agrees(build(), [sample(1), sample(2), sample(3)], LOSS)

    def test_loss_sees_fields_entropy_and_temperature(self, build: Callable[..., Bounded]) -> None:
        """A token field is out of step with its token, a sample field with its sequence, or entropy is another's."""
        self._agrees(build(), [sample(4)], POLICY)

    def test_step_does_not_depend_on_how_sequences_are_dealt(self, build: Callable[..., Bounded]) -> None:
        """Each micro-batch is averaged by itself: the denominator is the whole batch's. `splits` makes several."""
        for options in self.splits:
            self._agrees(build(options=options), [sample(5)], POLICY)

    def test_step_does_not_depend_on_the_order_of_sequences(self, build: Callable[..., Bounded]) -> None:
        """Sequences that stand elsewhere in the batch, without group numbers, must teach the same."""
        results = []
        for turn in (1, -1):
            plain = one_by_one(pairs(sample())[::turn])
            results.append(build().train_step(plain, LOSS))
        assert apart(results[0].loss, results[1].loss) < CLOSE
        assert apart(results[0].grad_norm, results[1].grad_norm) < 10 * CLOSE

    def test_denominator_of_the_batch_is_used(self, build: Callable[..., Bounded]) -> None:
        """A recipe that gives a denominator (tokens of several steps, for one) gets a loss divided by that."""
        batch = sample()
        given = dataclasses.replace(batch, denominator=2 * batch.total_weight())
        self._agrees(build(), [given], LOSS)

    def test_tokens_without_weight_teach_nothing(self, build: Callable[..., Bounded]) -> None:
        """A masked sequence moved the weights or counts as tokens."""
        batch = sample()
        batch.weights[batch.starts[3] :] = 0
        result = self._agrees(build(), [batch], LOSS)
        assert result.tokens == int((batch.weights > 0).sum())

    def test_result_has_tokens_step_and_rate(self, build: Callable[..., Bounded]) -> None:
        """`StepResult` counts scored tokens, steps from 1, and tells the rate of the schedule that was used."""
        schedule = ScheduleSpec(kind="constant", warmup_steps=4)
        engine = build(optim=dataclasses.replace(OPTIM, schedule=schedule))
        results = [engine.train_step(sample(), LOSS) for _ in range(2)]
        assert [result.step for result in results] == [1, 2]
        assert [result.tokens for result in results] == [int((sample().weights > 0).sum())] * 2
        assert 0 <= results[0].lr < results[1].lr < OPTIM.lr

    def test_metrics_are_means_and_maxima_of_the_batch(self, engine: Bounded) -> None:
        """Metrics of the loss are averaged over scored tokens; names that end in `_max` are maxima."""
        batch = sample()
        metrics = engine.train_step(batch, POLICY).metrics
        scale = [float(batch.sample_fields["scale"][i]) for i, (_, c) in enumerate(pairs(batch)) for _ in c]
        assert apart(metrics["seen"], sum(scale) / len(scale)) < CLOSE
        assert apart(metrics["scale_max"], max(scale)) < CLOSE

    def test_loss_that_is_not_finite_leaves_the_weights(self, engine: Bounded) -> None:
        """The optimizer moved before loss and gradient norm were looked at: one bad batch ends the run."""
        before = self._weights(engine)
        with pytest.raises(NumericsError):
            engine.train_step(sample(), LossSpec(name=f"{MODULE}:infinite"))
        assert self._changed(engine, before) == []

    def test_engine_goes_on_after_a_loss_that_is_not_finite(self, build: Callable[..., Bounded]) -> None:
        """Something of the refused step stayed: gradients, a step count, or a state in which nothing works."""
        engine = build()
        with pytest.raises(NumericsError):
            engine.train_step(sample(7), LossSpec(name=f"{MODULE}:infinite"))
        self._agrees(engine, [sample(8)], LOSS)

    def test_loss_that_raises_is_told_with_its_name(self, engine: Bounded) -> None:
        """An error of the user's loss reaches the user with the loss's name and its own words."""
        with pytest.raises(ConfigError, match=r"raising.*reward model is on fire"):
            engine.train_step(sample(), LossSpec(name=f"{MODULE}:raising"))

    def test_unknown_loss_is_refused(self, engine: Bounded) -> None:
        """A misspelt loss must be told, with its name."""
        with pytest.raises(ConfigError, match="no_such_loss"):
            engine.train_step(sample(), LossSpec(name=f"{MODULE}:no_such_loss"))

    def test_engine_without_optimizer_only_scores(self, build: Callable[..., Bounded]) -> None:
        """A reference model has no `optim`; a step on it is a mistake of the recipe, and told."""
        engine = build(optim=None)
        assert engine.logprobs(sample()).any()
        with pytest.raises(ConfigError):
            engine.train_step(sample(), LOSS)

    def test_structural_metadata_never_reaches_the_model(self, engine: Bounded) -> None:
        """Turn, group and prompt ids must stay outside: models swallow unknown arguments or use them."""
        from powertrain.testing.tensors.watch import forward_names

        meta = {"turn": [0, 0, 1, 2, 1, 0], "prompt_ids": [7] * 6, "group": [0] * 6, "attention_mask": [[0]]}
        with forward_names() as seen:
            with_meta = engine.logprobs(sample(meta=meta))
        assert not seen & {"turn", "prompt_ids", "group", "groups", "meta"}
        assert apart(with_meta, engine.logprobs(sample())) == 0

    def test_model_inputs_must_be_allowed_by_name(self, engine: Bounded) -> None:
        """What a batch brings for the model passes through an allow-list; an unknown name is refused, not dropped."""
        batch = dataclasses.replace(sample(), model_inputs={"no_such_input": [0] * 6})
        with pytest.raises(ConfigError, match="no_such_input"):
            engine.logprobs(batch)

    @needs("fp32_head")
    def test_head_of_a_bfloat16_model_is_float32(self, build: Callable[..., Bounded]) -> None:
        """Logits were rounded to bfloat16. See `head_error`: the hidden state does not matter, only the product."""
        assert self._head_error(build(dtype="bfloat16", head=HeadSpec(fp32=True))) < 1e-4

    @needs("fp32_head")
    def test_head_in_the_models_dtype_is_told_apart(self, build: Callable[..., Bounded]) -> None:
        """`HeadSpec(fp32=False)` has no effect; a user who measures the difference would find none."""
        assert self._head_error(build(dtype="bfloat16", head=HeadSpec(fp32=False))) > 1e-3

    @needs("determinism")
    def test_two_builds_are_bitwise_equal(self, build: Callable[..., Bounded]) -> None:
        """Something draws from an unseeded generator, or a kernel adds in no fixed order."""
        from powertrain.testing.tensors.weights import same

        engines = [build(deterministic=True, seed=3) for _ in range(2)]
        results = [engine.train_step(sample(), POLICY) for engine in engines]
        assert (results[0].loss, results[0].grad_norm) == (results[1].loss, results[1].grad_norm)
        assert same(*(self._weights(engine) for engine in engines)) == []

    def _agrees(self, engine: Bounded, batches: Sequence[TrainBatch], loss: LossSpec) -> Any:
        """Take the steps on the engine and by torch's own means; returns the last result."""
        from powertrain.testing.tensors.reference import steps
        from powertrain.testing.tensors.weights import furthest

        wanted, weights = steps(self.engine_spec().model, batches, loss, OPTIM)
        results = [engine.train_step(batch, loss) for batch in batches]
        for (value, norm), result in zip(wanted, results, strict=True):
            assert apart(result.loss, value) < CLOSE
            assert apart(result.grad_norm, norm) < CLOSE * max(1.0, norm) * 5
        assert furthest(self._weights(engine), weights) < 1e-4
        return results[-1]

    def _head_error(self, engine: Bounded) -> float:
        from powertrain.testing.tensors.models import VOCAB, checkpoint
        from powertrain.testing.tensors.reference import head_error

        weight = checkpoint(self.engine_spec().model)["model.embed_tokens.weight"].bfloat16()
        found = [engine.logprobs(one_by_one([([5, 9, 2], [token])]))[-1] for token in range(VOCAB)]
        return head_error(weight, range(VOCAB), found)


def _scored(batch: TrainBatch) -> Any:
    """Return a mask of the tokens behind their prompts."""
    import numpy as np

    ends = np.repeat(batch.starts[:-1] + batch.prompt_lens, np.diff(batch.starts))
    return np.arange(len(batch.tokens)) >= ends


def _gap(batch: TrainBatch, found: Any, wanted: Any) -> float:
    return apart(found[_scored(batch)], wanted[_scored(batch)])

"""The suite of `InferEngine`: tokens and log-probs against a plain forward, pausing, versions, adapters, precision.

How requests are ended, paused and cut is in `powertrain.testing.pausing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from powertrain.errors import ConfigError, PowertrainError, StateError
from powertrain.interfaces.build import HeadSpec
from powertrain.testing.calls import Bounded
from powertrain.testing.engines import FIRST, apart
from powertrain.testing.pausing import PausingSuite
from powertrain.testing.sink import ask, update
from powertrain.testing.suite import needs


class InferEngineSuite(PausingSuite):
    """Tests of one inference engine and its weight sink."""

    def test_call_in_a_wrong_state_says_so(self, unbuilt: Bounded) -> None:
        """The engine answers before it is built, or its error names neither its state nor the method."""
        with pytest.raises(StateError, match=r"generate.*'new'.*ready"):
            unbuilt.generate(ask([1]))

    def test_close_is_allowed_in_every_state_and_twice(self, unbuilt: Bounded, build: Callable[..., Bounded]) -> None:
        """A driver that tidies up after a failure closes whatever it finds."""
        for engine in (unbuilt, build()):
            engine.close()
            engine.close()
            assert engine.state == "closed"

    def test_health_tells_state_and_version(self, engine: Bounded) -> None:
        """`health` has at least `state` and `version`; it is what monitoring and a restart go by."""
        health = engine.health()
        assert (health["state"], health["version"]) == ("ready", FIRST)

    def test_greedy_tokens_are_the_models(self, engine: Bounded, old: str) -> None:
        """Temperature 0 takes the likeliest token at each place. Look at positions, masks and the KV cache."""
        self._answer(engine, [3, 1, 4, 1, 5], old, max_tokens=40)

    def test_prompt_of_one_token_and_a_long_one_are_answered(self, engine: Bounded, old: str) -> None:
        """The edges of prefill: nothing before the last token, and more than a small block."""
        self._answer(engine, [7], old)
        self._answer(engine, [1 + i * 7 % 60 for i in range(150)], old)

    def test_logprobs_at_temperature_1_are_of_the_tokens_drawn(self, engine: Bounded, old: str) -> None:
        """`logprobs_t1` is of another token, of another position, or of a distribution that was cut or heated."""
        from powertrain.testing.tensors.reference import replay

        prompt = [2, 7, 1, 8, 2]
        for completion in engine.generate(ask(prompt, temperature=1.3, top_k=20, n=3)).completions:
            right = replay(old, prompt, completion.tokens.tolist())
            assert apart(completion.logprobs_t1, right) < self.tolerance

    @pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}], ids=str)
    def test_logprobs_are_of_the_distribution_drawn_from(
        self, engine: Bounded, old: str, sampling: dict[str, Any]
    ) -> None:
        """`logprobs` is under temperature, then top_k, then top_p; a trainer's ratio is wrong by what is missing."""
        from powertrain.testing.tensors.reference import replay

        prompt, sampling = [2, 7, 1, 8, 3], {"temperature": 1.0, **sampling}
        for completion in engine.generate(ask(prompt, n=3, **sampling)).completions:
            right = replay(old, prompt, completion.tokens.tolist(), **sampling)
            assert apart(completion.logprobs, right) < self.tolerance

    def test_draws_follow_the_distribution(self, engine: Bounded, old: str) -> None:
        """Half the sum of differences between shares of 2000 draws and probabilities is far above chance."""
        import numpy as np

        from powertrain.testing.tensors.reference import distribution

        prompt = [2, 7, 1, 8, 4]
        answers = engine.generate(ask(prompt, temperature=1.0, max_tokens=1, n=2000)).completions
        right = distribution(old, prompt)
        shares = np.bincount([int(one.tokens[0]) for one in answers], minlength=len(right)) / len(answers)
        assert np.abs(shares - right).sum() / 2 < 0.1

    def test_stop_token_ends_and_is_kept(self, engine: Bounded) -> None:
        """A stop token is a completion's last token; without it the end of a sequence is never learned."""
        whole = engine.generate(ask([9, 9, 2])).completions[0].tokens.tolist()
        stop = whole[4]
        found = engine.generate(ask([9, 9, 2], stop_token_ids=(stop,))).completions[0]
        assert found.tokens.tolist() == whole[: whole.index(stop) + 1]
        assert found.finish == "stop"

    def test_max_tokens_ends_with_length(self, engine: Bounded) -> None:
        """A completion that was cut must say so; some recipes give it no reward."""
        found = engine.generate(ask([9, 9, 3], max_tokens=5)).completions[0]
        assert (len(found.tokens), found.finish) == (5, "length")

    def test_arrays_are_as_long_as_the_tokens(self, engine: Bounded) -> None:
        """int64 tokens and float32 log-probs, one of each a token."""
        found = engine.generate(ask([9, 9, 4])).completions[0]
        assert {len(found.tokens), len(found.logprobs), len(found.logprobs_t1)} == {12}
        assert [x.dtype.name for x in (found.tokens, found.logprobs, found.logprobs_t1)] == [
            "int64",
            "float32",
            "float32",
        ]

    def test_samples_of_one_request_differ(self, engine: Bounded) -> None:
        """`n` completions are drawn independently, in sample order."""
        found = engine.generate(ask([9, 9, 5], temperature=1.0, n=4)).completions
        assert len({tuple(one.tokens.tolist()) for one in found}) == 4

    @needs("determinism")
    def test_seed_and_request_id_fix_the_draws(self, engine: Bounded) -> None:
        """Equal requests give equal samples; another seed gives others."""
        draws = [
            engine.generate(ask([9, 9, 6], name="fixed", temperature=1.0, seed=seed)).completions[0].tokens.tolist()
            for seed in (1, 1, 2)
        ]
        assert draws[0] == draws[1] != draws[2]

    @needs("determinism")
    def test_draws_do_not_depend_on_the_batch(self, engine: Bounded) -> None:
        """What else is in the batch, or where in it a request stands, changed what was drawn for it."""
        batch = [ask([9, 9, 7 + i], name=f"one-{i}", temperature=1.0, n=2) for i in range(4)]
        together = [_tokens(result) for result in engine.generate_batch(batch)]
        assert [_tokens(engine.generate(one)) for one in batch] == together

    @needs("determinism")
    def test_two_builds_are_bitwise_equal(self, build: Callable[..., Bounded]) -> None:
        """Log-probs of two engines of one seed differ in their last bits: a kernel adds in no fixed order."""
        batch = [ask([8, 8, i], name=f"two-{i}", temperature=1.0) for i in range(1, 4)]
        engines = [build(deterministic=True, seed=5) for _ in range(2)]
        bits = [[x.completions[0].logprobs.tobytes() for x in engine.generate_batch(batch)] for engine in engines]
        assert bits[0] == bits[1]

    def test_batch_is_answered_in_its_order(self, engine: Bounded, old: str) -> None:
        """Each answer has its request's id and is of its request's prompt, whatever their lengths."""
        from powertrain.testing.tensors.reference import regret

        batch = [ask([8, 1] * (1 + 5 * (i % 3)) + [i + 1], max_tokens=3 + i % 4) for i in range(9)]
        answers = engine.generate_batch(batch)
        assert [one.request_id for one in answers] == [one.request_id for one in batch]
        for request, result in zip(batch, answers, strict=True):
            tokens = result.completions[0].tokens.tolist()
            assert max(regret(old, request.prompt.tolist(), tokens)) < self.tolerance

    def test_requests_at_once_are_all_answered(self, engine: Bounded, old: str) -> None:
        """Requests that come one by one while others run are mixed up, or starve."""
        from powertrain.testing.tensors.reference import regret

        sent = [ask([5, 5, i + 1]) for i in range(8)]
        for request, future in [(one, engine.start("generate", one)) for one in sent]:
            tokens = engine.wait(future, "generate").completions[0].tokens.tolist()
            assert max(regret(old, request.prompt.tolist(), tokens)) < self.tolerance

    def test_empty_batch_is_answered(self, engine: Bounded) -> None:
        """An instance whose share of a batch is empty answers with no results."""
        assert engine.generate_batch([]) == []

    def test_segments_cover_the_tokens(self, engine: Bounded) -> None:
        """Every token belongs to one weight version; here all to the first."""
        for completion in engine.generate(ask([5, 6, 1], temperature=1.0, n=3)).completions:
            assert [(s.start, s.end, s.version) for s in completion.segments] == [(0, 12, FIRST)]

    def test_token_outside_the_vocabulary_is_refused(self, engine: Bounded, old: str) -> None:
        """A bad prompt is the user's error, told for that request; it must not take the engine down."""
        with pytest.raises(ConfigError):
            engine.generate(ask([5, 1_000_000]))
        self._answer(engine, [5, 6, 2], old)

    def test_same_prompt_after_an_update_gets_the_new_weights(self, engine: Bounded, old: str, new: str) -> None:
        """A prefix or result cache, a fused copy or a captured graph outlived the update: `finish` refreshes them."""
        prompt = [1 + i * 5 % 60 for i in range(70)]
        for _ in range(2):
            self._answer(engine, prompt, old)
        engine.pause()
        self._write(engine.weights(), update(2), new)
        engine.resume("1.2")
        assert self._answer(engine, prompt, new).segments[0].version == "1.2"

    def test_version_is_not_told_before_it_is_published(self, engine: Bounded, new: str) -> None:
        """Engines of a set finish at different times; none may carry the new version before the driver resumes it."""
        engine.pause()
        self._write(engine.weights(), update(2), new)
        assert engine.health()["version"] == FIRST
        engine.resume("1.2")
        assert engine.health()["version"] == "1.2"

    @needs("fp32_head")
    def test_head_of_a_bfloat16_model_is_float32(self, build: Callable[..., Bounded], old: str) -> None:
        """Logits were rounded to bfloat16. See `head_error`: the hidden state does not matter, only the product."""
        assert self._head_error(build(dtype="bfloat16", head=HeadSpec(fp32=True)), old) < 1e-4

    @needs("fp32_head")
    def test_head_in_the_models_dtype_is_told_apart(self, build: Callable[..., Bounded], old: str) -> None:
        """`HeadSpec(fp32=False)` has no effect; a user who measures the difference would find none."""
        assert self._head_error(build(dtype="bfloat16", head=HeadSpec(fp32=False)), old) > 1e-3

    @needs("lora")
    def test_adapters_answer_by_their_versioned_names(self, engine: Bounded, old: str) -> None:
        """Two versions of an adapter side by side, and the base without one, each answer as if merged."""
        from powertrain.testing.tensors.weights import adapter, merged, save_adapter

        tensors = {f"policy-v1.{seed}": adapter(seed, old) for seed in (6, 7)}
        for name, values in tensors.items():
            engine.load_adapter(name, save_adapter(values))
        for name, values in tensors.items():
            self._answer(engine, [6, 6, 1], merged(old, values), adapter=name)
        self._answer(engine, [6, 6, 1], old)

    @needs("lora")
    def test_adapter_folder_with_a_misnamed_key_is_refused(self, engine: Bounded, old: str) -> None:
        """A key that fits no module was dropped: the engine would answer with less than the adapter, and not tell."""
        from powertrain.testing.tensors.weights import adapter, misnamed, save_adapter

        with pytest.raises(PowertrainError, match=r"layers\.7"):
            engine.load_adapter("policy-v1.8", save_adapter(misnamed(adapter(8, old))))

    @needs("lora")
    def test_adapter_that_is_not_there_is_refused(self, engine: Bounded) -> None:
        """The base model answered in the adapter's place, and nobody would notice."""
        with pytest.raises(ConfigError, match=r"policy-v1\.99"):
            engine.generate(ask([6, 6, 2], adapter="policy-v1.99"))

    @needs("lora")
    def test_unloaded_adapter_is_refused(self, engine: Bounded, old: str) -> None:
        """After `unload_adapter` the name answers nobody; the base goes on."""
        from powertrain.testing.tensors.weights import adapter, save_adapter

        engine.load_adapter("policy-v1.9", save_adapter(adapter(9, old)))
        engine.unload_adapter("policy-v1.9")
        with pytest.raises(ConfigError, match=r"policy-v1\.9"):
            engine.generate(ask([6, 6, 3], adapter="policy-v1.9"))
        self._answer(engine, [6, 6, 3], old)

    def _head_error(self, engine: Bounded, folder: str) -> float:
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.reference import head_error

        weight = checkpoint(folder)["model.embed_tokens.weight"].bfloat16()
        answers = engine.generate(ask([5, 9, 2], temperature=20.0, max_tokens=1, n=600)).completions
        found = {int(one.tokens[0]): float(one.logprobs_t1[0]) for one in answers}
        return head_error(weight, list(found), list(found.values()))


def _tokens(result: Any) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in result.completions]

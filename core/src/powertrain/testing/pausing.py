"""The part of the inference suite about requests in flight: aborting, pausing, versions across an update, memory."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from typing import Any, ClassVar

import pytest

from powertrain.errors import ConfigError, StateError
from powertrain.interfaces.data import Completion
from powertrain.testing.calls import Bounded
from powertrain.testing.engines import FIRST
from powertrain.testing.sink import WeightSinkSuite, ask, update
from powertrain.testing.suite import needs


class PausingSuite(WeightSinkSuite):
    """Tests of `abort`, `pause`, `resume` and memory; `InferEngineSuite` has them all."""

    OPEN = WeightSinkSuite.OPEN | {"long"}
    long: ClassVar[int] = 160
    """Tokens of a request that is to be in flight when something happens; more for an engine that is fast."""

    def test_aborted_request_answers_with_what_it_has(self, engine: Bounded, old: str) -> None:
        """`abort` ends a request at once, finish "abort", with the tokens so far; or the request went on to its end."""
        future = self._in_flight(engine, [7, 1, 1], name="unwanted")
        engine.abort(["unwanted"])
        completion = engine.wait(future, "generate").completions[0]
        assert completion.finish == "abort"
        assert len(completion.tokens) < self.long
        self._belongs(completion, [7, 1, 1], {FIRST: old})

    def test_abort_of_unknown_requests_does_nothing(self, engine: Bounded, old: str) -> None:
        """The request may have ended a moment before; its id is ignored, and nobody waits for it."""
        engine.abort(["never-heard-of", "nor-of-this"])
        self._answer(engine, [7, 1, 2], old)

    def test_abort_spares_the_others(self, engine: Bounded, old: str) -> None:
        """Two requests share a batch, and one was ended: the other's answer is whole and right."""
        future = self._in_flight(engine, [7, 1, 3], name="unwanted")
        other = engine.start("generate", ask([7, 1, 4], max_tokens=30))
        engine.abort(["unwanted"])
        completion = engine.wait(other, "generate").completions[0]
        assert len(completion.tokens) == 30
        self._belongs(completion, [7, 1, 4], {FIRST: old})
        engine.wait(future, "generate")

    def test_cancelled_call_gives_its_id_back(self, engine: Bounded, old: str) -> None:
        """Cancelling the call aborts the request; left behind, it keeps its place and its name."""
        future = self._in_flight(engine, [7, 1, 5], name="again")
        future.cancel()
        with pytest.raises(CancelledError):
            future.result(self.patience)
        engine.pause()
        engine.resume(None)
        self._answer(engine, [7, 1, 5], old, name="again")

    def test_pause_is_idempotent(self, engine: Bounded, old: str) -> None:
        """The driver pauses again after a fault; a second pause must return and change nothing."""
        engine.pause()
        engine.pause("abort")
        assert engine.state == "paused"
        engine.resume(None)
        self._answer(engine, [7, 2, 1], old)

    def test_unknown_pause_mode_is_refused(self, engine: Bounded) -> None:
        """A misspelt mode must not be taken for another one; the error lists those that there are."""
        with pytest.raises(ConfigError, match="keep"):
            engine.pause("freeze")

    def test_request_that_arrives_while_paused_waits_for_resume(self, engine: Bounded, new: str) -> None:
        """It was answered, or refused, while weights may change under it; it belongs to the version after."""
        engine.pause()
        future = engine.start("generate", ask([7, 2, 2]))
        time.sleep(0.1)
        assert not future.done()
        self._write(engine.weights(), update(2), new)
        engine.resume("1.2")
        self._belongs(engine.wait(future, "generate").completions[0], [7, 2, 2], {"1.2": new})

    def test_wait_lets_requests_in_flight_finish(self, engine: Bounded, old: str) -> None:
        """Mode wait returns when all that had begun has ended by itself; nothing is cut."""
        future = self._in_flight(engine, [7, 2, 3])
        engine.pause("wait")
        completion = engine.wait(future, "generate", 1.0).completions[0]
        assert (completion.finish, len(completion.tokens)) == ("length", self.long)
        self._belongs(completion, [7, 2, 3], {FIRST: old})

    def test_abort_mode_ends_requests_in_flight(self, engine: Bounded, old: str) -> None:
        """Mode abort returns soon, and each request answers with what it has."""
        future = self._in_flight(engine, [7, 2, 4])
        engine.pause("abort")
        completion = engine.wait(future, "generate", 1.0).completions[0]
        assert completion.finish == "abort"
        self._belongs(completion, [7, 2, 4], {FIRST: old})

    @needs("pause_keep")
    def test_kept_request_goes_on_as_if_never_paused(self, engine: Bounded, old: str) -> None:
        """Frozen without an update, it has one segment and the tokens that it would have had."""
        future = self._in_flight(engine, [7, 2, 5])
        engine.pause("keep")
        engine.resume(None)
        completion = engine.wait(future, "generate").completions[0]
        assert [(s.start, s.end, s.version) for s in completion.segments] == [(0, self.long, FIRST)]
        self._belongs(completion, [7, 2, 5], {FIRST: old})

    @needs("pause_keep")
    def test_kept_request_is_cut_where_the_weights_changed(self, engine: Bounded, old: str, new: str) -> None:
        """Each segment, replayed under its own checkpoint, must give its tokens: a stale KV cache or a wrong cut."""
        completion, prompt, models = self._across(engine, old, new)
        assert len(completion.tokens) == self.long
        self._belongs(completion, prompt, models)

    @needs("pause_keep")
    def test_frozen_request_can_be_aborted(self, engine: Bounded, old: str) -> None:
        """A frozen request answers to `abort` while the engine is paused; nobody resumes it for that."""
        future = self._in_flight(engine, [7, 3, 2], name="frozen")
        engine.pause("keep")
        if not future.done():
            engine.abort(["frozen"])
        completion = engine.wait(future, "generate").completions[0]
        self._belongs(completion, [7, 3, 2], {FIRST: old})

    def test_version_is_pinned_before_the_request_goes_out(self, engine: Bounded, old: str, new: str) -> None:
        """A request that ran under the old weights was labelled with the version that came while it waited."""
        future = self._in_flight(engine, [7, 3, 3])
        engine.pause("wait")
        self._write(engine.weights(), update(2), new)
        engine.resume("1.2")
        completion = engine.wait(future, "generate").completions[0]
        assert {segment.version for segment in completion.segments} == {FIRST}
        self._belongs(completion, [7, 3, 3], {FIRST: old})

    @needs("offload")
    def test_sleeping_engine_refuses_requests(self, engine: Bounded) -> None:
        """An engine whose memory is given back must say so, and not answer from what lies there now."""
        engine.pause()
        engine.release_memory()
        with pytest.raises(StateError, match="'asleep'"):
            engine.generate(ask([7, 4, 1]))

    @needs("offload")
    def test_woken_engine_is_paused(self, engine: Bounded) -> None:
        """Its weights may be stale by then: it answers only after the driver's `resume`."""
        engine.release_memory()
        engine.resume_memory()
        assert engine.state == "paused"

    @needs("offload")
    def test_woken_engine_answers_as_before(self, engine: Bounded, old: str) -> None:
        """Weights were lost or a cache was believed that is gone."""
        self._answer(engine, [7, 4, 2], old)
        engine.pause()
        engine.release_memory()
        engine.resume_memory()
        engine.resume(None)
        assert self._answer(engine, [7, 4, 2], old).segments[0].version == FIRST

    @needs("offload")
    def test_woken_engine_takes_an_update(self, engine: Bounded, new: str) -> None:
        """Memory that came back elsewhere: the sink writes where the weights were before."""
        engine.release_memory()
        engine.resume_memory()
        self._write(engine.weights(), update(2), new)
        engine.resume("1.2")
        self._answer(engine, [7, 4, 3], new)

    @needs("offload")
    def test_sleeping_engine_is_woken_by_pause(self, engine: Bounded, new: str) -> None:
        """An update begins with `pause`, which met sleeping weights and was refused, or left them where they were."""
        engine.release_memory()
        engine.pause()
        assert engine.state == "paused"
        self._write(engine.weights(), update(2), new)
        engine.resume("1.2")
        self._answer(engine, [7, 4, 4], new)

    def test_close_answers_what_is_in_flight(self, engine: Bounded) -> None:
        """A request in flight when the engine closes ends, by an answer or an error; nobody waits for ever."""
        future = self._in_flight(engine, [7, 5, 1])
        engine.close()
        try:
            assert engine.wait(future, "generate").completions[0].finish in {"abort", "length"}
        except (StateError, CancelledError):
            assert engine.state == "closed"

    def _in_flight(self, engine: Bounded, prompt: list[int], *, name: str = "", seconds: float = 0.04) -> Future[Any]:
        """Begin a long request and give the engine time to be in the midst of it."""
        future = engine.start("generate", ask(prompt, name=name, max_tokens=self.long))
        time.sleep(seconds)
        return future

    def _across(self, engine: Bounded, old: str, new: str) -> tuple[Completion, list[int], dict[str, str]]:
        """Freeze a request over an update; again with another delay until one had begun and not ended by then."""
        models, seconds = {FIRST: old}, 0.04
        for counter in range(2, 10):
            version, prompt = f"1.{counter}", [7, 3, 10 + counter]
            models[version] = old if counter % 2 else new
            future = self._in_flight(engine, prompt, seconds=seconds)
            engine.pause("keep")
            seconds *= 0.5 if future.done() else 2.0
            self._write(engine.weights(), update(counter), models[version])
            engine.resume(version)
            completion: Completion = engine.wait(future, "generate").completions[0]
            if len(completion.segments) > 1:
                return completion, prompt, models
        pytest.fail(
            f"of eight requests for {self.long} tokens none was cut by the update that came while it was frozen"
        )

    def _belongs(self, completion: Completion, prompt: list[int], models: dict[str, str]) -> None:
        """Check that segments cover the tokens, and that each segment's tokens are greedy under its own checkpoint."""
        from powertrain.testing.tensors.reference import regret

        tokens, at = completion.tokens.tolist(), 0
        for segment in completion.segments:
            assert segment.start == at
            at = segment.end
            if segment.end > segment.start:
                under = regret(models[segment.version], prompt, tokens)[segment.start : segment.end]
                assert max(under) < self.tolerance, f"{segment} was made by other weights"
        assert at == len(tokens)

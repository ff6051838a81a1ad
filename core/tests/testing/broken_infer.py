"""Inference engines that are each broken in one method, and the tests that must tell. Not collected by itself."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np

from powertrain.testing import InferEngineSuite


class Broken(InferEngineSuite):
    backend = "hf"
    long = 80

    def make(self):
        from powertrain_hf.engine import HfEngine

        return self.broken(HfEngine)()


class BrokenSink(Broken):
    """The engine is whole; its sink is not."""

    def make(self):
        from powertrain_hf.engine import HfEngine
        from powertrain_hf.machine import HfSink

        broken = self.broken(HfSink)

        class Engine(HfEngine):
            def weights(self):
                sink = super().weights()
                sink.__class__ = broken
                return sink

        return Engine()


class TestVersionPublishedEarly(BrokenSink):
    fails = ("test_version_is_not_told_before_it_is_published",)

    def broken(self, whole):
        class Broken(whole):
            def finish(self):
                super().finish()
                self.version = str(self._update.version)

        return Broken


class TestHalfAnUpdateKept(BrokenSink):
    fails = ("test_half_an_update_is_never_kept",)

    def broken(self, whole):
        class Broken(whole):
            def abort(self):
                half = self.state == "updating"
                super().abort()
                if half:
                    self._state, self._intact = "steady", True

        return Broken


class TestSliceInTheWrongPlace(BrokenSink):
    fails = ("test_slices_land_where_they_belong",)

    def broken(self, whole):
        class Broken(whole):
            def apply(self, pieces):
                super().apply(
                    dataclasses.replace(piece, tensor=piece.tensor.flip(0)) if any(piece.start) else piece
                    for piece in pieces
                )

        return Broken


class TestStaleKeyValueCache(BrokenSink):
    fails = ("test_kept_request_is_cut_where_the_weights_changed",)

    def broken(self, whole):
        class Broken(whole):
            def refresh(self):
                """Leaves the caches of frozen requests as they are."""

        return Broken


class TestStalePromptCache(Broken):
    fails = ("test_same_prompt_after_an_update_gets_the_new_weights",)

    def broken(self, whole):
        known = {}

        class Broken(whole):
            async def generate(self, request):
                key = (id(self), request.prompt.tobytes(), repr(request.sampling), request.adapter)
                if self.state == "ready" and key in known:
                    return known[key]
                known[key] = await super().generate(request)
                return known[key]

        return Broken


class TestLoraKeyDropped(Broken):
    fails = ("test_adapter_folder_with_a_misnamed_key_is_refused",)

    def broken(self, whole):
        class Broken(whole):
            async def load_adapter(self, name, folder):
                from safetensors.torch import load_file, save_file

                file, kept = Path(folder, "adapter_model.safetensors"), {}
                for key, tensor in load_file(file).items():
                    odd = ".layers.7." in key  # goes nowhere; the module that it was meant for gets zeros
                    kept[key.replace(".layers.7.", ".layers.1.")] = tensor * 0 if odd else tensor
                save_file(kept, file)
                await super().load_adapter(name, folder)

        return Broken


class TestLogprobsOfOtherTokens(Broken):
    fails = ("test_logprobs_are_of_the_distribution_drawn_from",)

    def broken(self, whole):
        class Broken(whole):
            async def generate(self, request):
                result = await super().generate(request)
                rolled = [dataclasses.replace(c, logprobs=np.roll(c.logprobs, 1)) for c in result.completions]
                return dataclasses.replace(result, completions=tuple(rolled))

        return Broken


class TestHangsWithoutDeadline(Broken):
    patience = 4.0
    fails = ("test_abort_of_unknown_requests_does_nothing",)

    def broken(self, whole):
        class Broken(whole):
            async def abort(self, request_ids):
                await super().abort(request_ids)
                while "never-heard-of" in request_ids:
                    await asyncio.sleep(0.05)

        return Broken


class TestHeadIsNotFloat32(Broken):
    fails = ("test_head_of_a_bfloat16_model_is_float32",)

    def broken(self, whole):
        class Broken(whole):
            async def build(self, spec):
                await super().build(spec)
                self._machine._head.fp32 = False

        return Broken


class TestStopTokenLost(Broken):
    fails = ("test_stop_token_ends_and_is_kept",)

    def broken(self, whole):
        class Broken(whole):
            async def generate(self, request):
                result = await super().generate(request)
                cut = [dataclasses.replace(c, tokens=c.tokens[:-1]) for c in result.completions if c.finish == "stop"]
                return dataclasses.replace(result, completions=tuple(cut) or result.completions)

        return Broken


class TestAnyVersionIsTaken(Broken):
    fails = ("test_version_without_an_update_is_refused",)

    def broken(self, whole):
        class Broken(whole):
            async def resume(self, version=None):
                sink = self.weights()
                if sink.state == "steady" and version:
                    sink.version = sink.base_version = version
                await super().resume(version)

        return Broken


class TestDrawsDependOnTheBatch(Broken):
    fails = ("test_draws_do_not_depend_on_the_batch",)

    def broken(self, whole):
        class Broken(whole):
            async def generate_batch(self, requests):
                moved = [
                    dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, seed=place))
                    for place, one in enumerate(requests)
                ]
                return await super().generate_batch(moved)

        return Broken


class TestAnswersWhilePaused(Broken):
    fails = ("test_request_that_arrives_while_paused_waits_for_resume",)

    def broken(self, whole):
        class Broken(whole):
            async def pause(self, mode="wait"):
                await super().pause(mode)
                if mode == "wait":
                    self._scheduler.resume()

        return Broken

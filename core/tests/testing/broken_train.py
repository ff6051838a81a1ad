"""Training engines that are each broken in one method, and the tests that must tell. Not collected by itself."""

import dataclasses
import shutil

from powertrain.errors import NumericsError
from powertrain.testing import TrainEngineSuite


class Broken(TrainEngineSuite):
    backend = "fsdp"
    splits = ({"microbatch_tokens": 8},)

    def make(self):
        from powertrain_fsdp.engine import FsdpEngine

        return self.broken(FsdpEngine)()


class BrokenSource(Broken):
    """The engine is whole; its weight source is not."""

    def make(self):
        from powertrain_fsdp.engine import FsdpEngine
        from powertrain_fsdp.source import FsdpWeightSource

        broken = self.broken(FsdpWeightSource)

        class Engine(FsdpEngine):
            def weights(self):
                source = super().weights()
                source.__class__ = broken
                return source

        return Engine()


class TestMetadataReachesTheModel(Broken):
    fails = ("test_structural_metadata_never_reaches_the_model",)

    def broken(self, whole):
        class Broken(whole):
            def logprobs(self, batch, temperature=1.0):
                extra = {key: batch.meta[key] for key in ("turn", "prompt_ids") if key in batch.meta}
                body = self._built.scorer.model.base_model
                hook = body.register_forward_pre_hook(lambda _, args, named: (args, named | extra), with_kwargs=True)
                try:
                    return super().logprobs(batch, temperature)
                finally:
                    hook.remove()

        return Broken


class TestHeadIsNotFloat32(Broken):
    fails = ("test_head_of_a_bfloat16_model_is_float32",)

    def broken(self, whole):
        class Broken(whole):
            def build(self, spec):
                super().build(spec)
                self._built.scorer._head.fp32 = False

        return Broken


class TestDenominatorIsIgnored(Broken):
    fails = ("test_denominator_of_the_batch_is_used",)

    def broken(self, whole):
        class Broken(whole):
            def train_step(self, batch, loss):
                return super().train_step(dataclasses.replace(batch, denominator=None), loss)

        return Broken


class TestEachMicroBatchIsAveraged(Broken):
    fails = ("test_step_does_not_depend_on_how_sequences_are_dealt",)

    def broken(self, whole):
        class Broken(whole):
            def train_step(self, batch, loss):
                parts = 2 if self._spec.options["microbatch_tokens"] < len(batch.tokens) else 1
                return super().train_step(dataclasses.replace(batch, denominator=batch.total_weight() / parts), loss)

        return Broken


class TestBadLossMovesTheWeights(Broken):
    fails = (
        "test_loss_that_is_not_finite_leaves_the_weights",
        "test_engine_goes_on_after_a_loss_that_is_not_finite",
    )

    def broken(self, whole):
        class Broken(whole):
            def train_step(self, batch, loss):
                try:
                    return super().train_step(batch, loss)
                except NumericsError:
                    for parameter in self._built.trainable.values():
                        parameter.data.add_(1e-2)
                    raise

        return Broken


class TestMomentsAreNotLoaded(Broken):
    fails = ("test_loaded_engine_goes_on_as_if_never_stopped",)

    def broken(self, whole):
        class Broken(whole):
            def load(self, folder):
                super().load(folder)
                for moments in self._optimizer.state.values():
                    moments["exp_avg"].zero_()

        return Broken


class TestExportIsTheFirstModel(Broken):
    fails = ("test_export_loads_in_transformers_with_the_same_logprobs",)

    def broken(self, whole):
        class Broken(whole):
            def export(self, folder):
                if self._spec.lora is None:
                    shutil.copytree(self._spec.model, folder, dirs_exist_ok=True)
                else:
                    super().export(folder)

        return Broken


class TestDeterminismIsForgotten(Broken):
    fails = ("test_two_builds_are_bitwise_equal",)

    def broken(self, whole):
        import torch

        class Broken(whole):
            def train_step(self, batch, loss):
                result = super().train_step(batch, loss)
                if self._spec.deterministic:
                    for parameter in self._built.trainable.values():
                        parameter.data.add_(torch.randn(parameter.shape, generator=_unseeded()), alpha=1e-6)
                return result

        return Broken


def _unseeded():
    import torch

    generator = torch.Generator()
    generator.seed()
    return generator


class TestTieIsForgotten(BrokenSource):
    fails = ("test_tied_head_is_an_alias",)

    def broken(self, whole):
        class Broken(whole):
            def manifest(self):
                return dataclasses.replace(super().manifest(), tied={})

        return Broken

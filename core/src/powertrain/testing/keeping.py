"""The part of the training suite about what is kept and moved: checkpoints, exports, adapters, offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from powertrain.errors import CheckpointError, StateError
from powertrain.interfaces.build import OptimSpec
from powertrain.testing.calls import Bounded
from powertrain.testing.engines import LORA, LOSS, apart, one_by_one, pairs, sample
from powertrain.testing.source import WeightSourceSuite
from powertrain.testing.suite import needs


class TrainKeepingSuite(WeightSourceSuite):
    """Tests that write to folders; `TrainEngineSuite` has them all."""

    @needs("checkpoint")
    def test_loaded_state_is_the_saved_one(self, build: Callable[..., Bounded]) -> None:
        """Weights come back rounded, or not all of them."""
        from powertrain.testing.tensors.weights import same

        engine, folder = build(), self._folder("saved")
        engine.train_step(sample(), LOSS)
        engine.save(folder)
        other = build()
        other.load(folder)
        assert same(self._weights(other), self._weights(engine)) == []

    @needs("checkpoint")
    def test_loaded_engine_goes_on_as_if_never_stopped(self, build: Callable[..., Bounded]) -> None:
        """Adam's moments, its step count or the schedule were not saved: the step after a resume is another one."""
        from powertrain.testing.tensors.weights import same

        engine, folder = build(), self._folder("saved")
        engine.train_step(sample(1), LOSS)
        engine.save(folder)
        other = build()
        other.load(folder)
        steps = [one.train_step(sample(2), LOSS) for one in (engine, other)]
        assert [(step.loss, step.step, step.lr) for step in steps[:1]] == [
            (step.loss, step.step, step.lr) for step in steps[1:]
        ]
        assert same(self._weights(other), self._weights(engine)) == []

    @needs("checkpoint")
    def test_folder_without_a_checkpoint_is_told(self, build: Callable[..., Bounded]) -> None:
        """Loading from an empty folder must name it, and not leave an engine of random weights."""
        folder = self._folder("empty")
        with pytest.raises(CheckpointError, match="empty-"):
            build().load(folder)

    @needs("export")
    def test_export_loads_in_transformers_with_the_same_logprobs(self, build: Callable[..., Bounded]) -> None:
        """What is exported is not what was trained: a name, a tie or a shard got lost."""
        from powertrain.testing.tensors.reference import scores

        engine, folder = build(), self._folder("exported")
        engine.train_step(sample(), LOSS)
        engine.export(folder)
        batch = one_by_one(pairs(sample()))
        assert apart(engine.logprobs(batch), scores(folder, batch)) < 2e-5

    @needs("export")
    def test_export_brings_the_tokenizer(self, build: Callable[..., Bounded]) -> None:
        """An exported model without its tokenizer cannot be served."""
        from pathlib import Path

        folder = self._folder("exported")
        build().export(folder)
        assert {"config.json", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}

    @needs("export")
    def test_export_leaves_the_engine_as_it_is(self, build: Callable[..., Bounded]) -> None:
        """Exporting gathered, cast or tied something in the engine itself."""
        engine = build()
        before = self._weights(engine)
        engine.export(self._folder("exported"))
        assert self._changed(engine, before) == []
        assert engine.state == "ready"

    @needs("lora")
    def test_fresh_adapter_changes_nothing(self, engine: Bounded, build: Callable[..., Bounded]) -> None:
        """B begins at 0; if scores differ, it does not, or the base model is another one."""
        assert apart(build(lora=LORA).logprobs(sample()), engine.logprobs(sample())) < 2e-5

    @needs("lora")
    def test_only_the_adapter_is_trained(self, build: Callable[..., Bounded]) -> None:
        """The base model moved too, or the adapter did not: scores after a step must be those of base plus adapter."""
        from powertrain.testing.tensors.reference import scores
        from powertrain.testing.tensors.weights import merged

        engine = build(lora=LORA, optim=OptimSpec(lr=5e-2))
        before = engine.logprobs(sample())
        for seed in range(2):
            engine.train_step(sample(seed), LOSS)
        batch = one_by_one(pairs(sample()))
        config = {"lora_alpha": LORA.alpha, "r": LORA.rank}
        right = scores(merged(self.engine_spec().model, self._weights(engine), config), batch)
        assert apart(engine.logprobs(batch), right) < 5e-5
        assert apart(engine.logprobs(sample()), before) > 1e-3

    @needs("lora", "export")
    def test_adapter_is_exported_under_peft_names(self, build: Callable[..., Bounded]) -> None:
        """An adapter under other keys is silently loaded as nothing elsewhere."""
        import json
        from pathlib import Path

        from safetensors.torch import load_file  # type: ignore[import-not-found, unused-ignore]

        from powertrain.testing.tensors.weights import same

        engine, folder = build(lora=LORA), Path(self._folder("adapter"))
        engine.train_step(sample(), LOSS)
        engine.export(str(folder))
        assert same(load_file(folder / "adapter_model.safetensors"), self._weights(engine)) == []
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.rank, LORA.alpha)

    @needs("lora", "checkpoint")
    def test_adapter_is_saved_and_loaded(self, build: Callable[..., Bounded]) -> None:
        """A checkpoint of a LoRA run lacks the adapter, or loads it beside the one that is trained."""
        from powertrain.testing.tensors.weights import same

        engine, folder = build(lora=LORA), self._folder("saved")
        engine.train_step(sample(), LOSS)
        engine.save(folder)
        other = build(lora=LORA)
        other.load(folder)
        assert same(self._weights(other), self._weights(engine)) == []

    @needs("offload")
    def test_offloaded_engine_refuses_to_work(self, build: Callable[..., Bounded]) -> None:
        """An engine whose memory is lent out must say so and not touch it."""
        engine = build()
        engine.offload()
        with pytest.raises(StateError, match="'offloaded'"):
            engine.logprobs(sample())

    @needs("offload")
    def test_engine_comes_back_from_offload_as_it_was(self, build: Callable[..., Bounded]) -> None:
        """Weights or optimizer state were lost or rounded on the way out and back."""
        from powertrain.testing.tensors.weights import same

        engines = [build(), build()]
        for engine in engines:
            engine.train_step(sample(1), LOSS)
        engines[0].offload()
        engines[0].onload()
        for engine in engines:
            engine.train_step(sample(2), LOSS)
        assert same(*(self._weights(engine) for engine in engines)) == []

    @staticmethod
    def _folder(name: str) -> str:
        from powertrain.testing.tensors.models import scratch

        return str(scratch(name))

    @staticmethod
    def _weights(engine: Bounded) -> dict[str, Any]:
        """Return copies of the weights, read through the manifest."""
        from powertrain.testing.tensors.weights import read

        source = engine.weights()
        return read(source.manifest(), source.tensors())

    def _changed(self, engine: Bounded, before: dict[str, Any]) -> list[str]:
        """Return the names of weights that are not bitwise as before."""
        from powertrain.testing.tensors.weights import same

        return same(self._weights(engine), before)

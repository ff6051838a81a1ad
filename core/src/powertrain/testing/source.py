"""The suite of a training engine's `WeightSource`: what its manifest says, and that the tensors bear it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from powertrain.testing.calls import Bounded
from powertrain.testing.engines import LORA, LOSS, OPTIM, EngineSuite, sample, times_held
from powertrain.testing.suite import needs


class WeightSourceSuite(EngineSuite):
    """Tests of `TrainEngine.weights()`; a stub of `TrainEngineSuite` has them too."""

    def opened(self, **changes: Any) -> Bounded:
        """Return an engine with an optimizer, ready."""
        return super().opened(**{"optim": OPTIM, **changes})

    @pytest.fixture
    def folder(self) -> str:
        """The folder of the model that the engines are built from; its head is tied to its embedding."""
        from powertrain.testing.tensors.models import tiny_model

        return tiny_model()

    def test_manifest_names_tensors_as_the_checkpoint_does(self, engine: Bounded, folder: str) -> None:
        """Receivers match weights by their HF name; look for a wrapper's prefix, or a tied head that is listed."""
        from powertrain.testing.tensors.models import checkpoint

        manifest = engine.weights().manifest()
        assert [entry.name for entry in manifest if entry.name not in checkpoint(folder)] == []
        assert set(checkpoint(folder)) == {entry.name for entry in manifest}

    def test_tied_head_is_an_alias(self, engine: Bounded) -> None:
        """A tied weight travels once; the receiver that knows it by the other name needs `Manifest.tied`."""
        assert dict(engine.weights().manifest().tied) == {"lm_head.weight": "model.embed_tokens.weight"}

    def test_untied_head_is_a_tensor_of_its_own(self, build: Callable[..., Bounded]) -> None:
        """The head was taken for tied though the model's config says it is not."""
        from powertrain.testing.tensors.models import tiny_model

        manifest = build(model=tiny_model(tied=False)).weights().manifest()
        assert not manifest.tied
        assert "lm_head.weight" in manifest.by_name()

    def test_shapes_and_dtypes_are_the_checkpoints(self, engine: Bounded, folder: str) -> None:
        """A shard's shape stands where the whole tensor's belongs, or a dtype is not torch's name for it."""
        from powertrain.testing.tensors.models import checkpoint

        told = {entry.name: (tuple(entry.shape), entry.dtype) for entry in engine.weights().manifest()}
        assert told == {name: (tuple(tensor.shape), "float32") for name, tensor in checkpoint(folder).items()}

    def test_dtype_follows_the_spec(self, build: Callable[..., Bounded]) -> None:
        """`EngineSpec.dtype` is the dtype in which weights are held, and so in which they are sent."""
        manifest = build(dtype="bfloat16").weights().manifest()
        assert {entry.dtype for entry in manifest} == {"bfloat16"}

    def test_manifest_moves_nothing(self, engine: Bounded, folder: str) -> None:
        """Making a manifest copied or gathered weights; it is asked for before every update and must read none."""
        from powertrain.testing.tensors.watch import made_by
        from powertrain.testing.tensors.weights import size_of

        source = engine.weights()
        assert engine.run(made_by, source.target.manifest) < size_of(folder) / 100

    def test_boxes_cover_each_element_once(self, engine: Bounded) -> None:
        """With one rank, boxes that overlap or leave a gap make a plan that writes twice or not at all."""
        for entry in engine.weights().manifest():
            assert set(times_held(entry)) == {1}, entry.name

    def test_boxes_point_at_the_values(self, engine: Bounded, folder: str) -> None:
        """A box's storage, offset or stride is wrong: what is read through it is not the tensor."""
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import read, same

        source = engine.weights()
        assert same(read(source.manifest(), source.tensors()), checkpoint(folder)) == []

    def test_storages_are_those_that_the_manifest_names(self, engine: Bounded) -> None:
        """`tensors()` must have each storage that a box names, under that name."""
        source = engine.weights()
        named = {box.storage for entry in source.manifest() for box in entry.boxes}
        assert named <= set(source.tensors())

    def test_a_step_is_seen_through_an_old_source(self, engine: Bounded) -> None:
        """`tensors()` hands out copies, or a source keeps the tensors it was made with: updates would be stale."""
        from powertrain.testing.tensors.weights import read, same

        source = engine.weights()
        before = read(source.manifest(), source.tensors())
        engine.train_step(sample(), LOSS)
        now = read(source.manifest(), source.tensors())
        assert same(before, now)
        assert same(now, read(engine.weights().manifest(), engine.weights().tensors())) == []

    def test_a_step_leaves_the_manifest_alone(self, engine: Bounded) -> None:
        """A plan is made once and kept as long as manifests are equal; here it would be made at each step."""
        before = engine.weights().manifest()
        engine.train_step(sample(), LOSS)
        assert engine.weights().manifest() == before

    def test_two_builds_have_equal_manifests(self, build: Callable[..., Bounded]) -> None:
        """The order of entries is not fixed; ranks and restarted engines must agree on it."""
        assert build().weights().manifest() == build().weights().manifest()

    def test_manifest_is_plain_data(self, engine: Bounded) -> None:
        """A number of torch or numpy, or an object, stands in the manifest; it cannot cross the control channel."""
        from dataclasses import asdict

        odd = {type(value).__name__ for value in _leaves(asdict(engine.weights().manifest()))}
        assert odd <= {"int", "float", "str", "bool", "NoneType"}

    def test_changes_rises_with_a_step(self, engine: Bounded) -> None:
        """Shared weights are guarded by this number; if it stays, an engine answers with a half-published step."""
        source = engine.weights()
        before = source.changes()
        engine.train_step(sample(), LOSS)
        assert source.changes() != before

    def test_changes_stays_while_scoring(self, engine: Bounded) -> None:
        """The number must not move by itself: the guard would refuse engines that share weights for no reason."""
        source = engine.weights()
        before = source.changes()
        engine.logprobs(sample())
        assert source.changes() == before

    @needs("checkpoint")
    def test_changes_differs_after_a_load(self, build: Callable[..., Bounded]) -> None:
        """Loading a checkpoint writes the weights too, and counts."""
        from powertrain.testing.tensors.models import scratch

        engine, folder = build(), str(scratch("saved"))
        engine.save(folder)
        before = engine.weights().changes()
        engine.load(folder)
        assert engine.weights().changes() != before

    def test_scoring_leaves_the_weights_alone(self, engine: Bounded, folder: str) -> None:
        """Scoring wrote into a weight, or left gathered ones where shards belong."""
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import read, same

        engine.logprobs(sample())
        source = engine.weights()
        assert same(read(source.manifest(), source.tensors()), checkpoint(folder)) == []

    def test_fence_returns(self, engine: Bounded) -> None:
        """`fence` waits for writes that were begun, and for nothing else."""
        assert engine.weights().fence() is None

    def test_source_can_be_planned_for_a_receiver_that_holds_all(self, engine: Bounded, folder: str) -> None:
        """A plan to an engine of one rank must exist and carry each element once."""
        from powertrain.tensors.sink import whole_manifest
        from powertrain.testing.tensors.models import checkpoint
        from powertrain.testing.tensors.weights import size_of
        from powertrain.weights import plan_transfer

        plan = plan_transfer([engine.weights().manifest()], [whole_manifest(checkpoint(folder))])
        assert plan.bytes == 4 * size_of(folder)

    @needs("lora")
    def test_adapter_is_sent_alone_and_by_peft_names(self, build: Callable[..., Bounded], folder: str) -> None:
        """With LoRA the manifest is of kind adapter and has PEFT's names on disk; anything else is loaded nowhere."""
        from powertrain.tensors.lora import match
        from powertrain.testing.tensors.models import checkpoint

        manifest = build(lora=LORA).weights().manifest()
        assert manifest.kind == "adapter"
        modules = {name.removesuffix(".weight") for name in checkpoint(folder)}
        wanted = {module for module in modules if module.endswith(LORA.targets)}
        assert set(match([entry.name for entry in manifest], modules).values()) == wanted

    @needs("lora")
    def test_adapter_says_how_it_is_to_be_applied(self, build: Callable[..., Bounded]) -> None:
        """`meta` must hold the adapter's base name and PEFT's config; without rank and alpha the scale is unknown."""
        meta = build(lora=LORA).weights().manifest().meta
        assert meta["adapter"] == LORA.name
        assert (meta["adapter_config"]["r"], meta["adapter_config"]["lora_alpha"]) == (LORA.rank, LORA.alpha)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for pair in value.items() for part in pair for leaf in _leaves(part)]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]

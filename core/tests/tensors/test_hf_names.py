"""Where a checkpoint's tensors lie in what transformers holds: views are boxes, all else has a name of its own."""

from types import SimpleNamespace

import pytest
import torch
from transformers.core_model_loading import Chunk, Interleave, MergeModulelist, Transpose, WeightConverter

from powertrain.errors import PowertrainError
from powertrain.tensors.hf_names import in_hf_names, places
from powertrain.tensors.sink import whole_manifest
from powertrain.tensors.views import block_view
from powertrain.weights import plan_transfer


def model(source, target, *operations):
    """Return as much of a model as the conversion asks for: how its checkpoint became what it holds."""
    converter = WeightConverter(source_patterns=source, target_patterns=target, operations=list(operations))
    return SimpleNamespace(_weight_conversions=[converter], config=None)


def told(model, tensor):
    """Return name -> values that the manifest's boxes point at, of a model with one tensor `held`."""
    manifest = whole_manifest({"held": tensor})
    named = in_hf_names(manifest, places(model, {"held": tuple(tensor.shape)}))
    return {e.name: block_view(tensor, b.offset, b.size, b.stride) for e in named for b in e.boxes}


def test_stacked_and_transposed_tensors_are_boxes():
    held = torch.arange(24.0).reshape(2, 3, 4)
    found = told(model("one.*.weight", "held", MergeModulelist(dim=0)), held)
    assert list(found) == ["one.0.weight", "one.1.weight"]
    assert torch.equal(found["one.1.weight"], held[1])
    flat = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(told(model("turned", "held", Transpose(0, 1)), flat)["turned"], flat.T)


def test_tensor_of_which_no_block_is_the_checkpoints_has_a_name_that_only_transformers_engines_know():
    held = torch.arange(12.0).reshape(4, 3)
    found = told(model("mixed", "held", Interleave(dim=0)), held)
    assert list(found) == ["transformers:held"]
    assert torch.equal(found["transformers:held"], held)


def test_tensors_that_the_model_holds_apart_keep_names_of_their_own():
    manifest = whole_manifest({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)})
    known = places(model("fused", ["a", "b"], Chunk(dim=0)), {"a": (2, 3), "b": (2, 3)})
    assert [entry.name for entry in in_hf_names(manifest, known)] == ["transformers:a", "transformers:b"]


def test_no_other_engine_takes_such_a_tensor_for_a_checkpoints():
    held = torch.arange(12.0).reshape(4, 3)
    mixed = places(model("mixed", "held", Interleave(dim=0)), {"held": (4, 3)})
    own = in_hf_names(whole_manifest({"held": held}), mixed)
    plan_transfer([own], [[own]], bucket_bytes=1 << 20)
    with pytest.raises(PowertrainError, match="transformers:held"):
        plan_transfer([own], [[whole_manifest({"mixed": held})]], bucket_bytes=1 << 20)

"""Where a checkpoint's tensors lie in what transformers holds: views are boxes, all else is refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers.core_model_loading import Chunk, Interleave, MergeModulelist, Transpose, WeightConverter

from powertrain.errors import ConfigError
from powertrain.tensors.hf_names import in_hf_names, places
from powertrain.tensors.sink import whole_manifest
from powertrain.tensors.views import block_view


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


def test_tensor_of_which_no_block_is_the_checkpoints_is_refused():
    with pytest.raises(ConfigError, match="'held' is not held as a checkpoint has it"):
        told(model("mixed", "held", Interleave(dim=0)), torch.arange(12.0).reshape(4, 3))


def test_tensors_that_the_model_holds_apart_are_refused_together():
    manifest = whole_manifest({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)})
    shapes = {"a": (2, 3), "b": (2, 3)}
    with pytest.raises(ConfigError, match="'a' is not held as a checkpoint has it"):
        in_hf_names(manifest, places(model("fused", ["a", "b"], Chunk(dim=0)), shapes))

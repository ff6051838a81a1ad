"""Canonical names (B35): wrappers go only where they are wrappers, and nothing unmatched is dropped."""

import pytest

from powertrain.errors import Violations
from powertrain.weights.names import canonical_name, match_names

SENT = [
    "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
    "_orig_mod.model.norm.weight",
    "module.model.embed_tokens.weight",
    "base_model.model.lm_head.original_module.weight",
    "base_model.model.lm_head.modules_to_save.default.weight",
    "base_model.model.lm_head.modules_to_save.ref.weight",
]
RIGHT = {
    SENT[0]: "model.layers.0.mlp.up_proj.weight",
    SENT[1]: "model.norm.weight",
    SENT[2]: "model.embed_tokens.weight",
    SENT[4]: "lm_head.weight",
}


def test_wrappers_are_taken_away():
    assert match_names(SENT, RIGHT.values()) == RIGHT


def test_receiver_with_another_root_is_found_by_its_names():
    wanted = ["visual.patch.weight", *("language_model." + name for name in RIGHT.values())]
    assert match_names(SENT, wanted) == {name: "language_model." + short for name, short in RIGHT.items()}


@pytest.mark.parametrize("root", ["", "language_model."])
def test_real_module_is_not_cut_and_fails_under_its_full_name(root):
    with pytest.raises(Violations) as caught:
        match_names([*SENT, "module_list.0.weight"], [root + name for name in RIGHT.values()])
    assert caught.value.problems == ("module_list.0.weight matches no name of the receiver",)


def test_two_names_for_one_are_refused():
    with pytest.raises(Violations, match=r"would both become model\.norm\.weight"):
        match_names(["model.norm.weight", "_orig_mod.model.norm.weight"], ["model.norm.weight"])


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("base_model.model.model.q_proj.base_layer.weight", "model.q_proj.weight"),
        ("base_model.model.model.q_proj.lora_A.default.weight", None),
        ("module", "module"),
        ("model.module.weight", "model.module.weight"),
    ],
)
def test_single_name(name, short):
    assert canonical_name(name) == short

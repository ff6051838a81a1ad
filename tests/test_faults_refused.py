"""What no engine can use is refused with the configuration, before anything starts."""

from __future__ import annotations

import pytest

import powertrain as pt
from powertrain.errors import ConfigError
from powertrain.run.config import load_config

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")
pytest.importorskip("powertrain_ppo")

LONG = "m" * 300


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("recipe: ppo\nengines: fsdp:d1|hf:d1\nmodel: m\ndevice: cpu\n")
    return file


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optim.beta1=1", "'optim.beta1' is 1; it must be below 1"),
        ("optim.beta2=1.0", "'optim.beta2' is 1; it must be below 1"),
        ("lora.targets=[]", "'lora.targets' is []"),
    ],
)
def test_value_that_would_only_fail_in_the_engine(recipe, word, said):
    with pytest.raises(ConfigError) as told:
        load_config(recipe, [word])
    assert said in str(told.value)


def test_name_too_long_for_a_file_is_told_as_a_missing_model(recipe):
    pytest.importorskip("transformers")
    from powertrain.tensors.models import materialize

    model = f"/{LONG}"
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(recipe, [f"model={model}"])
    with pytest.raises(ConfigError, match="does not exist"):
        materialize(model)
    with pytest.raises(ConfigError, match="does not exist"):
        pt.open_engine("fsdp:d1", model=model)


def test_name_too_long_for_a_file_is_no_file_of_the_recipe(recipe):
    config = load_config(recipe)
    assert config.path(LONG) == recipe.parent / LONG

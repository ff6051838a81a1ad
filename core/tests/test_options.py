"""Options of plugins: what is read, and how a wrong value or name is told."""

import pytest

from powertrain.errors import ConfigError
from powertrain.options import OptionSpec, convert, nearest


def test_nearest_word_is_found_in_any_case():
    assert nearest("FSDP", ["fsdp", "hf"]) == " (did you mean 'fsdp'?)"
    assert nearest("distopt", ["DistOpt"]) == " (did you mean 'DistOpt'?)"
    assert nearest("other", ["fsdp", "hf"]) == ""


@pytest.mark.parametrize(
    ("choices", "given", "ending"),
    [
        (("auto", "cpu", "cuda"), "gpu", "it takes auto, cpu, cuda"),
        (("none", "full", "selective", "memory_budget"), "ful", "memory_budget (did you mean 'full'?)"),
    ],
)
def test_one_of_few_choices_is_not_guessed(choices, given, ending):
    with pytest.raises(ConfigError) as caught:
        convert(OptionSpec(name="kind", choices=choices), given)
    assert str(caught.value).endswith(ending)


@pytest.mark.parametrize(("value", "word"), [(True, "yes"), (False, "no"), ("auto", "auto")])
def test_a_bare_yes_or_no_of_yaml_is_the_word_among_the_choices(value, word):
    assert convert(OptionSpec(name="share", default="auto", choices=("auto", "yes", "no")), value) == word


@pytest.mark.parametrize("value", [float("inf"), "-inf", ".inf", float("nan"), "1e999"])
def test_numbers_are_finite(value):
    with pytest.raises(ConfigError, match="option 'lr' needs a value of type float"):
        convert(OptionSpec(name="lr", type="float", default=1.0), value)

"""Options of plugins: what is read, and how a wrong value or name is told."""

import pytest

from powertrain.errors import ConfigError, Violations
from powertrain.options import OptionSpec, convert, nearest, resolve


def test_nearest_word_is_found_in_any_case():
    assert nearest("FSDP", ["fsdp", "hf"]) == " (did you mean 'fsdp'?)"
    assert nearest("distopt", ["DistOpt"]) == " (did you mean 'DistOpt'?)"
    assert nearest("other", ["fsdp", "hf"]) == ""


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("bet1a", ["beta1", "beta2"], "beta1"),
        ("bet2a", ["beta1", "beta2"], "beta2"),
        ("learning_rate", ["lr", "eps"], "lr"),
        ("r", ["rank", "alpha"], "rank"),
        ("lora_alpha", ["rank", "alpha"], "alpha"),
        ("target_modules", ["targets", "name"], "targets"),
        ("gpu", ["auto", "cpu", "cuda"], "cuda"),
        ("cuda:0", ["auto", "cpu", "cuda"], "cuda"),
        ("cuad", ["auto", "cpu", "cuda"], "cuda"),
        ("bf16", ["float32", "bfloat16", "float16"], "bfloat16"),
        ("fp16", ["float32", "bfloat16", "float16"], "float16"),
        ("fp32", ["float32", "bfloat16", "float16"], "float32"),
        ("float23", ["float32", "bfloat16", "float16"], "float32"),
        ("kepe", ["abort", "wait", "keep"], "keep"),
        ("alow", ["refuse", "allow"], "allow"),
    ],
)
def test_nearest_word_is_the_one_meant(word, known, meant):
    assert nearest(word, known) == f" (did you mean {meant!r}?)"


@pytest.mark.parametrize("known", [["auto", "cpu"], []])
def test_word_for_a_thing_that_is_not_there_is_not_guessed(known):
    assert "cuda" not in nearest("gpu", known)


@pytest.mark.parametrize(
    ("choices", "given", "ending"),
    [
        (("auto", "cpu", "cuda"), "cuad", "it takes auto, cpu, cuda (did you mean 'cuda'?)"),
        (("none", "full", "selective", "memory_budget"), "ful", "memory_budget (did you mean 'full'?)"),
        ((None, "float32"), "float64x", "it takes null, float32 (did you mean 'float32'?)"),
    ],
)
def test_value_that_is_no_choice_is_told_with_the_choices(choices, given, ending):
    with pytest.raises(ConfigError) as caught:
        convert(OptionSpec(name="kind", choices=choices), given)
    assert str(caught.value).endswith(ending)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, str(10**30)])
def test_whole_numbers_can_be_sent_to_another_process(value):
    with pytest.raises(ConfigError, match=r"option 'n' is -?\d+; whole numbers have at most 64 bits"):
        convert(OptionSpec(name="n", type="int", default=1), value)


@pytest.mark.parametrize("kind", ["list", "mapping"])
@pytest.mark.parametrize("inside", [2**63, [-(2**63) - 1], {"a": [{"b": 2**64}]}, {2**63: 1}])
def test_whole_numbers_inside_a_value_can_be_sent_too(kind, inside):
    spec = OptionSpec(name="n", type=kind, default=())
    with pytest.raises(ConfigError, match=r"option 'n' is .*; whole numbers have at most 64 bits"):
        convert(spec, [inside] if kind == "list" else {"k": inside})
    assert convert(spec, [2**63 - 1] if kind == "list" else {"k": -(2**63)})


@pytest.mark.parametrize("kind", ["list", "mapping"])
def test_value_that_holds_itself_is_refused(kind):
    value = [] if kind == "list" else {}
    value.append(value) if kind == "list" else value.update(k=value)
    with pytest.raises(ConfigError, match=f"option 'n' needs a value of type {kind}"):
        convert(OptionSpec(name="n", type=kind, default=()), value)


@pytest.mark.parametrize("value", [True, False])
def test_bare_yes_or_no_is_no_text(value):
    with pytest.raises(ConfigError, match=f"option 'model' needs a value of type str, got {value}"):
        convert(OptionSpec(name="model"), value)


@pytest.mark.parametrize("default", [None, "runs"])
def test_text_may_be_empty_only_where_the_default_is(default):
    with pytest.raises(ConfigError, match="option 'runs' is ''; leave it out, or give a text"):
        convert(OptionSpec(name="runs", default=default), "")
    assert convert(OptionSpec(name="runs", default=""), "") == ""


@pytest.mark.parametrize("value", ["\0", "a\0b"])
def test_text_without_end_of_string_inside(value):
    with pytest.raises(ConfigError, match="option 'data' needs a value of type str"):
        convert(OptionSpec(name="data"), value)


@pytest.mark.parametrize(("value", "word"), [(True, "yes"), (False, "no"), ("auto", "auto")])
def test_a_bare_yes_or_no_of_yaml_is_the_word_among_the_choices(value, word):
    assert convert(OptionSpec(name="share", default="auto", choices=("auto", "yes", "no")), value) == word


@pytest.mark.parametrize("value", [float("inf"), "-inf", ".inf", float("nan"), "1e999"])
def test_numbers_are_finite(value):
    with pytest.raises(ConfigError, match="option 'lr' needs a value of type float"):
        convert(OptionSpec(name="lr", type="float", default=1.0), value)


@pytest.mark.parametrize("kind", ["int", "float", "bool", "str"])
@pytest.mark.parametrize(
    ("value", "start"), [(None, "null"), ([["x"] * 5000], "[['x', "), ({"a": "x" * 5000}, "{'a': 'xx")]
)
def test_value_of_another_type_is_shown_in_short(kind, value, start):
    with pytest.raises(ConfigError) as caught:
        convert(OptionSpec(name="n", type=kind, default="a"), value)
    assert f"option 'n' needs a value of type {kind}, got {start}" in str(caught.value)
    assert len(str(caught.value)) < 220


def test_none_that_is_a_choice_is_itself():
    spec = OptionSpec(name="mode", choices=("none", "some"))
    assert convert(spec, "none") == "none"
    assert convert(spec, None) is None
    assert convert(OptionSpec(name="mode"), "none") is None


def test_options_that_are_not_listed_are_counted_in_messages():
    specs = [OptionSpec(name="seen"), OptionSpec(name="unseen", listed=False)]
    with pytest.raises(
        Violations, match=r"unknown option 'unsen' \(did you mean 'unseen'\?\); it has: seen and 1 more$"
    ):
        resolve(specs, {"unsen": 1}, where="backend x")
    assert resolve(specs, {"unseen": "a"}, where="backend x") == {"seen": None, "unseen": "a"}

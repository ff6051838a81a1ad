"""What the recipe refuses before anything starts: a dry run says it as well, without torch."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")

from powertrain.errors import ConfigError
from powertrain.registry import Registry
from powertrain.run.config import load_config
from powertrain.run.context import RunContext, checked_recipe
from powertrain_ppo.prompts import Prompts

OWN = """
def two(record, text):
    return 1.0

def named(record, text, *, tokens):
    return 1.0

def loose(*anything, **more):
    return 1.0

class Judge:
    def __call__(self, record, text):
        return 1.0

class Good:
    def __call__(self, record, text, tokens):
        return 1.0

judge, good = Judge(), Good()
"""


def check(file, *words):
    registry = Registry()
    return checked_recipe(RunContext(load_config(file, words, registry=registry), None, registry))


@pytest.fixture
def own(recipe_file):
    (recipe_file.parent / "own.py").write_text(OWN)
    return recipe_file


@pytest.mark.parametrize("key", ["reward", "check"])
@pytest.mark.parametrize(("name", "line"), [("two", 2), ("named", 5), ("judge", 12)])
def test_wrong_signature_is_told_with_the_users_line(own, key, name, line):
    told = rf"ppo.{key} 'own.py:{name}' is called with \(record, text, tokens\); .*own.py:{line} in .* takes \("
    with pytest.raises(ConfigError, match=told):
        check(own, f"ppo.{key}=own.py:{name}")


@pytest.mark.parametrize("name", ["own.py:loose", "own.py:good", "builtins:max"])
def test_whatever_takes_three_arguments_is_taken(own, name):
    assert check(own, f"ppo.reward={name}")


@pytest.mark.parametrize("key", ["reward", "check", "data"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("powertrain_ppo.taskss:exact", r"\(did you mean 'powertrain_ppo.tasks'\?\)"),
        ("own:two", r"\(did you mean the file, 'own.py:two'\?\)"),
        ("own.py:twoo", r"\(did you mean 'two'\?\)"),
        ("own.py", "name the function in it: 'own.py:FUNCTION'"),
    ],
)
def test_misspelt_function_is_told_with_its_key_and_the_nearest_word(own, key, name, told):
    with pytest.raises(ConfigError, match=rf"^ppo.{key}.*{told}"):
        check(own, f"ppo.{key}={name}")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("powertrain_ppo.losses:grpoo", r"has no 'grpoo' \(did you mean 'grpo'\?\); its functions: grpo$"),
        ("powertrain_ppo.lossess:grpo", r"there is no module .* \(did you mean 'powertrain_ppo.losses'\?\)"),
        ("powertrain_pp.losses:grpo", r"\(did you mean 'powertrain_ppo'\?\)"),
        ("own.py:two", "names a file"),
        ("grpo", "not of the form"),
        ("5", "not of the form"),
        ("':'", "not of the form"),
    ],
)
def test_misspelt_loss_is_told_before_anything_starts(own, name, told):
    with pytest.raises(ConfigError, match=rf"^ppo.loss '.*{told}"):
        check(own, f"ppo.loss={name}")


def test_empty_loss_is_refused_with_the_configuration(own):
    with pytest.raises(ConfigError, match="section 'ppo': option 'loss' is ''; leave it out, or give a text"):
        check(own, "ppo.loss=''")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def mine(inputs, config): ...", "mine"),
        ("mine = lambda inputs, config: ...", "mine"),
        ("if True:\n    from os.path import join as mine", "mine"),
        ("class Losses:\n    def mine(inputs, config): ...", "Losses.mine"),
        ("from os import *", "anything"),
        ("globals()['mine'] = 1", "mine"),
        ("import a_module_that_only_workers_have\ndef mine(inputs, config): ...", "mine"),
    ],
)
def test_loss_of_ones_own_is_read_and_not_imported(own, monkeypatch, tmp_path, source, name):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "some_losses.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    assert check(own, f"ppo.loss=some_losses:{name}")
    assert "some_losses" not in sys.modules


@pytest.mark.parametrize("value", ["[null]", "['']", "[5]", "[[a]]", "['2', null]"])
def test_stop_takes_texts_alone(own, value):
    with pytest.raises(ConfigError, match=r"^ppo.stop: .* is no text"):
        check(own, f"ppo.stop={value}")


@pytest.mark.parametrize(("text", "count"), [("12", 2), ("1 2", 3)])
def test_stop_of_several_tokens_names_its_option(tiny_model, text, count):
    with pytest.raises(ConfigError, match=rf"^ppo.stop: text '{text}' is {count} tokens .*'1' \+ "):
        Prompts(tiny_model, [text])


def test_groups_of_one_are_refused(own):
    with pytest.raises(ConfigError, match=r"ppo.group_size is 1, .* advantage 0.* must be 2 or more"):
        check(own, "ppo.group_size=1")


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_no_deviation_makes_groups_of_one_useful(own, std):
    with pytest.raises(ConfigError, match=r"ppo.group_size is 1"):
        check(own, "ppo.group_size=1", f"ppo.advantage_std={std}", "ppo.skip_constant=false")


def test_groups_of_one_are_left_to_a_loss_with_terms_of_its_own(own):
    loss = "ppo.loss=powertrain.tensors.loss:cross_entropy"
    assert check(own, "ppo.group_size=1", loss, "ppo.skip_constant=false")
    with pytest.raises(ConfigError, match=r"ppo.group_size is 1"):
        check(own, "ppo.group_size=1", loss)

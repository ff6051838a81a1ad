"""A typo in each field of the resolved demo: exactly one fault, which names the field."""

import copy
from pathlib import Path

import pytest

from powertrain.errors import Violations
from powertrain.layout.parts import PART_OPTIONS
from powertrain.registry import Registry
from powertrain.run.config import load_config, resolve_config
from powertrain.run.options import CORE_OPTIONS, GROUPS, SCHEDULE_OPTIONS

FILE = Path(__file__).parents[1] / "examples" / "grpo_sums.yaml"
REGISTRY = Registry()
WRONG = {"int": "ten", "float": "fast", "bool": "yess", "str": ["a"], "list": 5, "mapping": 5}


def tables():
    """Return every mapping of the demo's file, by its dotted name ("" at the top), with the options that it takes."""
    config = load_config(FILE, ["lora.rank=8"], registry=REGISTRY)
    parts = {part.backend: (*part.spec.options, *PART_OPTIONS) for part in config.layout.parts}
    transfers = {f"transfer_options.{name}": spec.options for name, spec in REGISTRY.specs("transfer").items()}
    recipe = {config.recipe_spec.name: config.recipe_spec.options}
    return {"": CORE_OPTIONS, **GROUPS, "optim.schedule": SCHEDULE_OPTIONS, **parts, **transfers, **recipe}


FIELDS = [(where, option) for where, options in tables().items() for option in options]
NAMES = [f"{where}.{option.name}".lstrip(".") for where, option in FIELDS]


@pytest.fixture(scope="module")
def resolved():
    """Return the whole demo, every default written out."""
    data = load_config(FILE, ["lora.rank=8"], registry=REGISTRY).to_mapping()
    assert resolve_config(data, registry=REGISTRY).to_mapping() == data
    return data


def fault(resolved, where, change):
    """Return the one fault of the demo with `change` made to the mapping `where`."""
    data = copy.deepcopy(resolved)
    table = data
    for key in filter(None, where.split(".")):
        table = table.setdefault(key, {})
    change(table)
    with pytest.raises(Violations) as caught:
        resolve_config(data, registry=REGISTRY)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def misspelt(name):
    """Return a word that is no option: its last two letters changed round, or the last one doubled."""
    return name[:-2] + name[-1] + name[-2] if len(name) > 2 and name[-1] != name[-2] else name + name[-1]


@pytest.mark.parametrize(("where", "option"), FIELDS, ids=NAMES)
def test_misspelt_key_is_one_fault_that_names_the_key(resolved, where, option):
    word = misspelt(option.name)

    def change(table):
        table[word] = table.pop(option.name, option.default)

    told = fault(resolved, where, change)
    assert repr(word) in told
    assert f"{option.name}'?" in told


@pytest.mark.parametrize(("where", "option"), FIELDS, ids=NAMES)
def test_wrong_value_is_one_fault_that_names_the_key(resolved, where, option):
    told = fault(resolved, where, lambda table: table.update({option.name: WRONG[option.type]}))
    assert f"'{option.name}'" in told
    assert not where or where.rpartition(".")[2] in told


@pytest.mark.parametrize(
    ("where", "option"),
    [field for field in FIELDS if field[1].choices],
    ids=[name for name, field in zip(NAMES, FIELDS, strict=True) if field[1].choices],
)
def test_misspelt_choice_is_one_fault_that_names_the_choice(resolved, where, option):
    choice = max(filter(None, option.choices), key=len)
    told = fault(resolved, where, lambda table: table.update({option.name: misspelt(choice)}))
    assert f"'{option.name}'" in told
    assert f"(did you mean {choice!r}?)" in told


@pytest.mark.parametrize(
    ("where", "option"),
    [field for field in FIELDS if field[1].minimum is not None],
    ids=[name for name, field in zip(NAMES, FIELDS, strict=True) if field[1].minimum is not None],
)
def test_value_below_the_least_is_one_fault_with_both_numbers(resolved, where, option):
    told = fault(resolved, where, lambda table: table.update({option.name: option.minimum - 1}))
    assert f"'{option.name}' is {option.minimum - 1}" in told
    assert f"the least allowed is {option.minimum}" in told

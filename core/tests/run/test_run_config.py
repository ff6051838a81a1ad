from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from powertrain.errors import ConfigError, UnknownPluginError, Violations
from powertrain.options import OptionSpec
from powertrain.run.config import RunConfig, load_config
from powertrain.specs import BackendSpec, RecipeSpec

TRAIN = BackendSpec(
    name="tr",
    role="train",
    engine="nowhere:Train",
    axes=("d",),
    options=(
        OptionSpec(name="micro", type="int", default=4, minimum=1),
        OptionSpec(name="tag", type="str"),
        OptionSpec(name="cache", type="bool", default=True),
    ),
)
INFER = BackendSpec(
    name="inf",
    role="infer",
    engine="nowhere:Infer",
    axes=("d",),
    options=(OptionSpec(name="fill", type="float", default=0.5),),
)
RECIPE = RecipeSpec(
    name="loop",
    recipe="nowhere:Loop",
    options=(OptionSpec(name="steps", type="int", default=7), OptionSpec(name="extra", type="mapping", default={})),
)


class Known:
    """A registry of three specs that are not installed; their engines do not exist, so importing one would fail."""

    def backend(self, name: str) -> BackendSpec:
        return self._one("backend", name, {"tr": TRAIN, "inf": INFER})

    def recipe(self, name: str) -> RecipeSpec:
        return self._one("recipe", name, {"loop": RECIPE})

    def names(self, kind: str) -> list[str]:
        return {"backend": ["inf", "tr", "vl"], "transfer": ["local"], "recipe": ["loop"]}[kind]

    def _one(self, kind, name, table):
        if name not in table:
            raise UnknownPluginError(f"no {kind} {name!r} is installed; there are: {', '.join(table)}", plugin=name)
        return table[name]


BASE = "recipe: loop\nengines: tr:d1|inf:d1\nmodel: some/model\n"


@pytest.fixture
def read(tmp_path: Path):
    def load(text: str = "", *words: str, base: str = BASE, **kwargs) -> RunConfig:
        file = tmp_path / "sums.yaml"
        file.write_text(base + text)
        return load_config(file, words, registry=Known(), **kwargs)

    return load


def test_defaults_are_all_filled_in(read, tmp_path):
    config = read()
    assert config["seed"] == 0
    assert config["deterministic"] is True
    assert config["name"] == "sums"
    assert config["base"] == str(tmp_path)
    assert config.recipe_options == {"steps": 7, "extra": {}}
    assert config.head.fp32
    assert config.lora is None
    assert config.optim.schedule.total_steps == 7


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("seed=3", "seed", 3),
        ("optim.lr=1e-4", "optim", 1e-4),
        ("head.chunk=128", "head", 128),
        ("lora={rank: 4}", "lora", 4),
        ("lora.rank=4", "lora", 4),
    ],
)
def test_override_is_yaml_typed(read, word, key, value):
    found = read("", word)[key]
    assert value in (found.values() if isinstance(found, dict) else [found])


def test_override_reaches_the_recipes_section(read):
    assert read("loop: {steps: 9}\n", "loop.steps=11", "loop.extra.a=[1, 2]").recipe_options == {
        "steps": 11,
        "extra": {"a": [1, 2]},
    }


@pytest.mark.parametrize(
    ("engines", "text", "micro"),
    [
        ("tr:d1|inf:d1", "", 4),
        ("tr:d1|inf:d1", "tr: {micro: 5}\n", 5),
        ("tr[actor]:d1|inf:d1", "tr: {micro: 5}\nactor: {micro: 6}\n", 6),
        ("tr[actor]:d1?micro=7|inf:d1", "tr: {micro: 5}\nactor: {micro: 6}\n", 7),
    ],
)
def test_string_wins_over_part_over_backend(read, engines, text, micro):
    config = read(text, f"engines={engines}")
    part = config.layout.role("train")[0]
    assert config.engine_options(part)["micro"] == micro


def test_part_options_may_stand_in_a_section(read):
    config = read("inf: {frozen: true}\n")
    assert config.layout.pairs == ()


def test_every_fault_is_told_at_once(read):
    with pytest.raises(Violations) as caught:
        read("sed: 1\ndtype: float31\noptim: {lrr: 1, lr: fast}\nlopp: {}\ntr: {micra: 2}\nloop: {stepps: 1}\n")
    text = str(caught.value)
    for word in (
        "'sed' (did you mean 'seed'?)",
        "float31",
        "'lrr' (did",
        "fast",
        "'lopp' (did you mean 'loop'?)",
        "'micra'",
        "'stepps'",
    ):
        assert word in text


def test_key_that_stands_in_a_section_is_shown_its_place(read):
    with pytest.raises(Violations) as caught:
        read("lr: 1\nsteps: 3\n")
    assert "unknown key 'lr' (did you mean 'optim.lr'?)" in str(caught.value)
    assert "unknown key 'steps' (did you mean 'loop.steps'?)" in str(caught.value)


def test_missing_keys_are_all_named(read):
    with pytest.raises(Violations, match=r"(?s)'recipe' is required.*'engines' is required.*'model' is required"):
        read("seed: 1\n", base="")


def test_empty_file_lacks_the_required_keys(tmp_path):
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(Violations, match="'engines' is required"):
        load_config(tmp_path / "empty.yaml")


def test_layout_fault_stands_beside_the_others(read):
    with pytest.raises(Violations, match=r"(?s)seed.*tx"):
        read("seed: no\n", "engines=tx:d1|inf:d1")


def test_resolved_file_runs_again_as_it_is(read, tmp_path):
    config = read(
        "tr: {micro: 5}\nactor: {tag: x}\nenv: {A: 'b, c=d', B: 010, C: True}\n",
        "engines=tr[actor]:d1|inf:d1",
        "lora.rank=2",
    )
    file = tmp_path / "elsewhere" / "config.yaml"
    file.parent.mkdir()
    file.write_text(config.dump())
    again = load_config(file, registry=Known())
    assert again == config
    assert again.dump() == config.dump()


def test_override_of_the_resolved_file_still_counts(read, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(read("", "engines=tr[actor]:d1|inf:d1").dump())
    config = load_config(file, ["tr.micro=9"], registry=Known())
    assert config.engine_options(config.layout.part("actor"))["micro"] == 9


def test_mapping_form_of_engines_means_the_same(read):
    text = read("", "engines=tr:d1?micro=3|inf:d1")
    mapping = yaml.safe_dump({"engines": text.layout.to_mapping(), "recipe": "loop", "model": "some/model"})
    assert read("", base=mapping).layout == text.layout


def test_environment_values_stay_text(read):
    config = read("env: {A: 1, B: yes, D: ''}\n", "env.C=x=y, z", "env.E.F=1")
    assert config["env"] == {"A": "1", "B": "yes", "D": "", "C": "x=y, z", "E.F": "1"}


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("seed", "not of the form key=value"),
        ("=1", "not of the form key=value"),
        ("a..b=1", "not of the form key=value"),
        ("seed.x=1", "'seed' is 1 and holds no keys"),
        ("seed=[", "not YAML"),
    ],
)
def test_unusable_override_is_explained(read, word, match):
    with pytest.raises(Violations, match=match):
        read("seed: 1\n", word)


def test_fixed_key_cannot_be_overridden(read):
    with pytest.raises(Violations, match="'model' cannot be changed"):
        read("", "model=other", fixed=("model",))


MERGED = "loop: {extra: &a {A: 1, B: yes}}\n"


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("env: {<<: *a}\n", {"A": "1", "B": "yes"}),
        ("env: {<<: *a, B: no}\n", {"A": "1", "B": "no"}),
        ("env: &b {<<: *a, B: no}\ntr: {}\ninf: {}\n", {"A": "1", "B": "no"}),
        ("env: {<<: [*a, {A: 2, C: 3}]}\n", {"A": "1", "B": "yes", "C": "3"}),
    ],
)
def test_merge_key_lays_another_mapping_under(read, text, env):
    config = read(MERGED + text)
    assert config["env"] == env
    assert config.recipe_options["extra"] == {"A": 1, "B": True}


def test_merge_key_is_used_before_and_after_it_is_merged_again(read):
    text = "loop: {extra: {x: {y: &b {<<: &a {A: 1, B: 2}, B: 3}}, z: {<<: *b, A: 4}}}\n"
    assert read(text).recipe_options["extra"] == {"x": {"y": {"A": 1, "B": 3}}, "z": {"A": 4, "B": 3}}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: {b: &x {c: 1}, <<: *x, b: 2}\n", "key 'b' stands there twice"),
        ("a: 1\na: 2\n", "twice"),
        ("[1]\n", "holds a list"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_unusable_file_is_refused(read, text, match):
    with pytest.raises(ConfigError, match=match):
        read(text, base="")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml", registry=Known())


def test_part_named_like_a_key_is_refused(read):
    with pytest.raises(Violations, match="'model' has the name of a key"):
        read("", "engines=tr[model]:d1|inf:d1")


def test_relative_paths_are_read_from_the_files_folder(read, tmp_path, monkeypatch):
    (tmp_path / "reward.py").touch()
    other = tmp_path / "cwd"
    other.mkdir()
    (other / "data.jsonl").touch()
    monkeypatch.chdir(other)
    config = read()
    assert config.path("reward.py") == tmp_path / "reward.py"
    assert config.path("data.jsonl") == other / "data.jsonl"
    assert config.path("none") == tmp_path / "none"


def test_model_folder_beside_the_file_is_found(read, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    assert read("", "model=tiny")["model"] == str(tmp_path / "tiny")


def test_clip_zero_means_no_clipping(read):
    assert read("", "optim.clip=0").optim.clip is None
    assert read().optim.clip == 1.0


def test_date_stays_text(read):
    assert read("", "name=2026-01-31")["name"] == "2026-01-31"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optim.schedule.warmup_steps=7"], "'optim.schedule': warmup takes 7 of 7 steps"),  # the recipe's `steps`
        (["optim.schedule.warmup_steps=9", "loop.steps=9"], "warmup takes 9 of 9 steps"),
        (["optim.schedule.warmup_steps=6", "optim.schedule.total_steps=5"], "warmup takes 6 of 5 steps"),
        (["optim.schedule.warmup_ratio=1.0"], "warmup takes 7 of 7 steps"),
    ],
)
def test_schedule_that_cannot_be_is_refused_beside_the_other_faults(read, words, told):
    with pytest.raises(Violations) as caught:
        read("", *words, "sed=1")
    assert len(caught.value.problems) == 2
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model='null'"], "'model' is required"),  # the text null means none, as in a config string
        (["recipe=none"], "'recipe' is required"),
        (["engines=null"], "'engines' is required"),
        (["optim.lr=.nan"], "option 'lr' needs a value of type float, got nan"),
        (["timeouts.start=.nan"], "option 'start' needs a value of type float, got nan"),
        ([f"seed={2**63}"], f"option 'seed' is {2**63}; the most allowed is {2**63 - 1}"),
    ],
)
def test_value_that_no_run_can_use_is_refused(read, words, told):
    with pytest.raises(Violations) as caught:
        read("", *words)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["start", "step", "generate", "update", "engine"])
@pytest.mark.parametrize("value", [0, -1])
def test_deadline_that_is_over_before_it_begins_is_refused(read, name, value):
    with pytest.raises(Violations, match=f"option '{name}' is {value}.0; the least allowed is 0.001"):
        read("", f"timeouts.{name}={value}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("recipe: lop\nengines: tr:d1|inf:d1\nmodel: a/b\n", ["no recipe 'lop'"]),
        ("recipe: [a]\nengines: tr:d1|inf:d1\nmodel: a/b\n", ["option 'recipe' needs"]),
        ("recipe: loop\nengines: tr:d1|inf:d1\nmodel: [a]\n", ["option 'model' needs"]),
        ("recipe: loop\nengines: [a, b]\nmodel: a/b\n", ["(the key 'engines') is a config string or a mapping, not a"]),
        ("recipe: loop\nengines: 5\nmodel: a/b\n", ["(the key 'engines') is a config string or a mapping, not a"]),
        ("recipe: loop\nengines: {train: a}\nmodel: a/b\n", ["has no key 'train'"]),
        ("recipe: ''\nengines: tr:d1|inf:d1\nmodel: a/b\n", ["option 'recipe' is ''; leave it out, or give a text"]),
        (BASE + "base: /no/such\n", ["'base' is '/no/such', which is no folder"]),
        (BASE + "transfer: ''\n", ["option 'transfer' is ''; leave it out, or give a text"]),
        (BASE + "runs: ''\n", ["option 'runs' is ''; leave it out, or give a text"]),
        (BASE + "name: true\n", ["option 'name' needs a value of type str, got True"]),
        (BASE + "lora: {name: ''}\n", ["option 'name' is ''; leave it out, or give a text"]),
        (BASE + "lora: {targets: []}\n", ["'lora.targets' is []; it takes the ends of modules' names"]),
        (BASE + "lora: {targets: [1]}\n", ["'lora.targets' is [1]; it takes the ends of modules' names"]),
        (BASE + "lora: {targets: ['']}\n", ["'lora.targets' is ['']; it takes the ends of modules' names"]),
        (BASE + "env: {A: null}\n", ["'env': A is null; write the exact text in quotes"]),
        (BASE + "env: {A: }\n", ["'env': A is null; write the exact text in quotes"]),
        (BASE + "env: {null: x}\n", ["'env': null cannot be a variable's name"]),
        (BASE + "env: {A: [1]}\n", ["'env': A is ['1']; write the exact text in quotes"]),
        (BASE + "env: {'A=B': x}\n", ["'env': 'A=B' cannot be a variable's name"]),
        (BASE + "env: {POWERTRAIN_WORKER: x}\n", ["'env': POWERTRAIN_WORKER is powertrain's own; leave it out"]),
        (BASE + "env: {POWERTRAIN_STARTED_AGAIN: 1}\n", ["'env': POWERTRAIN_STARTED_AGAIN is powertrain's own"]),
        (
            "recipe: loop\nengines: tr:d1|inf:d1\nmodel: a/b\noptim: {schedule: {kind: cosine, warmup_steps: 9}}\n",
            ["warmup takes 9 of 7"],
        ),
        ("reciep: loop\nengines: tr:d1|inf:d1\nmodel: a/b\n", ["key 'reciep' (did you mean 'recipe'?)"]),
        ("recipe: loop\nenginse: tr:d1|inf:d1\nmodel: a/b\n", ["key 'enginse' (did you mean 'engines'?)"]),
        ("recipe: loop\nengines: tr:d1|inf:d1\nmodle: a/b\n", ["unknown key 'modle' (did you mean 'model'?)"]),
        (BASE + "vl: {a: 1}\n", ["section 'vl': no part of the layout is of that backend"]),
        (BASE + "tr: {fill: 1}\n", ["unknown option 'fill' (did you mean 'inf.fill'?)"]),
        (BASE + "loop: {lr: 1}\n", ["unknown option 'lr' (did you mean 'optim.lr'?)"]),
    ],
)
def test_each_fault_is_told_once(read, text, told):
    with pytest.raises(Violations) as caught:
        read("", base=text)
    assert len(caught.value.problems) == len(told), caught.value.problems
    assert f"has {len(told)} fault" in str(caught.value)
    assert all(any(word in problem for problem in caught.value.problems) for word in told), caught.value.problems

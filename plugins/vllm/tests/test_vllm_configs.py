"""A config that one major version of transformers wrote and another reads."""

import json
from types import SimpleNamespace

import pytest

from powertrain.errors import ConfigError
from powertrain_vllm import configs

NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
OLD = {"rope_theta": 100000.0, "rope_scaling": None}
KINDS = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}


def folder(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("installed", "config", "said"),
    [
        ("4.57.6", NEW, {"rope_theta": 100000.0}),
        ("4.57.6", OLD, {}),
        ("4.57.6", KINDS, {}),
        (
            "4.57.6",
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1.0, "partial_rotary_factor": 0.5},
        ),
        ("5.19.0", NEW, {}),
    ],
)
def test_an_old_transformers_is_told_what_it_would_not_read(tmp_path, monkeypatch, installed, config, said):
    monkeypatch.setattr(configs, "version", lambda name: installed)
    assert configs.overrides(folder(tmp_path, config)) == said


def rotary(base):
    return SimpleNamespace(base=base, rotary_dim=64)


@pytest.mark.parametrize("config", [NEW, OLD])
def test_another_base_than_the_files_is_refused(tmp_path, config):
    place = folder(tmp_path, config)
    configs.check_rope(place, [rotary(100000), SimpleNamespace(base=3)])
    with pytest.raises(ConfigError, match=r"with base 10000, and the model's config\.json says 100000"):
        configs.check_rope(place, [rotary(100000), rotary(10000.0)])


def test_layers_of_several_kinds_have_each_its_own(tmp_path):
    place = folder(tmp_path, KINDS)
    configs.check_rope(place, [rotary(1e4), rotary(1e6)])
    with pytest.raises(ConfigError, match=r"config\.json says 10000, 1e\+06"):
        configs.check_rope(place, [rotary(5e5)])


def test_a_file_that_says_nothing_is_not_held_to(tmp_path):
    configs.check_rope(folder(tmp_path, {}), [rotary(1e4)])

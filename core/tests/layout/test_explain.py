"""`powertrain explain`: tables for people, one stable object for programs."""

import argparse
import json

import pytest

from powertrain.cli import explain
from powertrain.errors import ConfigError, DeviceError, LayoutError


@pytest.fixture
def run(parse, monkeypatch, capsys):
    monkeypatch.setattr(explain, "parse_layout", parse)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words):
        parser = argparse.ArgumentParser()
        explain.add_arguments(parser)
        assert explain.execute(parser.parse_args(words)) == 0
        return capsys.readouterr().out

    return call


def _lines(text):
    return [line.split() for line in text.splitlines()]


def test_every_card_of_a_small_layout_is_listed(run):
    lines = _lines(run("fsdp:d4|vllm:d2t2 via p2p"))
    assert ["needs", "4", "cards"] in lines
    assert ["vllm", "1", "0", "2", "d=1", "p=0", "t=0"] in lines
    assert ["fsdp", "0", "3", "3", "d=3", "t=0", "c=0"] in lines
    assert ["weights:", "fsdp", "->", "vllm,", "colocated,", "via", "p2p"] in lines


def test_big_layout_is_shown_by_instance(run):
    text = run("fsdp:d64+vllm:d32t2")
    lines = _lines(text)
    assert ["fsdp", "0", "0-63", "0-63"] in lines
    assert ["vllm", "1", "0-1", "66-67"] in lines
    assert ["vllm", "31", "0-1", "126-127"] in lines
    assert ["vllm", "…", "…", "…", "28", "more"] in lines
    assert len(lines) < 50


def test_axes_have_titles_and_experts_are_derived(run):
    lines = _lines(run("megatron:d4t4e4?etp=2"))
    assert ["megatron", "t", "4", "tensor", "parallel"] in lines
    assert ["megatron", "expert", "dp", "2", "copies", "of", "the", "experts"] in lines


def test_sections_are_shown_apart(run):
    lines = _lines(run("megatron:(attn:d2t2|ffn:e4)"))
    assert ["megatron", "ffn", "e", "4", "expert", "parallel,", "expert", "layers"] in lines


def test_planned_engine_is_said_to_be_missing(run):
    text = run("megatron:d1|vllm:d1")
    assert "megatron (engine not there yet)" in text
    assert "vllm (engine not there yet)" not in text


def test_transfer_that_is_there_is_named_alone(run):
    assert run("fsdp:d1|vllm:d1 via shm").endswith("via shm\n")
    assert run("fsdp:d1|vllm:d1").endswith("via the first transfer that fits\n")


def test_options_tell_default_from_given(run):
    lines = _lines(run("vllm:d1?seed=3"))
    assert ["vllm", "seed", "3", "given"] in lines
    assert ["vllm", "gpu_memory_utilization", "0.9", "default"] in lines
    assert ["vllm", "frozen", "false", "default"] in lines


def test_values_are_not_read_as_markup(run):
    assert '"[bold]x[/bold]"' in run("fsdp:d1?note='[bold]x[/bold]'")


def test_json_is_complete(run):
    found = json.loads(run("megatron:d2e2+vllm[serve]:d2?seed=3 via p2p", "--json"))
    assert list(found) == ["schema", "layout", "mapping", "cards", "groups", "parts", "pairs"]
    assert (found["schema"], found["cards"]) == (1, 4)
    assert found["layout"] == "megatron:d2e2+vllm[serve]:d2?seed=3 via p2p"
    assert found["groups"] == [{"cards": [0, 1], "parts": ["megatron"]}, {"cards": [2, 3], "parts": ["serve"]}]
    assert found["pairs"] == [{"train": "megatron", "infer": "serve", "via": "p2p", "colocated": False}]
    train, infer = found["parts"]
    assert (train["status"], train["expert"], train["expert_axes"]) == ("planned", {"ep": 2, "etp": 1, "dp": 1}, None)
    assert infer["axes"]["d"] == {"size": 2, "title": "data parallel (instances)"}
    assert (infer["label"], infer["name"], infer["backend"], infer["role"]) == ("serve", "serve", "vllm", "infer")
    assert (infer["world"], infer["instances"], infer["cards_per_instance"], infer["cards"]) == (2, 2, 1, [2, 3])
    assert infer["options"]["seed"] == {"value": 3, "default": False}
    assert infer["options"]["frozen"] == {"value": False, "default": True}
    assert infer["ranks"] == [[0, 2, 0, 0, {"d": 0, "p": 0, "t": 0}], [1, 3, 1, 0, {"d": 1, "p": 0, "t": 0}]]
    assert infer["colocated_with"] == []


def test_json_names_colocated_parts(run):
    found = json.loads(run("fsdp:d1|vllm:d1", "--json"))
    assert [part["colocated_with"] for part in found["parts"]] == [["vllm"], ["fsdp"]]


def test_cluster_is_checked_when_given(run):
    assert run("fsdp:d8", "--cards", "4", "--nodes", "2")
    with pytest.raises(DeviceError, match=r"needs 8 cards, the cluster has 4 \(1 x 4\)"):
        run("fsdp:d8", "--cards", "4")
    with pytest.raises(DeviceError, match=r"needs 3 cards \(1 \+ 2\), the cluster has 2 \(2 x 1\)"):
        run("fsdp:d1+hf:d2", "--cards", "1", "--nodes", "2")


@pytest.mark.parametrize("words", [("--cards", "0"), ("--cards", "-1"), ("--cards", "8", "--nodes", "0")])
def test_cluster_without_cards_is_refused(run, words):
    with pytest.raises(ConfigError, match="both must be at least 1"):
        run("fsdp:d1", *words)


def test_one_card_is_not_cards(run):
    assert "needs 1 card\n" in run("fsdp:d1|hf:d1")


def test_faults_come_through(run):
    with pytest.raises(LayoutError, match="axis 'd' has size 0"):
        run("fsdp:d0", "--json")

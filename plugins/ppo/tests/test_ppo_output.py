from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from powertrain.errors import CheckpointError, ConfigError
from powertrain_ppo.export import name_base, plot, verify_export
from powertrain_ppo.progress import Progress
from powertrain_ppo.prompts import Prompts

torch = pytest.importorskip("torch")

ROWS = [
    {"step": 0, "eval/accuracy": 0.1, "weight_version": "1.1"},
    {
        "step": 1,
        "reward/mean": 0.25,
        "loss": -0.5,
        "mismatch/mean": 1e-6,
        "mismatch/max": 2e-6,
        "weight_version": "1.2",
    },
    {"step": 2, "reward/mean": 0.5, "loss": 0.5, "mismatch/mean": None, "mismatch/max": None, "weight_version": "1.3"},
]


def loss(logprobs, old, advantages, fresh=None, entropy=None, low=0.2, high=0.2):
    from powertrain.tensors.loss import LossInputs
    from powertrain_ppo.losses import grpo

    tensors = {"old_logprobs": torch.tensor(old), "advantages": torch.tensor(advantages)}
    tensors["fresh"] = torch.tensor(fresh or [1.0] * len(old))
    given = torch.tensor(logprobs, requires_grad=True)
    inputs = LossInputs(given, entropy, tensors, torch.ones(len(old)))
    return grpo(inputs, {"clip_low": low, "clip_high": high}), given


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 1.0, -1.2, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_clip_holds_only_where_it_lowers_the_gain(ratio, advantage, term, gradient):
    output, given = loss([math.log(ratio)], [0.0], [advantage])
    output.terms.sum().backward()
    assert output.terms.item() == pytest.approx(term, abs=1e-6)
    assert given.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_mismatch_counts_fresh_tokens_alone():
    output, _ = loss([0.0, 0.0], [0.25, 0.5], [1.0, 1.0], fresh=[1.0, 0.0])
    assert output.metrics["mismatch"].tolist() == [0.25, 0.0]


def test_entropy_is_measured_on_request():
    assert "entropy" not in loss([0.0], [0.0], [1.0])[0].metrics
    assert loss([0.0], [0.0], [1.0], entropy=torch.tensor([2.0]))[0].metrics["entropy"].item() == 2.0


def test_plain_line_shows_what_a_step_has(capsys):
    with Progress(2) as progress:
        for row in ROWS:
            progress.step(row["step"], row)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 0/2  accuracy 0.100  version 1.1"
    assert "reward 0.250" in lines[1]
    assert "|Δlogp| 1.0e-06" in lines[1]
    assert "Δ" not in lines[2]


def test_terminal_shows_a_table(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    with Progress(2) as progress:
        progress.step(1, ROWS[1])
        progress.doing("training")
    assert "reward" in capsys.readouterr().out


def test_plot_is_a_png(tmp_path):
    plot(ROWS, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_export_without_a_file_of_its_index_is_refused(tiny_model, tmp_path):
    import shutil

    folder = tmp_path / "export"
    shutil.copytree(tiny_model, folder)
    count = verify_export(folder)
    assert count > 0
    names = {"model.layers.0.mlp.up_proj.weight": "model.safetensors", "absent.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"does not load again.*absent"):
        verify_export(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        verify_export(folder)


def test_text_prompt_is_encoded_as_it_is(tiny_model):
    texts = Prompts(tiny_model)
    assert texts.decode(texts.encode({"prompt": "1+2="})).replace(" ", "") == "1+2="
    assert texts.stop_ids == (0,)
    assert len(Prompts(tiny_model, ["="]).stop_ids) == 2


def test_messages_go_through_the_chat_template(tiny_model):
    texts = Prompts(tiny_model)
    with pytest.raises(ConfigError, match="no chat template"):
        texts.encode({"prompt": [{"role": "user", "content": "1"}]})
    texts.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if not loop.last %}+{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )

    def text(*messages):
        ids = texts.encode({"prompt": [{"role": role, "content": content} for role, content in messages]})
        return texts.decode(ids).replace(" ", "")

    assert text(("user", "12")) == "12="
    assert text(("user", "12"), ("assistant", "3")) == "12+3"


def test_stop_text_of_two_tokens_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="2 tokens"):
        Prompts(tiny_model, ["12"])


def test_recipe_and_hooks_import_nothing_heavy():
    code = (
        "import sys, powertrain_ppo.hooks; print('powertrain_ppo.recipe' in sys.modules);"
        "import powertrain_ppo.recipe; print(*(m for m in ('torch', 'transformers', 'rich') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False"]


def test_exported_adapter_names_its_base_as_the_configuration_does(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"r": 2, "base_model_name_or_path": "/some/cache/folder"}))
    name_base(tmp_path, "owner/model")
    assert json.loads(file.read_text()) == {"r": 2, "base_model_name_or_path": "owner/model"}


def test_exported_model_has_no_base_to_name(tmp_path):
    name_base(tmp_path, "owner/model")
    assert list(tmp_path.iterdir()) == []

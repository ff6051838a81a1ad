"""Code on the pages is run: the engine of "Writing an engine" is installed, proven and trained; the examples work."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import powertrain as pt
from powertrain.cli.main import main
from powertrain.env import determinism_variables
from powertrain.registry.check import check
from powertrain.testing.tensors.models import character_model

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "writing-an-engine.md"
TITLED = re.compile(r'^```\w+ title="([^",]+)[^"]*"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def titled(page):
    return dict(TITLED.findall(page.read_text()))


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny Llama whose tokens are single characters."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    character_model(folder, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return the page's package, installed by pip into its folder `site`."""
    folder = tmp_path_factory.mktemp("page") / "powertrain-plain"
    for name, text in titled(PAGE).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "src" / "powertrain_plain" / "__init__.py").touch()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--disable-pip-version-check", "--target", str(folder / "site"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def installed(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package / "site"))
    for name, value in determinism_variables(0, {}).items():
        monkeypatch.setenv(name, value)
    return package


def test_page_shows_every_file_of_its_package():
    files = re.findall(
        r"^        (\S+)", PAGE.read_text().partition("powertrain-plain/\n")[2].partition("\n\n")[0], re.M
    )
    assert set(files) - {"src/powertrain_plain/__init__.py"} <= set(titled(PAGE))


def test_its_plugin_is_ready_and_says_what_the_page_says(installed):
    [info] = [info for info in pt.Registry().list("backend") if info.name == "plain"]
    [told] = check([info])
    assert (told["status"], told["role"], told["missing"]) == ("ready", "infer", [])
    assert {axis["name"] for axis in told["axes"]} == {"d"}


@pytest.mark.parametrize("line", re.findall(r"^\$ (powertrain .*plain.*)$", PAGE.read_text(), re.M))
def test_its_command_lines_are_accepted(line, installed, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    assert main([*words, "--dry-run"] if words[0] == "run" else words) == 0
    assert "plain" in capsys.readouterr().out


@pytest.mark.slow
def test_it_passes_the_conformance_suite(package):
    env = {**os.environ, "PYTHONPATH": str(package / "site"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # The engine draws one token a pass: tests of hundreds of draws would be most of the time here.
    options = ["-q", "-p", "no:cacheprovider", "-rs", "-k", "not test_draws_follow and not test_head"]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    reasons = set(re.findall(r"SKIPPED .*: (.*)", done.stdout))
    assert reasons == {"capability lora is none", "capability offload is none"}
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def test_its_first_request_has_the_tokens_of_hf(installed, model, capsys):
    script = installed / "try_plain.py"
    script.write_text(titled(PAGE)["try_plain.py"].replace("MODEL_FOLDER", str(model)))
    runpy.run_path(str(script))
    shown = np.array([int(word) for word in re.findall(r"\d+", capsys.readouterr().out)])
    assert len(shown) == 4
    greedy = pt.GenerateRequest(
        request_id="greedy", prompt=[3, 1, 4], sampling=pt.SamplingParams(max_tokens=6, temperature=0.0)
    )
    answers = []
    for engine in ("plain:d1", "hf:d1"):
        with pt.open_engine(engine, model=str(model), device="cpu") as opened:
            answers.append(opened.generate(greedy).completions[0])
    assert answers[0].tokens.tolist() == answers[1].tokens.tolist()
    np.testing.assert_allclose(answers[0].logprobs_t1, answers[1].logprobs_t1, atol=1e-5)


def test_it_is_trained_by_fsdp(installed, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "recipe": "ppo",
        "engines": "fsdp:d1|plain:d1",
        "model": str(model),
        "device": "cpu",
        "optim": {"lr": 1e-2},
        "ppo": {"data": "rows.jsonl", "reward": "score.py:score", "held_out": 2, "steps": 2, "max_tokens": 3},
    }
    recipe["ppo"] |= {"prompts_per_step": 2, "group_size": 4, "plot": False, "export": False}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "score.py").write_text("def score(record, text, tokens):\n    return sum(map(ord, text)) / 100\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1="}) + "\n" for a in range(8)))
    assert main(["run", "mine.yaml", "--folder", "out"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == ["1.1", "1.2", "1.3"]
    assert all(row["grad_norm"] > 0 and row["mismatch/max"] < 1e-4 for row in rows[1:])
    table = (ROOT / "docs" / "recipes" / "ppo.md").read_text()
    keys = {key for row in rows for key in row if not key.startswith("time/") and key != "step"}
    assert [key for key in sorted(keys) if f"`{key}`" not in table] == []


# ---- other pages
@pytest.mark.parametrize("page", ["docs/index.md", "README.md"])
def test_first_example_from_python_works(page, model, monkeypatch, capsys):
    for name, value in determinism_variables(0, {}).items():
        monkeypatch.setenv(name, value)
    [text] = [block for block in python_blocks(ROOT / page) if "open_engine" in block]
    exec(text.replace("runs/RUN/export", str(model)), {})
    assert "StepResult(loss=" in capsys.readouterr().out


def test_first_task_of_ones_own_is_accepted(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in titled(ROOT / "docs" / "index.md").items():
        (tmp_path / name).write_text(text.replace("path/to/hf/folder", str(model)))
    row = json.loads((tmp_path / "data.jsonl").read_text())
    rows = [{**row, "prompt": f"{n} + 2 ="} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["run", "mine.yaml", "--dry-run"]) == 0
    assert "# placement" in capsys.readouterr().out


def test_data_reward_and_loss_of_the_recipes_page_work():
    import torch

    from powertrain.tensors.loss import LossInputs, check_output

    names = {}
    for block in python_blocks(ROOT / "docs" / "recipes" / "ppo.md"):
        exec(block, names)
    record = names["data"]()[0]
    assert names["reward"](record, " 4", [1]) == 1.0
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    fields = {"advantages": torch.tensor([1.0, -1.0])}
    output = names["plain_policy_gradient"](LossInputs(logprobs, None, fields, torch.ones(2)), {})
    check_output(output, 2, "plain_policy_gradient").terms.sum().backward()
    assert logprobs.grad.tolist() == [-1.0, 1.0]

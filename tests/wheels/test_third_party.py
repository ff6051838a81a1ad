"""A third party's packages, built from a folder outside this repository and used by name beside core alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ROOT / "tests" / "third_party"

ASK = """
import json, os
import powertrain as pt

request = pt.GenerateRequest(request_id="one", prompt=[5, 6, 7], sampling=pt.SamplingParams(max_tokens=5))
with pt.open_engine("echo:d1k2", device="cpu", run_dir="asked") as engine:
    (said,) = engine.generate(request).completions
    print(json.dumps({"said": said.tokens.tolist(), "logs": sorted(os.listdir("asked/logs"))}))
"""


@pytest.mark.parametrize("package", sorted(path.name for path in THIRD_PARTY.iterdir()))
def test_plugin_takes_few_lines(package):
    (hooks,) = (THIRD_PARTY / package).glob("*/hooks.py")
    assert len([line for line in hooks.read_text().splitlines() if line.strip()]) <= 8
    assert len((THIRD_PARTY / package / "pyproject.toml").read_text().splitlines()) <= 15


def test_readme_shows_the_engine_that_is_tested_here():
    chapter = (ROOT / "README.md").read_text().partition("\n## Add an engine\n")[2].partition("\n## ")[0]
    shown = re.findall(r"```(?:toml|python)\n(.*?)```", chapter, re.DOTALL)
    package = THIRD_PARTY / "powertrain-echo"
    files = [package / "pyproject.toml", *(package / "powertrain_echo" / f"{n}.py" for n in ("hooks", "engine"))]

    def squeezed(text):
        return "\n".join(line for line in text.splitlines() if line.strip())

    assert [squeezed(text) in squeezed(file.read_text()) for text, file in zip(shown, files, strict=True)] == [True] * 3
    assert [squeezed(text) for text in shown[:2]] == [squeezed(file.read_text()) for file in files[:2]]


def test_third_partys_axis_is_explained(guest):
    (part,) = json.loads(guest.powertrain("explain", "echo:d1k2", "--json"))["parts"]
    assert part["axes"]["k"] == {"size": 2, "title": "echoes of a prompt"}
    assert (part["world"], part["instances"]) == (2, 1)
    assert [rank[-1] for rank in part["ranks"]] == [{"d": 0, "k": 0}, {"d": 0, "k": 1}]
    assert "echoes of a prompt" in guest.powertrain("explain", "echo:d1k2")


def test_third_partys_packages_check_as_ready(guest):
    rows = guest.checked()
    echo, parrot = rows["backend", "echo"], rows["recipe", "parrot"]
    assert (echo["status"], echo["dist"], [axis["name"] for axis in echo["axes"]]) == (
        "ready",
        "powertrain-echo",
        ["d", "k"],
    )
    assert (parrot["status"], parrot["version"], parrot["options"][0]["name"]) == ("ready", "2.0", "steps")


def test_third_partys_engine_answers(guest):
    assert guest.python(ASK) == {"said": [5, 6, 7, 5, 6], "logs": ["echo-r0.log", "echo-r1.log"]}


def test_third_partys_recipe_runs_its_engine(guest, recipe):
    file = guest.home / "parrot.yaml"
    file.write_text(f"recipe: parrot\nengines: echo:d1k3\nmodel: {recipe.parent / 'model'}\nparrot: {{steps: 2}}\n")
    guest.powertrain("run", file, "--folder", guest.home / "run")
    rows = guest.metrics(guest.home / "run")
    assert [(row["step"], row["said"]) for row in rows] == [(1, [1, 1, 1]), (2, [2, 2, 2])]


def test_third_partys_transfer_carries_the_weights_of_a_recipe(full, recipe):
    folder = full.home / "carried"
    words = ("engines=fsdp:d1|hf:d1 via pigeon", "ppo.held_out=0", "ppo.export=false", "ppo.plot=false")
    full.powertrain("run", recipe, "--folder", folder, *words)
    rows = full.metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch/max"] < 1e-3 for row in rows[1:])  # step 2 samples with what step 1 has trained
    assert all(row["time/transfer/bytes"] for row in rows[1:])
    assert all(row["grad_norm"] > 0 for row in rows[1:])


def test_core_is_untouched_by_its_guests(guest, open_wheel):
    for name, content in open_wheel(ROOT / "core").files.items():
        if name.startswith("powertrain/"):
            assert (guest.site / name).read_bytes() == content


def test_uninstalled_engine_is_unknown_again(guest):
    guest.uninstall("powertrain-echo")
    try:
        told = guest.refused("explain", "echo:d1k2")
        assert "no backend 'echo' is installed; there are: hf" in told
    finally:
        guest.install("powertrain-echo")
    assert guest.powertrain("explain", "echo:d1k2")

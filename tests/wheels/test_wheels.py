"""The dists as wheels: what is in them, and that they work in new environments, engines' packages there or not."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

import powertrain

ROOT = Path(__file__).parents[2]
DISTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
HEAVY = {"torch", "transformers", "peft", "safetensors", "accelerate", "matplotlib"}


@pytest.fixture(params=DISTS, ids=lambda path: path.name)
def source(request):
    return request.param


@pytest.fixture
def wheel(source, open_wheel):
    return open_wheel(source)


def test_wheel_holds_the_package_and_no_test(source, wheel):
    paths = [path for path in (source / "src").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    there = {name for name in wheel.files if not name.startswith(wheel.info)}
    assert there == {str(path.relative_to(source / "src")) for path in paths}
    assert not [name for name in there if {"tests", "conftest.py"} & set(Path(name).parts)]


def test_wheel_is_typed_and_carries_the_licence(wheel):
    packages = {Path(name).parts[0] for name in wheel.files if not name.startswith(wheel.info)}
    assert [f"{package}/py.typed" in wheel.files for package in packages] == [True]
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.files[f"{wheel.info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_metadata_tells_what_the_dist_is(source, wheel):
    told = wheel.metadata
    assert (told["Name"], told["Version"]) == (wheel.project["name"], powertrain.__version__)
    assert told["Requires-Python"] == ">=3.11"
    assert told["Summary"] == wheel.project["description"]
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().strip() == (source / "README.md").read_text().strip()


def test_entry_points_are_those_of_the_source(wheel):
    lines = wheel.files[f"{wheel.info}/entry_points.txt"].decode()
    written = metadata.EntryPoints._from_text(lines)  # what the registry reads
    wanted = {**wheel.project.get("entry-points", {}), "console_scripts": wheel.project.get("scripts", {})}
    assert {(e.group, e.name, e.value) for e in written} == {
        (group, name, value) for group, entries in wanted.items() for name, value in entries.items()
    }
    assert all(f"{e.module.replace('.', '/')}.py" in wheel.files or e.group == "console_scripts" for e in written)


def test_no_heavy_package_without_an_extra(wheel):
    assert not {need.name for need in wheel.needs if need.marker is None} & HEAVY


def test_each_requirement_has_a_lower_bound_and_takes_this_core(wheel):
    unbound = [str(n) for n in wheel.needs if not {">=", "==", "~="} & {bound.operator for bound in n.specifier}]
    assert not unbound
    for need in (need for need in wheel.needs if canonicalize_name(need.name) == "powertrain"):
        assert Version(powertrain.__version__) in need.specifier
        assert Version("1.0") not in need.specifier  # a new major version may change the interfaces


# With the engines' packages


def test_installed_packages_are_the_wheels(full):
    names = ["powertrain", *(f"powertrain_{path.name}" for path in DISTS[1:]), "powertrain_pigeon"]
    code = f"import importlib, json; print(json.dumps([importlib.import_module(n).__file__ for n in {names}]))"
    assert full.python(code) == [str(full.site / name / "__init__.py") for name in names]
    listed = json.loads(full.powertrain("engines", "--json"))["plugins"]
    assert {row["path"] for row in listed} == {str(full.site.resolve())}
    assert {row["dist"] for row in listed} == {name.replace("_", "-") for name in names}


def test_installed_recipe_runs_to_its_end(full, recipe):
    folder = full.home / "run"
    out = full.powertrain("run", recipe, "--folder", folder)
    assert out.rstrip().endswith(f"run folder: {folder}")
    rows = full.metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch/mean"] < 1e-4 for row in rows[1:])
    assert len({row["weight_version"] for row in rows}) == 3
    assert (folder / "export" / "model.safetensors").is_file()


def test_installed_layout_is_explained(full):
    told = full.powertrain("explain", "fsdp:d2|hf:d2 via shm")
    assert "weights: fsdp -> hf, colocated, via shm" in told


def test_installed_engines_check_as_ready(full):
    rows = full.checked()
    ready = {key for key, row in rows.items() if row["status"] == "ready"}
    wanted = [("backend", "fsdp"), ("backend", "hf"), ("recipe", "ppo"), ("launcher", "local"), ("transfer", "shm")]
    assert ready >= set(wanted)
    others = {key: row for key, row in rows.items() if key != ("backend", "vllm")}  # has an environment of its own
    assert {row["status"] for row in others.values()} == {"ready", "planned"}
    assert rows["backend", "vllm"]["missing"] == ["vllm"]


# Without the engines' packages


def test_core_alone_lists_itself_and_asks_for_engines(core):
    listed = json.loads(core.powertrain("engines", "--json"))["plugins"]
    assert {row["dist"] for row in listed} == {"powertrain"}
    assert "local" in core.powertrain("engines")
    told = core.refused("explain", "fsdp:d2|hf:d2")
    assert "no backend 'fsdp' is installed; there are: none" in told
    assert "no backend 'hf' is installed" in told


@pytest.mark.parametrize("text", ["megatron:d2t4p2+sglang:d4t2", "fsdp:d2|vllm:d2", "archon:d2+hf:d1"])
def test_layouts_are_explained_without_any_engine(bare, text):
    mapping = json.loads(bare.powertrain("explain", text, "--json"))
    assert mapping["layout"] == text
    assert mapping["cards"] == {"megatron": 24, "fsdp": 2, "archon": 3}[re.match(r"\w+", text)[0]]


@pytest.mark.parametrize("code", ["import powertrain", "from powertrain.cli import main; main(['engines', '--json'])"])
def test_light_commands_import_nothing_of_their_dependencies(bare, code):
    show = "sys.stdout = out; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    there = bare.python(f"import io, json, sys; out, sys.stdout = sys.stdout, io.StringIO(); {code}; {show}")
    needs = {"pluggy", "packaging", "yaml", "msgpack", "zmq", "rich", "numpy", "psutil"}
    assert not needs & set(there)
    assert [name for name in there if name.startswith("powertrain")] == ["powertrain"]


def test_check_names_what_is_missing_and_how_to_get_it(bare):
    rows = bare.checked()
    missing = {key: row for key, row in rows.items() if row["status"] == "missing"}
    assert missing.keys() >= {("backend", "fsdp"), ("backend", "hf"), ("recipe", "ppo"), ("transfer", "shm")}
    for (kind, name), row in missing.items():
        said = (
            f"{kind} {name!r} of {row['dist']} {row['version']} cannot be used: it needs {', '.join(row['missing'])},"
        )
        assert row["detail"] == f"{said} not installed here; {row['install']}"
        assert {"torch", "transformers", "vllm"} & set(row["missing"])
        assert row["install"] in {f"pip install '{row['dist']}[{extra}]'" for extra in ("engine", "torch")}
    assert {row["status"] for row in rows.values()} == {"ready", "planned", "missing"}


def test_recipe_without_its_packages_says_all_that_is_to_be_installed(bare, recipe):
    told = bare.refused("run", recipe)
    for name, kind in (("ppo", "recipe"), ("fsdp", "backend"), ("hf", "backend")):
        line = (
            rf"{kind} '{name}' of powertrain-{name} \S+ cannot be used: it needs .*transformers.*, not installed here; "
        )
        assert re.search(line + rf"pip install 'powertrain-{name}\[engine\]'", told)
    assert not list((bare.home / "runs").iterdir())


def test_dry_run_needs_no_engine(bare, recipe):
    assert "fsdp (fsdp, train) rank 0" in bare.powertrain("run", recipe, "--dry-run")

"""Every kind of failure from dists that pip has built and installed, under the oldest pluggy that core claims and the
newest there is. One process for each pluggy goes through all of them; the tests read what it met.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import powertrain.registry

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{dist}"
version = "2.5"
optional-dependencies = {{engine = ["fancy-gpu-lib"]}}

[project.entry-points."powertrain.backends"]
{plugin} = "{package}.{value}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
HOOKS = """
from powertrain import BackendSpec, hookimpl

@hookimpl
def powertrain_backend():
    return BackendSpec(name="{plugin}", role="train", engine="{package}.engine:Engine", api=(1, 0))
"""
ENGINE = "class Engine: pass"
HALF = "import powertrain\nclass Engine(powertrain.TrainEngine):\n    def prepare(self, env): pass"
DIE = "import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(7)"


def told(hooks="", old="", new="", engine=ENGINE, value="hooks", cause="", chained=None):
    """Return one way to fail: another `hooks` module, or the right one with `old` replaced by `new`."""
    return SimpleNamespace(hooks=hooks or HOOKS.replace(old, new), engine=engine, value=value, cause=cause, by=chained)


GONE = told(cause="its own module pt_removed.hooks is not there", chained="ModuleNotFoundError")
ON_GET = {
    "removed": GONE,
    "broken-import": told("1 / 0", cause="importing pt_brokenimport.hooks raised", chained="ZeroDivisionError"),
    "missing-dependency": told(
        "import fancy_gpu_lib",
        cause="needs 'fancy_gpu_lib', not installed here; way out: pip install 'pt-missingdependency[engine]'",
        chained="ModuleNotFoundError",
    ),
    "not-a-module": told(value="hooks:BackendSpec", cause="is a type; plugins are modules"),
    "hook-typo": told(old="d():", new="ds():", cause="powertrain_backends", chained="PluginValidationError"),
    "bad-signature": told(old="():", new="(config):", cause="config", chained="PluginValidationError"),
    "no-hook": told(old="@hookimpl", cause="`@powertrain.hookimpl` missing"),
    "raising-hook": told(old="return ", new="1 / 0  # ", cause="raised ZeroDivisionError", chained="ZeroDivisionError"),
    "wrong-return": told(old="BackendSpec(name", new="dict(name", cause="returned a dict, not a BackendSpec"),
    "api-too-new": told(old="(1, 0)", new="(99, 0)", cause="API 99.0, which is too new for this powertrain's"),
    "api-too-old": told(old="(1, 0)", new="(0, 9)", cause="API 0.9, which is too old for this powertrain's"),
}
ON_LOAD = {"not-ready": told(old="api=", new="status='planned', api=", cause="this release has no engine for it yet")}
ON_CHECK = {
    "unfinished": told(engine=HALF, cause="lacks the methods build, close, "),
    "crash": told(DIE, cause="ended with 7 and no answer; last line: last words"),
    "deadline": told("import time; time.sleep(600)", cause="checking it took more than 1 s"),
}
CASES = {**ON_GET, **ON_LOAD, **ON_CHECK}
BY_NAME = {"unknown", "allow-list", "blocked", "duplicate"}
"""Kinds that no single dist is at fault for."""

SCRIPT = """
import json, sys, warnings
import pluggy
from powertrain.errors import PluginError
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.registry.check import check

on_get, on_load, on_check, ours = json.load(sys.stdin)
registry, met = Registry(), {}

def attempt(work):
    try:
        return {"got": work().name}
    except PluginError as exc:
        chained = type(exc.__cause__).__name__ if exc.__cause__ else None
        about = {"plugin": exc.plugin, "dist": exc.dist, "version": exc.version, "group": exc.group}
        return {"kind": exc.kind, "line": str(exc), "chained": chained, **about}

def listed(registry):
    return {f"{info.name} {info.dist}": info.status for info in registry.list("backend") if info.name in ours}

before = listed(registry)
for name in on_get:
    met[name] = attempt(lambda: registry.backend(name))
for name in on_load:
    met[name] = attempt(lambda: registry.load_class(registry.backend(name)))
met["unknown"] = attempt(lambda: registry.backend("goood"))
met["allowlist"] = attempt(lambda: Registry(allow=["good", "goood"]).backend("good"))
met["blocked"] = attempt(lambda: Registry(allow=["pt-duplicate"]).backend("good"))
met["duplicate"] = attempt(lambda: registry.backend("duplicate"))
met["good"] = attempt(lambda: registry.backend("good"))
met["settled"] = attempt(lambda: Registry(allow=["pt-duplicate"]).backend("duplicate"))
after, engine = listed(registry), registry.load_class(registry.backend("good")).__module__
fresh = Registry(allow=[*on_get, "good"])
with warnings.catch_warnings(record=True, action="always") as caught:
    specs = [name for name in fresh.specs("backend")]
infos = [info for info in registry.list("backend") if info.name in ours]
results = {}
for deadline, late in ((60.0, False), (1.0, True)):
    some = [info for info in infos if (info.name == "deadline") is late]
    results |= {info.name: result for info, result in zip(some, check(some, deadline=deadline))}
print(json.dumps({
    "pluggy": [pluggy.__version__, pluggy.__file__], "before": before, "after": after, "met": met, "specs": specs,
    "warned": [str(warning.message) for warning in caught], "checked": results, "engine": engine,
    "layout": str(parse_layout("good:d2", registry=registry)),
}))
"""


def plain(kind):
    return kind.replace("-", "")


def pip_install(target, *words):
    """Install into a folder; returns the process."""
    quiet = ("-q", "--disable-pip-version-check", "--no-deps", "--no-compile", "--target", target)
    command = [sys.executable, "-m", "pip", "install", *map(str, (*quiet, *words))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def write(folder, dist, plugin, case):
    package = dist.replace("-", "_")
    (folder / package).mkdir(parents=True)
    names = {"dist": dist, "plugin": plugin, "package": package, "value": case.value}
    (folder / "pyproject.toml").write_text(PROJECT.format(**names))
    for file, text in (("__init__", ""), ("hooks", case.hooks), ("engine", case.engine)):
        (folder / package / f"{file}.py").write_text(text.replace("{plugin}", plugin).replace("{package}", package))
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder into which pip has installed a dist for each kind of failure, and good ones."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    dists = {f"pt-{plain(kind)}": (plain(kind), case) for kind, case in CASES.items()}
    dists |= {"pt-good": ("good", told()), "pt-duplicate": ("duplicate", told()), "pt-rival": ("duplicate", told())}
    folders = [write(sources / dist, dist, *of) for dist, of in dists.items()]
    done = pip_install(target, "--no-index", "--no-build-isolation", *folders)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(target / "pt_removed")  # as a removal that broke off leaves it
    return target


@pytest.fixture(scope="module", params=["oldest", "newest"])
def pluggy(request, tmp_path_factory):
    """Return (which, folder) of the oldest pluggy that core claims, or of the newest that there is."""
    (claimed,) = (need for need in map(Requirement, metadata.requires("powertrain")) if need.name == "pluggy")
    (bound,) = claimed.specifier
    assert bound.operator == ">="
    wanted = {"oldest": f"pluggy=={bound.version}", "newest": str(claimed)}[request.param]
    folder = tmp_path_factory.mktemp("pluggy")
    done = pip_install(folder, "--retries", "0", "--timeout", "15", wanted)
    if done.returncode:
        pytest.skip(f"pip cannot download {wanted} here")
    return SimpleNamespace(which=request.param, folder=folder, oldest=Version(bound.version))


@pytest.fixture(scope="module")
def found(installed, pluggy):
    """Return what one process met that has all these dists."""
    kept = {name: value for name, value in os.environ.items() if name != "POWERTRAIN_PLUGINS"}
    env = {**kept, "PYTHONPATH": os.pathsep.join([str(pluggy.folder), str(installed)])}
    groups = [[plain(kind) for kind in group] for group in (ON_GET, ON_LOAD, ON_CHECK)]
    job = json.dumps([*groups, [*map(plain, CASES), "good", "duplicate"]])
    command = [sys.executable, "-P", "-c", SCRIPT]
    done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(**json.loads(done.stdout))


def line(kind):
    return f"backend '{plain(kind)}' of pt-{plain(kind)} 2.5 cannot be used: "


def test_every_kind_is_met_here():
    kinds = re.findall(r"^    ([a-z-]+): ", powertrain.registry.__doc__, re.MULTILINE)
    assert sorted([*CASES, *BY_NAME]) == sorted(kinds)


def test_the_pluggy_is_the_one_that_was_asked_for(found, pluggy):
    version, file = found.pluggy
    assert file.startswith(str(pluggy.folder))
    assert Version(version) == pluggy.oldest if pluggy.which == "oldest" else Version(version) > pluggy.oldest


@pytest.mark.parametrize("kind", [*ON_GET, *ON_LOAD])
def test_failure_is_one_line_with_plugin_dist_version_and_cause(found, kind):
    met, case = found.met[plain(kind)], CASES[kind]
    assert met["kind"] == kind
    assert met["line"].startswith(line(kind))
    assert case.cause in met["line"]
    assert "\n" not in met["line"]
    assert met["chained"] == case.by
    assert (met["plugin"], met["dist"], met["version"]) == (plain(kind), f"pt-{plain(kind)}", "2.5")


@pytest.mark.parametrize("kind", CASES)
def test_check_tells_the_same(found, kind):
    result, case = found.checked[plain(kind)], CASES[kind]
    status = {"missing-dependency": "missing", "not-ready": "planned"}.get(kind, "failed")
    assert (result["status"], result["failure"]) == (status, kind if status == "failed" else "")
    assert result["detail"].startswith(line(kind))
    assert case.cause in result["detail"]
    assert "\n" not in result["detail"]


def test_two_dists_with_one_name_are_both_named(found):
    met, result = found.met["duplicate"], found.checked["duplicate"]
    assert met["kind"] == result["failure"] == "duplicate"
    for dist in ("pt-duplicate 2.5 (pt_duplicate.hooks", "pt-rival 2.5 (pt_rival.hooks"):
        assert dist in met["line"]
        assert dist in result["detail"]
    assert found.met["settled"] == {"got": "duplicate"}


def test_name_that_nobody_has_lists_all_that_there_are(found):
    met = found.met["unknown"]
    assert met["kind"] == "unknown"
    assert met["line"].startswith("no backend 'goood' is installed (did you mean 'good'?); there are: ")
    assert set(re.split(r"[,:] ", met["line"])) >= {plain(kind) for kind in CASES}


def test_allow_list_is_told_as_such(found):
    assert found.met["allowlist"]["kind"] == "allow-list"
    assert "'goood' (did you mean 'good'?)" in found.met["allowlist"]["line"]
    assert found.met["blocked"]["kind"] == "blocked"
    assert found.met["blocked"]["line"].startswith(line("good"))


def test_good_plugin_is_listed_taken_and_checked_beside_them_all(found):
    assert found.met["good"] == {"got": "good"}
    assert found.engine == "pt_good.engine"
    assert found.layout == "good:d2"
    assert (found.checked["good"]["status"], found.checked["good"]["detail"]) == ("ready", "")
    assert set(found.before.values()) == {"found", "duplicate"}
    rest = {"good pt-good": "loaded", "duplicate pt-duplicate": "duplicate", "duplicate pt-rival": "duplicate"}
    rest |= {f"{plain(kind)} pt-{plain(kind)}": "found" for kind in ON_CHECK}
    rest |= {f"{plain(kind)} pt-{plain(kind)}": "loaded" for kind in ON_LOAD}
    assert found.after == rest | {f"{plain(kind)} pt-{plain(kind)}": "failed" for kind in ON_GET}


def test_taking_all_warns_of_each_broken_one_and_gives_the_good_one(found):
    assert found.specs == ["good"]
    assert sorted(found.warned) == sorted(found.met[plain(kind)]["line"] for kind in ON_GET)

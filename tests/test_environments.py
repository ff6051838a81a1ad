"""Pins of the environments, and the judgement on a whole run (conftest.py at the root)."""

import json
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
pytest_plugins = ["pytester"]


def rows():
    lines = (ROOT / "requirements" / "environments.txt").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.strip() and not line.startswith("#")]
    return {name: (torch.partition("+")[0], bare.split(), dists.split()) for name, torch, bare, dists in cells}


ENVIRONMENTS = rows()


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name):
    lines = (ROOT / "requirements" / f"constraints-{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def needed(name):
    """Return what an environment is asked to hold: its requirements, and those of its dists that are no dists here."""
    _, bare, dists = ENVIRONMENTS[name]
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    texts = [line for line in lines if line and not line.startswith("#")] + bare
    for pattern in dists:
        for file in ROOT.glob(f"{pattern}/pyproject.toml"):
            project = tomllib.loads(file.read_text())["project"]
            texts += project["dependencies"]
    found = [Requirement(text) for text in texts]
    return [one for one in found if not normal(one.name).startswith("powertrain")]


# ---- pins
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_pins_are_exact_and_name_no_index(name):
    lines = (ROOT / "requirements" / f"constraints-{name}.txt").read_text().splitlines()
    assert re.fullmatch(rf"# Environment {name}: Python 3\.\d+, torch [\d.]+ \(CPU build\)\.", lines[0])
    body = [line for line in lines if not line.startswith("#")]
    assert [line for line in body if not re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+", line)] == []
    assert body == sorted(body, key=lambda line: line.split("==")[0])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_everything_an_environment_needs_is_pinned(name):
    pinned = pins(name)
    faults = [str(one) for one in needed(name) if not one.specifier.contains(pinned.get(normal(one.name), "0"))]
    assert faults == []
    assert pinned["torch"] == ENVIRONMENTS[name][0]


def test_this_interpreter_has_the_pinned_versions():
    name = Path(sys.prefix).name
    if name not in ENVIRONMENTS:
        pytest.skip("not an environment of requirements/environments.txt")
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])  # not what setuptools carries in itself
    installed = {normal(dist.metadata["Name"]): dist.version.partition("+")[0] for dist in found}
    wrong = {name: (installed.get(name), pin) for name, pin in pins(name).items() if installed.get(name, pin) != pin}
    assert wrong == {}
    assert {normal(one.name) for one in needed(name)} <= set(installed)


@pytest.mark.parametrize("command", [["bash", "scripts/make_env.sh"], [sys.executable, "scripts/constraints.py"]])
def test_an_unknown_environment_is_refused(command):
    command = [*command, "nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no environment nowhere; " in done.stderr.replace("'", "")
    assert all(name in done.stderr for name in ENVIRONMENTS)


# ---- a whole run
PROMISES = """
[environments.dev.engines]
swift = ["tests/test_swift.py"]
[environments.dev.budget]
what = "all"
seconds = 60
"""
SKIPS = """
[[skip]]
test = "tests/test_other.py*"
reason = "no * here"
why = "it is elsewhere"
"""
RAN = "def test_it():\n    assert True\n"


@pytest.fixture
def repository(pytester, monkeypatch):
    """Return a folder with our conftest, one promise and one listed skip."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("POWERTRAIN_TEST_ENVIRONMENT", raising=False)
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = engine(name): of that engine\n")
    folder = pytester.mkdir("tests")

    def run(*options, promises=PROMISES, skips=SKIPS, **modules):
        (folder / "promises.toml").write_text(promises)
        (folder / "skips.toml").write_text(skips)
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    return run


APART = ("-p", "xdist", "-n", "2", "--dist", "loadfile")


@pytest.mark.parametrize("apart", [(), APART], ids=["one process", "side by side"])
def test_a_kept_promise_passes(repository, apart):
    done = repository("--whole", *apart, test_swift=RAN)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["*swift: 1 tests ran*", "*s of 60 s for all*"])


def test_side_by_side_a_module_is_skipped_once_and_a_marker_counts(repository):
    skipped = "import pytest\npytest.skip('no card here', allow_module_level=True)\n"
    marked = "import pytest\n\n@pytest.mark.engine('swift')\n" + RAN
    promises = PROMISES.replace('["tests/test_swift.py"]', "[]")
    done = repository("--whole", *APART, promises=promises, test_other=skipped, test_any=marked)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["swift: 1 tests ran", "skipped 1: no card here (it is elsewhere)"])


def test_side_by_side_a_broken_promise_fails(repository):
    done = repository("--whole", *APART, test_any=RAN)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["FAILED swift is promised*ran no test of: tests/test_swift.py"])


@pytest.mark.parametrize(
    "text", ["", "import pytest\npytest.skip('no card here', allow_module_level=True)\n"], ids=["gone", "skipped"]
)
def test_a_promised_engine_without_a_test_fails(repository, text):
    skips = SKIPS.replace("test_other.py*", "test_swift.py")
    done = repository("--whole", test_swift=text, test_other=RAN, skips=skips)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["FAILED swift is promised*ran no test of: tests/test_swift.py"])


@pytest.mark.parametrize("marked", [True, False])
def test_a_promise_can_be_kept_by_a_marker(repository, marked):
    text = "import pytest\n\n" + "@pytest.mark.engine('swift')\n" * marked + RAN
    done = repository("--whole", promises=PROMISES.replace('["tests/test_swift.py"]', "[]"), test_any=text)
    assert done.ret == (0 if marked else 1)


def test_a_listed_skip_is_told_with_its_reason(repository):
    text = "import pytest\n\ndef test_it():\n    pytest.skip('no card here')\n"
    done = repository("--whole", test_swift=RAN, test_other=text)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["skipped 1: no card here (it is elsewhere)"])


def test_a_skip_off_the_list_fails(repository):
    text = "import pytest\n\ndef test_it():\n    pytest.skip('no mood')\n"
    done = repository("--whole", test_swift=RAN, test_other=text)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["FAILED tests/test_other.py::test_it was skipped*no mood"])


def test_an_entry_that_fits_nothing_is_told(repository):
    done = repository("--whole", test_swift=RAN)
    done.stdout.fnmatch_lines(["tests/skips.toml: nothing was skipped for tests/test_other.py*"])


def test_an_expected_failure_is_no_skip(repository):
    text = "import pytest\n\n@pytest.mark.xfail(reason='known')\ndef test_it():\n    assert False\n"
    assert repository("--whole", test_swift=RAN, test_other=text).ret == 0


def test_a_run_by_hand_promises_nothing(repository):
    done = repository(test_other="import pytest\n\ndef test_it():\n    pytest.skip('no mood')\n")
    assert done.ret == 0
    assert "promised" not in done.stdout.str()


def test_the_list_of_skips_says_why():
    listed = tomllib.loads((ROOT / "tests" / "skips.toml").read_text())["skip"]
    keys = {"test", "reason", "why"}
    assert [row for row in listed if set(row) - {"environments"} != keys or not row["why"].strip()] == []


def test_promises_name_files_that_exist():
    promised = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())["environments"]
    files = [file for about in promised.values() for some in about["engines"].values() for file in some]
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_every_environment_is_tested():
    """An environment that nobody runs tests in would break unseen."""
    assert list(tomllib.loads((ROOT / "tests" / "promises.toml").read_text())["environments"]) == list(ENVIRONMENTS)


OTHERS = """
[environments.dev.engines]
swift = ["tests/test_nowhere.py"]
[environments.other.engines]
slow = ["tests/test_other.py"]
"""


@pytest.mark.parametrize("environment", ["dev", "other"])
def test_a_run_keeps_the_promises_of_its_own_environment(repository, monkeypatch, environment):
    monkeypatch.setenv("POWERTRAIN_TEST_ENVIRONMENT", environment)
    done = repository("--whole", promises=OTHERS, skips="skip = []", test_other=RAN)
    assert done.ret == (1 if environment == "dev" else 0)


def test_a_skip_is_listed_for_its_environments(repository, monkeypatch):
    text = "import pytest\n\ndef test_it():\n    pytest.skip('no card here')\n"
    promises = OTHERS.replace("test_other", "test_swift")
    for environment, skips in {"other": SKIPS, "dev": SKIPS + "environments = ['other']"}.items():
        monkeypatch.setenv("POWERTRAIN_TEST_ENVIRONMENT", environment)
        where = promises.replace("test_nowhere", "test_swift")
        done = repository("--whole", promises=where, skips=skips, test_swift=RAN, test_other=text)
        assert done.ret == 1
        done.stdout.fnmatch_lines(["FAILED tests/test_other.py::test_it was skipped*no card here"])


def test_the_runs_of_all_environments_are_summed(repository, pytester):
    text = "import pytest\n\n@pytest.mark.xfail(reason='known')\ndef test_it():\n    assert False\n"
    tally = pytester.path / "tally.json"
    repository(
        "--whole", "--tally", str(tally), test_swift=RAN + "\ndef test_two():\n    assert True\n", test_other=text
    )
    counts = json.loads(tally.read_text())
    assert {kind: count for kind, count in counts.items() if count} == {"passed": 2, "xfailed": 1}
    closing = runpy.run_path(str(ROOT / "scripts" / "test.py"))["closing"]
    assert closing(Counter(counts) + Counter(passed=3, failed=1), 1.5) == "1 failed, 5 passed, 1 xfailed in 1.50s"

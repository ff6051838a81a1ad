"""How the suites work: capabilities decide, departures need a reason, nothing else can be taken away."""

import ast
import inspect
import sys
import textwrap
from pathlib import Path

import pytest

from powertrain.testing import WeightSinkSuite, WeightSourceSuite, listing
from powertrain.testing.listing import SUITES, renewed

sys.path.append(str(Path(__file__).parent))
from nested import run

ROOT = Path(__file__).parents[3]
STUBS = sorted(
    [*ROOT.glob("plugins/*/tests/test_*_conformance.py"), *ROOT.glob("core/tests/testing/test_*_conformance.py")]
)
GUARD = "test_every_test_is_there"


@pytest.fixture
def stub(tmp_path):
    """A function: body of a class `TestOne`, its base, what to select -> recorder."""

    def judged(body, base="LauncherSuite", select=GUARD):
        head = "import pytest\nfrom powertrain.testing import *\nfrom powertrain.testing import departs\n\n\n"
        name = "launcher = 'local'" if base == "LauncherSuite" else "backend = 'hf'"
        text = f"class TestOne({base}):\n    {name}\n" + textwrap.indent(textwrap.dedent(body), "    ")
        (tmp_path / "stub_file.py").write_text(head + text)
        return run(tmp_path / "stub_file.py", "-k", select)

    return judged


def test_plain_stub_passes(stub):
    assert stub("").outcomes["TestOne"] == {GUARD: ["passed"]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("test_status_lists_processes_in_start_order = None", "takes test_status_lists_processes_in_start_order away"),
        ("def test_close_leaves_no_process(self): pass", "overrides test_close_leaves_no_process without a reason"),
        ("@departs(reason=' ')\ndef test_close_leaves_no_process(self): pass", "without a reason"),
        ("@pytest.mark.skip\ndef test_close_leaves_no_process(self): pass", "without a reason"),
        ("@classmethod\ndef support(cls, name): pass", "overrides support, which a stub cannot"),
        ("@pytest.fixture\ndef made(self): pass", "overrides made, which a stub cannot"),
        ("OPEN = frozenset({'spec'})", "overrides OPEN, which a stub cannot"),
        ("@classmethod\ndef spec(cls): pass", "overrides spec, which a stub cannot"),
    ],
)
def test_what_a_stub_takes_away_without_a_reason_fails(stub, body, told):
    recorder = stub(body)
    assert recorder.failed("TestOne") == {GUARD}
    assert told in recorder.reasons["TestOne"][GUARD]


def test_guard_itself_cannot_be_overridden(stub):
    recorder = stub("def test_every_test_is_there(self): pass", select="closed_launcher")
    assert recorder.failed("TestOne") == {"test_closed_launcher_starts_nothing"}
    assert "overrides test_every_test_is_there" in recorder.reasons["TestOne"]["test_closed_launcher_starts_nothing"]


def test_override_with_a_reason_takes_the_tests_place_and_is_printed(stub):
    body = """
        @departs(reason="this launcher has no helpers")
        def test_stop_takes_descendants_too(self): pass
    """
    recorder = stub(body, select=f"{GUARD} or stop_takes")
    assert recorder.outcomes["TestOne"] == {GUARD: ["passed"], "test_stop_takes_descendants_too": ["passed"]}
    assert "test_stop_takes_descendants_too departs from its suite: this launcher has no helpers" in recorder.text


@pytest.mark.parametrize(("fails", "outcome"), [(True, "xfailed"), (False, "failed")])
def test_departure_that_must_fail_is_strict(stub, fails, outcome):
    body = f"""
        @departs(reason="not yet", xfail=True)
        def test_woken_engine_is_paused(self):
            assert {not fails}
    """
    recorder = stub(body, "InferEngineSuite", f"{GUARD} or woken_engine_is_paused")
    assert recorder.outcomes["TestOne"] == {GUARD: ["passed"], "test_woken_engine_is_paused": [outcome]}


def test_full_capability_cannot_be_departed_from(stub):
    body = "@departs(reason='too hard')\ndef test_unloaded_adapter_is_refused(self): pass"
    recorder = stub(body, "InferEngineSuite")
    assert "its spec calls lora full" in recorder.reasons["TestOne"][GUARD]


def test_tests_of_its_own_are_a_stubs_own_matter(stub):
    recorder = stub("def test_mine(self): pass", select=f"{GUARD} or mine")
    assert recorder.outcomes["TestOne"] == {GUARD: ["passed"], "test_mine": ["passed"]}


POOR = """
    from powertrain import BackendSpec, Support, hookimpl

    @hookimpl
    def powertrain_backend():
        grades = {"lora": Support.NONE, "offload": Support.PARTIAL, "pause_keep": Support.FULL}
        return BackendSpec(name="poor", role="infer", engine="powertrain_hf.engine:HfEngine", capabilities=grades)
"""


@pytest.fixture
def poor(tmp_path, monkeypatch):
    """An installed backend with few capabilities."""
    info, package = tmp_path / "powertrain_poor-1.0.dist-info", tmp_path / "powertrain_poor"
    info.mkdir()
    package.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: powertrain-poor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[powertrain.backends]\npoor = powertrain_poor.hooks\n")
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text(textwrap.dedent(POOR))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("POWERTRAIN_PLUGINS", raising=False)


def test_capabilities_of_the_spec_decide_what_runs(poor, stub):
    select = "unloaded_adapter or draws_do_not_depend or woken_engine_is_paused or frozen_request"
    recorder = stub("backend = 'poor'", "InferEngineSuite", select)
    assert recorder.outcomes["TestOne"] == {
        "test_unloaded_adapter_is_refused": ["skipped"],
        "test_draws_do_not_depend_on_the_batch": ["skipped"],
        "test_woken_engine_is_paused": ["passed"],
        "test_frozen_request_can_be_aborted": ["passed"],
    }
    assert recorder.reasons["TestOne"]["test_unloaded_adapter_is_refused"] == "Skipped: capability lora is none"
    assert recorder.reasons["TestOne"]["test_draws_do_not_depend_on_the_batch"].endswith("determinism is unknown")


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.name)
def test_stub_has_at_most_15_lines(path):
    for node in ast.parse(path.read_text()).body:
        assert node.end_lineno - node.lineno < 15
    assert "departs" not in path.read_text()


@pytest.mark.parametrize("suite", [*SUITES, WeightSourceSuite, WeightSinkSuite], ids=lambda suite: suite.__name__)
def test_every_interface_has_its_tests_and_each_says_what_a_failure_means(suite):
    found = listing.tests_of(suite)
    assert len(found) >= 15
    assert [name for name, text in found.items() if len(text.split()) < 6] == []
    long = {name: len(inspect.getsource(getattr(suite, name)).splitlines()) for name in found}
    assert {name: lines for name, lines in long.items() if lines > 20} == {}


def test_page_lists_all_tests():
    page = (ROOT / "docs" / "conformance.md").read_text()
    assert page == renewed(page), "run: python -m powertrain.testing.listing docs/conformance.md"
    assert all(name in page for suite in SUITES for name in suite.OPEN)

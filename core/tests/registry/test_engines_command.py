"""`powertrain engines`, and what the command line does with errors."""

import json
import os
import signal
import subprocess
import sys

import pytest

from powertrain.cli import main
from powertrain.cli import main as exported_main
from powertrain.cli.engines import listing
from powertrain.cli.main import COMMANDS
from powertrain.registry import Registry
from powertrain.registry.check import check

KEYS = {
    *("name", "kind", "group", "dist", "version", "path", "module", "status", "detail", "failure"),
    *("role", "summary", "axes", "options", "capabilities", "missing", "install", "api"),
}
FULL = """
from powertrain import BackendSpec, OptionSpec, Support, hookimpl
print("noise on stdout")

@hookimpl
def powertrain_backend():
    return BackendSpec(
        name="full", role="infer", engine="zz_full.engine:Engine", axes=("d", "t", "e"), summary="all of it",
        capabilities=dict(lora=Support.FULL, determinism=Support.PARTIAL), requires=("sys", {requires}),
        options=(OptionSpec(name="size", type="int", default=3),), install="pip install full", status={status!r},
    )
"""


@pytest.fixture
def only(dists):
    """Limit every registry of the test to the named plugins; returns the one checked row of a single plugin."""

    def checked(*names):
        dists.monkeypatch.setenv("POWERTRAIN_PLUGINS", ",".join(names))
        return [row for row in listing(check=True) if row["name"] in names]

    return checked


def test_plain_json_has_stable_sorted_rows(dists, capsys):
    dists.add("two")
    dists.add("one", hooks="1 / 0")
    assert main(["engines", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"schema", "powertrain", "api", "checked", "plugins"} == set(document)
    assert (document["schema"], document["checked"]) == (1, False)
    rows = document["plugins"]
    assert all(set(row) == KEYS for row in rows)
    assert [(row["name"], row["kind"]) for row in rows] == sorted((row["name"], row["kind"]) for row in rows)
    one = next(row for row in rows if row["name"] == "one")
    assert (one["status"], one["detail"], one["role"], one["axes"]) == ("found", "", None, None)


def test_check_shows_what_the_spec_says(dists, only):
    dists.add("full", hooks=FULL.format(requires="", status="ready"), files={"engine.py": "class Engine: pass"})
    (row,) = only("full")
    assert set(row) == KEYS
    assert (row["status"], row["detail"], row["role"], row["missing"]) == ("ready", "", "infer", [])
    assert [(axis["name"], axis["instances"], axis["world"]) for axis in row["axes"]] == [
        ("d", True, True),
        ("t", False, True),
        ("e", False, False),
    ]
    assert row["capabilities"] == {"determinism": "partial", "lora": "full"}
    assert [(option["name"], option["default"]) for option in row["options"]] == [("size", 3)]
    assert row["api"] == [1, 0]
    assert "zz_full" not in sys.modules


def test_check_tells_planned_missing_and_failed_apart(dists, only):
    dists.add("full", hooks=FULL.format(requires="'fancy_gpu_lib'", status="ready"))
    dists.add("plan", hooks=FULL.replace("full", "plan").format(requires="'fancy_gpu_lib'", status="planned"))
    dists.add("gone")
    dists.add("bad", hooks="1 / 0")
    dists.add("needs", hooks="import fancy_gpu_lib")
    rows = {row["name"]: row for row in only("full", "plan", "gone", "bad", "needs")}
    assert {name: (row["status"], row["failure"]) for name, row in rows.items()} == {
        "bad": ("failed", "broken-import"),
        "full": ("missing", ""),
        "gone": ("failed", "removed"),
        "needs": ("missing", ""),
        "plan": ("planned", ""),
    }
    assert "ZeroDivisionError" in rows["bad"]["detail"]
    assert rows["full"]["missing"] == rows["plan"]["missing"] == ["fancy_gpu_lib"]
    assert rows["full"]["install"] == "pip install full"
    assert all(row["detail"].startswith(f"backend '{name}' of zz-{name} 1.0 ") for name, row in rows.items())


def test_check_names_the_methods_that_an_engine_lacks(dists, only):
    engine = "import powertrain as pt\nclass Engine(pt.TrainEngine):\n    def prepare(self, env): pass"
    dists.add("half", files={"engine.py": engine})
    (row,) = only("half")
    assert (row["status"], row["failure"]) == ("failed", "unfinished")
    assert "lacks the methods build, close, " in row["detail"]


def test_check_survives_a_plugin_that_dies(dists, only):
    dists.add("good", files={"engine.py": "class Engine: pass"})
    dists.add("dies", hooks="import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(7)")
    rows = {row["name"]: row for row in only("good", "dies")}
    assert rows["good"]["status"] == "ready"
    assert rows["dies"]["failure"] == "crash"
    assert "ended with 7" in rows["dies"]["detail"]
    assert rows["dies"]["detail"].endswith("last words")


def test_check_ends_a_plugin_that_hangs(dists):
    dists.add("hangs", hooks="import time; time.sleep(600)")
    infos = [info for info in Registry().list() if info.name == "hangs"]
    (result,) = check(infos, deadline=1.0)
    assert (result["status"], result["failure"]) == ("failed", "deadline")
    assert "more than 1 s" in result["detail"]


def test_check_is_not_held_by_a_process_that_a_plugin_leaves(dists):
    left = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)'])"
    record = "import pathlib; pathlib.Path(__file__).with_name('pid').write_text(str(p.pid))"
    site = dists.add("leaves", files={"engine.py": f"{left}\n{record}\nclass Engine: pass"})
    infos = [info for info in Registry().list() if info.name == "leaves"]
    try:
        (result,) = check(infos, deadline=60.0)
    finally:
        os.kill(int((site / "zz_leaves" / "pid").read_text()), signal.SIGKILL)
    assert result["status"] == "ready"


def test_duplicates_are_shown_and_not_tried(dists, only):
    dists.add("dup", dist="zz-first", folder="a", hooks="1 / 0")
    dists.add("dup", dist="zz-second", folder="b")
    rows = only("dup")
    assert [(row["dist"], row["status"], row["failure"]) for row in rows] == [
        ("zz-first", "duplicate", "duplicate"),
        ("zz-second", "duplicate", "duplicate"),
    ]
    assert all("zz-first 1.0" in row["detail"] and "zz-second 1.0" in row["detail"] for row in rows)


@pytest.mark.parametrize("flags", [[], ["--check"]], ids=["plain", "check"])
def test_human_table_spells_kinds_and_failures_out(dists, only, capsys, flags):
    dists.add("bad", hooks="1 / 0")
    dists.add("plan", hooks=FULL.replace("full", "plan").format(requires="", status="planned"))
    dists.monkeypatch.setenv("POWERTRAIN_PLUGINS", "bad,plan")
    assert main(["engines", *flags]) == 0
    out = capsys.readouterr().out
    assert "backend" in out
    assert ("engine not there yet" in out) is bool(flags)
    assert ("backend 'bad' of zz-bad 1.0 cannot be used: importing" in out) is bool(flags)


def test_unknown_word_in_the_allow_list_ends_with_one_block(dists, capsys):
    dists.monkeypatch.setenv("POWERTRAIN_PLUGINS", "nosuch")
    assert main(["engines"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: POWERTRAIN_PLUGINS names 'nosuch', neither a plugin nor a dist")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "status", "told"),
    [
        (["--version"], 0, "powertrain 0."),
        (["--help"], 0, "explain"),
        (["nosuch"], 2, "no command 'nosuch'; there are: run"),
        ([], 2, "COMMAND"),
        (["engines", "--nosuch"], 2, "--nosuch"),
    ],
)
def test_usage_is_answered_with_a_status(capsys, argv, status, told):
    assert exported_main(argv) == status
    out, err = capsys.readouterr()
    assert told in (err if status else out)


def test_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("powertrain.cli.engines.execute", interrupted)
    assert main(["engines"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_reader_that_leaves_early_is_no_traceback():
    code = "from powertrain.cli import main; raise SystemExit(main(['engines', '--json']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(60) in {0, 141}
    assert error == ""


def test_table_of_commands_names_what_the_readme_promises():
    assert [name for name, _, _ in COMMANDS] == ["run", "resume", "engines", "explain", "plan"]

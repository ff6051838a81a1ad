"""The local launcher with real processes: starting, logs, readiness, ends, and no orphan however the driver goes."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from powertrain.errors import ConfigError, DeadlineError, StateError, WorkerError
from powertrain.interfaces.launcher import ProcessSpec
from powertrain.launch.local import LocalLauncher, line_buffered
from powertrain.launch.ports import free_port

LIMIT = 30.0
"""Seconds that any wait of these tests may take on a busy host."""
SLEEPER = "import time; print('up'); time.sleep(600)"


@pytest.fixture
def launcher(tmp_path):
    made = LocalLauncher({"grace": 0.2}, logs=str(tmp_path / "logs"))
    yield made
    made.close()


def python(name, code, *, ready="", env=None, node=0):
    values = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"} if env is None else env
    return ProcessSpec(
        name=name, argv=(sys.executable, "-c", textwrap.dedent(code)), env=values, ready=ready, node=node
    )


def eventually(check):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.02)
    return check()


def gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def log_of(launcher, name):
    return Path(launcher.logs, f"{name}.log")


def whole_lines(log):
    text = log.read_text()  # an unbuffered print writes its parts one by one
    return text if text.endswith("\n") else ""


def status_of(launcher, name):
    return {status.name: status for status in launcher.status()}[name]


def code_of(launcher, name):
    eventually(lambda: status_of(launcher, name).code is not None)
    return status_of(launcher, name).code


def test_target_gets_exactly_its_environment(launcher, monkeypatch):
    monkeypatch.setenv("LEAKED", "1")
    env = {"GIVEN": "a,b=c d", "PATH": "/usr/bin"}
    code = "import os; print({n: v for n, v in os.environ.items() if n != 'LC_CTYPE'})"
    launcher.start([python("one", code, env=env)])
    assert code_of(launcher, "one") == 0
    assert log_of(launcher, "one").read_text() == f"{env}\n"


def test_lines_are_in_the_log_while_it_runs(launcher):
    launcher.start([python("rollout/1", SLEEPER)])
    assert eventually(lambda: log_of(launcher, "rollout/1").read_text() == "up\n")
    status = status_of(launcher, "rollout/1")
    assert (status.code, status.tail) == (None, "up")
    assert psutil.Process(status.pid).cmdline()[1] == "-c"


def test_process_starts_where_a_thousand_files_are_open(launcher):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this host allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(Path(os.devnull).open("rb"))
        launcher.start([python("one", "raise SystemExit(7)")])
        assert code_of(launcher, "one") == 7


@pytest.mark.parametrize(
    ("code", "seen"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9), ("import os; os.abort()", -6)],
)
def test_exit_status_is_the_targets_own(launcher, code, seen):
    launcher.start([python("one", code)])
    assert code_of(launcher, "one") == seen


def test_one_bad_command_starts_none(launcher):
    bad = ProcessSpec(name="bad", argv=("/no/such/program",), env={})
    before = set(psutil.Process().children())
    with pytest.raises(WorkerError, match=r"bad could not be started.*no/such/program"):
        launcher.start([python("good", SLEEPER), bad])
    assert launcher.status() == []
    assert set(psutil.Process().children()) <= before


def test_server_is_ready_when_its_url_answers(launcher):
    port = free_port()
    code = f"""
        import http.server, time
        http.server.HTTPServer(("127.0.0.1", {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
    """
    launcher.start([python("server", code, ready=f"http://127.0.0.1:{port}/"), python("worker", SLEEPER)])
    launcher.wait_ready(["server", "worker"], deadline=LIMIT)
    assert status_of(launcher, "server").code is None


def test_server_that_dies_is_told_with_its_log(launcher):
    code = "print('no memory'); raise SystemExit(3)"
    launcher.start([python("server", code, ready=f"http://127.0.0.1:{free_port()}/")])
    with pytest.raises(WorkerError, match=r"(?s)server ended with status 3.*server\.log:\nno memory") as caught:
        launcher.wait_ready(["server"], deadline=LIMIT)
    assert caught.value.worker == "server"
    assert caught.value.log == str(log_of(launcher, "server"))


def test_server_that_is_late_is_told_with_its_log(launcher):
    launcher.start([python("server", SLEEPER, ready=f"http://127.0.0.1:{free_port()}/")])
    eventually(lambda: log_of(launcher, "server").read_text())
    with pytest.raises(DeadlineError, match=r"(?s)server was not ready .* after 0.1 s.*up") as caught:
        launcher.wait_ready(["server"], deadline=0.1)
    assert caught.value.who == "server"


def test_process_that_ignores_the_request_is_killed(launcher):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    launcher.start([python("deaf", code), python("other", SLEEPER)])
    eventually(lambda: log_of(launcher, "deaf").read_text())
    launcher.stop(["deaf"], grace=0.1)
    assert status_of(launcher, "deaf").code == -signal.SIGKILL
    assert status_of(launcher, "other").code is None


def test_process_may_tidy_up_within_the_grace(launcher):
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("tidied"), sys.exit(0)))
        print("up"); time.sleep(600)
    """
    launcher.start([python("polite", code)])
    eventually(lambda: log_of(launcher, "polite").read_text())
    launcher.stop(["polite"], grace=LIMIT)
    assert status_of(launcher, "polite").code == 0
    assert log_of(launcher, "polite").read_text() == "up\ntidied\n"


FAMILY = """
    import subprocess, sys, time
    away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    near = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(away.pid, near.pid)
"""


@pytest.mark.parametrize("main_dies", [True, False])
def test_grandchildren_go_too(launcher, main_dies):
    launcher.start([python("server", textwrap.dedent(FAMILY) + ("" if main_dies else "time.sleep(600)"))])
    text = eventually(lambda: whole_lines(log_of(launcher, "server")))
    if not main_dies:
        launcher.stop(["server"], grace=0.2)
    pids = [int(pid) for pid in text.split()]
    assert len(pids) == 2
    assert eventually(lambda: all(gone(pid) for pid in pids))
    assert code_of(launcher, "server") is not None


DRIVER = """
    import os, sys, textwrap, threading, time
    from powertrain.interfaces.launcher import ProcessSpec
    from powertrain.launch.local import LocalLauncher
    family = {family!r} + "time.sleep(600)"
    launcher = LocalLauncher({{"grace": 0.2}}, logs=sys.argv[1])
    spec = ProcessSpec(name="server", argv=(sys.executable, "-c", family), env={{"PYTHONUNBUFFERED": "1"}})
    thread = threading.Thread(target=launcher.start, args=([spec],))
    thread.start(); thread.join()
    {extra}
    print("started", flush=True)
    time.sleep(600)
"""
FORKED_COPY = "os.fork() or (os.setsid(), time.sleep(20), os._exit(0))"


@pytest.mark.parametrize(
    ("number", "extra"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
        (signal.SIGKILL, ""),
        (signal.SIGKILL, FORKED_COPY),
    ],
)
def test_no_orphan_when_the_driver_goes(tmp_path, number, extra):
    code = textwrap.dedent(DRIVER).format(family=textwrap.dedent(FAMILY), extra=extra)
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "server.log"
    try:
        assert driver.stdout.readline() == b"started\n"
        text = eventually(lambda: whole_lines(log))
        watcher, target = sorted(psutil.Process(driver.pid).children(recursive=True), key=lambda found: found.pid)[:2]
    finally:
        driver.send_signal(number)
        driver.wait(LIMIT)
        driver.stdout.close()
    pids = [*map(int, text.split()), watcher.pid, target.pid]
    assert len(pids) == 4
    assert eventually(lambda: all(gone(pid) for pid in pids))


def test_driver_thread_may_end_while_its_processes_live(launcher):
    thread = threading.Thread(target=launcher.start, args=([python("one", SLEEPER)],))
    thread.start()
    thread.join()
    assert eventually(lambda: log_of(launcher, "one").read_text() == "up\n")
    assert status_of(launcher, "one").code is None


def test_target_dies_with_its_watcher(launcher):
    launcher.start([python("one", SLEEPER)])
    pid = status_of(launcher, "one").pid
    psutil.Process(pid).parent().kill()
    assert eventually(lambda: gone(pid))
    assert code_of(launcher, "one") == -signal.SIGKILL


def test_close_ends_all_and_may_come_twice(launcher):
    launcher.start([python("a", SLEEPER), python("b", SLEEPER)])
    launcher.close()
    launcher.close()
    assert all(status.code is not None for status in launcher.status())
    with pytest.raises(StateError, match="closed"):
        launcher.start([python("c", SLEEPER)])


def test_forked_copy_does_not_close(launcher):
    launcher.start([python("one", SLEEPER)])
    launcher._owner += 1
    launcher.close()
    launcher._owner -= 1
    assert status_of(launcher, "one").code is None


def test_ended_name_may_be_used_again(launcher):
    launcher.start([python("one", "print('first')")])
    code_of(launcher, "one")
    launcher.start([python("one", "print('second')")])
    code_of(launcher, "one")
    assert log_of(launcher, "one").read_text() == "first\nsecond\n"
    assert len(launcher.status()) == 1


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([python("a", SLEEPER), python("a", SLEEPER)], "unique"),
        ([python("../a", SLEEPER)], "log file"),
        ([python("a", SLEEPER, node=1)], "node 1"),
        ([python("a", SLEEPER, ready="127.0.0.1:80")], "ready URL"),
        ([ProcessSpec(name="a", argv=(), env={})], "no command"),
    ],
)
def test_unusable_spec_is_refused(launcher, specs, told):
    with pytest.raises(ConfigError, match=told):
        launcher.start(specs)
    assert launcher.status() == []


def test_unknown_name_suggests_the_nearest(launcher):
    launcher.start([python("rollout", SLEEPER)])
    with pytest.raises(ConfigError, match="did you mean 'rollout'"):
        launcher.stop(["rolout"])


PATHS = {"PATH": os.environ["PATH"]}
SHELL = ("sh", "-c", "printenv LD_PRELOAD; true")


@pytest.mark.parametrize(("preload", "inserted"), [(None, True), ("", True), ("/no/such/memory_saver.so", False)])
def test_stdbuf_keeps_off_where_the_target_has_a_preload(launcher, preload, inserted):
    env = PATHS if preload is None else {**PATHS, "LD_PRELOAD": preload}
    launcher.start([ProcessSpec(name="server", argv=SHELL, env=env)])
    code_of(launcher, "server")
    text = log_of(launcher, "server").read_text()
    assert ("libstdbuf" in text) == inserted
    assert (preload or "") in text


def test_drivers_own_preload_does_not_count(launcher, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/no/such/driver.so")
    launcher.start([ProcessSpec(name="server", argv=SHELL, env=PATHS)])
    code_of(launcher, "server")
    text = log_of(launcher, "server").read_text()
    assert "libstdbuf" in text
    assert "driver.so" not in text


def test_python_programs_need_no_stdbuf(tmp_path):
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    for argv in ((str(script), "x"), (sys.executable, "-c", ""), ("/no/such/program",)):
        assert line_buffered(argv, PATHS) == argv


def test_ports_are_never_given_twice_in_two_drivers():
    code = "from powertrain.launch.ports import free_port as f; print(*(f() for _ in range(20)), flush=True); input()"
    first, last = 20000, 32000
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        theirs = [int(text) for text in other.stdout.readline().split()]
    finally:
        other.communicate("\n", timeout=LIMIT)
    ours = [free_port() for _ in range(20)]
    assert len({*theirs, *ours}) == 40
    assert all(first <= port <= last for port in ours)

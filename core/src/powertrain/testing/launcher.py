"""The suite of `Launcher`: real processes that start, write, answer, die and end, and what is told of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from powertrain.errors import ConfigError, DeadlineError, StateError, WorkerError
from powertrain.interfaces.launcher import Launcher, ProcessSpec, ProcessStatus
from powertrain.registry import Registry
from powertrain.testing.calls import Bounded
from powertrain.testing.suite import Suite

SLEEPER: Final = "import time; print('up'); time.sleep(600)"
SERVER: Final = """
    import http.server, sys
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
FAMILY: Final = """
    import subprocess, sys, time
    away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(away.pid); time.sleep(600)
"""
DEAF: Final = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
POLITE: Final = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("tidied"), sys.exit(0)))
    print("up"); time.sleep(600)
"""


class LauncherSuite(Suite):
    """Tests of a launcher. launcher: the plugin's name. options: for every test. Processes run this interpreter."""

    KIND = "launcher"
    NAMED_BY = "launcher"
    OPEN = Suite.OPEN | {"launcher", "options", "make", "slowness"}
    launcher: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    slowness: ClassVar[float] = 20.0
    """Seconds within which what a process did must be seen by the launcher."""

    def make(self, logs: Path) -> Launcher:
        """Return a new launcher that writes logs below `logs`; override it for one that needs more."""
        from powertrain.options import resolve

        options = resolve(self.spec().options, self.options, where=f"launcher {self.launcher}")
        launcher: Launcher = Registry().load_class(self.spec())(options, logs=str(logs))
        return launcher

    @pytest.fixture
    def made(self, tmp_path: Path) -> Iterator[Bounded]:
        """A launcher, closed at the end."""
        made = Bounded(self.make(tmp_path / "logs"), self.patience)
        yield made
        made.release()

    def test_status_lists_processes_in_start_order(self, made: Bounded) -> None:
        """One status for each process that was started, running ones with no code."""
        self._start(made, [_python("one", SLEEPER), _python("two", SLEEPER)])
        assert [(status.name, status.code) for status in made.status()] == [("one", None), ("two", None)]

    def test_nothing_started_has_no_status(self, made: Bounded) -> None:
        """A launcher begins empty, whatever ran before it on this host."""
        assert made.status() == []

    def test_pid_is_the_targets_own(self, made: Bounded) -> None:
        """Profilers and signals go to this number; a shell or a watcher in between is not the process."""
        self._start(made, [_python("one", "import os, time; print(os.getpid()); time.sleep(600)")])
        text = self._line(made, "one")
        assert int(text) == self._status(made, "one").pid

    def test_environment_is_exactly_what_was_given(self, made: Bounded, monkeypatch: pytest.MonkeyPatch) -> None:
        """Something of the driver's environment leaked, or a value with commas, spaces or `=` was cut up."""
        monkeypatch.setenv("LEAKED_FROM_THE_DRIVER", "1")
        env = {"GIVEN": "a,b=c d", "OTHER": "x=\"y\",z='w' $HOME", "PATH": os.defpath}
        code = "import os; print(sorted((n, v) for n, v in os.environ.items() if n != 'LC_CTYPE'))"
        self._start(made, [_python("one", code, env=env)])
        assert self._line(made, "one") == str(sorted(env.items()))

    def test_working_directory_is_the_one_given(self, made: Bounded, tmp_path: Path) -> None:
        """Relative paths of a recipe mean the folder that it was started in."""
        self._start(made, [_python("one", "import os; print(os.getcwd())", cwd=str(tmp_path))])
        assert self._line(made, "one") == str(tmp_path)

    def test_arguments_arrive_unchanged(self, made: Bounded) -> None:
        """A shell in between took arguments apart, or looked for variables in them."""
        odd = ("a b", "c,d=e", "$HOME", "'", "*", "")
        self._start(made, [_python("one", "import sys; print(sys.argv[1:])", arguments=odd)])
        assert self._line(made, "one") == str(list(odd))

    def test_lines_are_in_the_log_while_it_runs(self, made: Bounded) -> None:
        """A log that is filled only at the end says nothing about a process that hangs."""
        self._start(made, [_python("one", SLEEPER)])
        assert self._line(made, "one") == "up"
        status = self._status(made, "one")
        assert (status.code, status.tail) == (None, "up")

    def test_log_has_both_outputs_and_the_processes_name(self, made: Bounded) -> None:
        """Tracebacks go to standard error; a name with a slash makes a folder below the logs."""
        self._start(made, [_python("rollout/1", "import sys; print('out'); print('err', file=sys.stderr)")])
        self._code(made, "rollout/1")
        log = Path(made.target.logs, "rollout/1.log")
        assert self._status(made, "rollout/1").log == str(log)
        assert sorted(log.read_text().split()) == ["err", "out"]

    @pytest.mark.parametrize(("code", "seen"), [("raise SystemExit(7)", 7), ("", 0), ("import os; os.abort()", -6)])
    def test_exit_status_is_the_processes_own(self, made: Bounded, code: str, seen: int) -> None:
        """The status of a shell or a watcher stands in its place; a signal is told as a negative number."""
        self._start(made, [_python("one", code)])
        assert self._code(made, "one") == seen

    def test_all_are_started_or_none(self, made: Bounded) -> None:
        """One command cannot be started: it is named, and the others, which would wait for it, are ended."""
        bad = ProcessSpec(name="bad", argv=("/no/such/program",), env={})
        with pytest.raises(WorkerError, match=r"bad.*no/such/program"):
            self._start(made, [_python("good", SLEEPER), bad])
        assert [status for status in made.status() if status.code is None] == []

    def test_name_in_use_is_refused(self, made: Bounded) -> None:
        """Two processes would write into one log, and answer to one name."""
        self._start(made, [_python("one", SLEEPER)])
        with pytest.raises(ConfigError, match="one"):
            self._start(made, [_python("one", SLEEPER)])

    def test_name_of_an_ended_process_is_free(self, made: Bounded) -> None:
        """A server that died is restarted under its name."""
        for _ in range(2):
            self._start(made, [_python("one", "")])
            assert self._code(made, "one") == 0
        assert len(made.status()) == 1

    def test_unknown_name_is_told(self, made: Bounded) -> None:
        """A misspelt name must not be passed over: what it meant goes on running."""
        self._start(made, [_python("rollout", SLEEPER)])
        with pytest.raises(ConfigError, match="rolout"):
            made.stop(["rolout"])

    def test_server_is_ready_when_its_url_answers(self, made: Bounded) -> None:
        """`wait_ready` returns for a server that answers 200 on its port, and for a worker that lives."""
        from powertrain.launch.ports import free_port

        port = free_port()
        server = _python("server", SERVER, ready=f"http://127.0.0.1:{port}/", arguments=(str(port),))
        self._start(made, [server, _python("worker", SLEEPER)])
        made.wait_ready(["server", "worker"], deadline=self.slowness)
        assert [status.code for status in made.status()] == [None, None]

    def test_early_death_is_told_with_the_end_of_the_log(self, made: Bounded) -> None:
        """A server that died at once was waited for until the deadline, or its last words were not shown."""
        url = f"http://127.0.0.1:{self._port()}/"
        self._start(made, [_python("server", "print('no memory'); raise SystemExit(3)", ready=url)])
        with pytest.raises(WorkerError, match=r"(?s)server.*3.*no memory"):
            made.wait_ready(["server"], deadline=self.slowness)

    def test_late_server_is_told_at_the_deadline(self, made: Bounded) -> None:
        """The error of a server that is not ready in time names it and shows the end of its log."""
        self._start(made, [_python("server", SLEEPER, ready=f"http://127.0.0.1:{self._port()}/")])
        self._line(made, "server")
        with pytest.raises(DeadlineError, match=r"(?s)server.*up"):
            made.wait_ready(["server"], deadline=0.1)

    def test_stopped_process_may_tidy_up(self, made: Bounded) -> None:
        """SIGTERM comes first, and then the grace: checkpoints and sockets are closed in it."""
        self._start(made, [_python("polite", POLITE)])
        self._line(made, "polite")
        made.stop(["polite"], grace=self.slowness)
        assert self._status(made, "polite").code == 0
        assert Path(self._status(made, "polite").log).read_text().split() == ["up", "tidied"]

    def test_process_that_ignores_the_request_is_killed(self, made: Bounded) -> None:
        """After the grace comes SIGKILL; the others go on."""
        self._start(made, [_python("deaf", DEAF), _python("other", SLEEPER)])
        self._line(made, "deaf")
        made.stop(["deaf"], grace=0.1)
        assert self._status(made, "deaf").code == -signal.SIGKILL
        assert self._status(made, "other").code is None

    def test_stop_takes_descendants_too(self, made: Bounded) -> None:
        """A server's helper in a session of its own was left behind, with its memory on the card."""
        self._start(made, [_python("server", FAMILY)])
        helper = int(self._line(made, "server"))
        made.stop(["server"], grace=0.2)
        assert self._eventually(lambda: _gone(helper))

    def test_descendants_of_a_process_that_ended_go_too(self, made: Bounded) -> None:
        """The main process died by itself, and its helpers live on where nobody looks for them."""
        self._start(
            made, [_python("server", textwrap.dedent(FAMILY).replace("time.sleep(600)\n", "raise SystemExit(1)\n"))]
        )
        helper = int(self._line(made, "server"))
        assert self._eventually(lambda: _gone(helper))

    def test_close_leaves_no_process(self, made: Bounded) -> None:
        """Everything that was started ends with `close`, which may be called twice."""
        self._start(made, [_python("one", SLEEPER), _python("two", SLEEPER)])
        pids = [status.pid for status in made.status()]
        made.close()
        made.close()
        assert self._eventually(lambda: all(_gone(pid) for pid in pids))
        assert all(status.code is not None for status in made.status())

    def test_closed_launcher_starts_nothing(self, made: Bounded) -> None:
        """A process started while the driver ends would be left behind."""
        made.close()
        with pytest.raises(StateError):
            self._start(made, [_python("late", SLEEPER)])

    # ---- what the tests are written in
    @staticmethod
    def _start(made: Bounded, processes: Sequence[ProcessSpec]) -> None:
        made.wait(made.start("start", processes), "start")

    def _eventually(self, check: Callable[[], Any]) -> Any:
        end = time.monotonic() + self.slowness
        while not (found := check()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def _line(self, made: Bounded, name: str) -> str:
        """Return the first whole line of a process's log, once it is there."""
        log = Path(self._status(made, name).log)
        self._eventually(lambda: log.exists() and "\n" in log.read_text())
        return log.read_text().partition("\n")[0]

    def _code(self, made: Bounded, name: str) -> int | None:
        self._eventually(lambda: self._status(made, name).code is not None)
        return self._status(made, name).code

    @staticmethod
    def _status(made: Bounded, name: str) -> ProcessStatus:
        found: ProcessStatus = {status.name: status for status in made.status()}[name]
        return found

    @staticmethod
    def _port() -> int:
        from powertrain.launch.ports import free_port

        return free_port()


def _python(
    name: str,
    code: str,
    *,
    ready: str = "",
    cwd: str = "",
    env: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
) -> ProcessSpec:
    values = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONUNBUFFERED": "1"} if env is None else env
    argv = (sys.executable, "-c", textwrap.dedent(code), *arguments)
    return ProcessSpec(name=name, argv=argv, env=values, ready=ready, cwd=cwd)


def _gone(pid: int) -> bool:
    """Tell whether a process has ended, a zombie included."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    return True

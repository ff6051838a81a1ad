"""The line between an engine and a worker of its server: framing, faults, deadlines, one engine at a time. No vLLM."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from powertrain.errors import ConfigError, DeadlineError, StateError, TransferError, WorkerError
from powertrain.runtime import wire
from powertrain.weights import Update, WeightVersion
from powertrain_vllm.relay import HEAD, MAGIC, MOST, Caller, Desk, Line, LineClosed
from powertrain_vllm.serving import private

PREFIX = f"{wire.RUN_PREFIX}relay-test-{os.getpid()}-"


class World:
    """A desk that answers by `answer`, and what was called of it."""

    def __init__(self, folder):
        self.path, self.left, self.begun = folder / "desk", threading.Event(), []
        self.go = threading.Event()
        self.desk = Desk(
            self.path,
            prefix=PREFIX,
            rank=3,
            answer=self.answer,
            left=self.left.set,
            begin=lambda: self.begun.append(threading.get_ident()),
        )

    def caller(self, **more):
        return Caller(str(self.path), prefix=PREFIX, who="the worker", **more)

    def answer(self, op, args):
        match op:
            case "echo":
                return args
            case "wait":
                self.go.wait(30)
            case "fail":
                message = "not so"
                raise TransferError(message, phase="load")
            case "break":
                message = "unheard of"
                raise LookupError(message)
            case "odd":
                return object()
        return None


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.go.set()
    made.desk.close()


def test_values_arrive_as_they_were(world):
    caller = world.caller()
    large = np.arange(1 << 16, dtype=np.int64)
    update = Update(version=WeightVersion(1, 2))
    found = caller.call("echo", 1, "two", None, (3, [4.5]), {"a": b"b"}, update, large, seconds=10)
    assert found[:6] == [1, "two", None, (3, [4.5]), {"a": b"b"}, update]
    assert np.array_equal(found[6], large)
    assert list(wire.FOLDER.glob(f"{PREFIX}*")) == []  # the segments of large arrays are gone
    assert world.path.stat().st_mode & 0o777 == 0o600
    caller.close()
    assert world.left.wait(5)
    assert len(world.begun) == 1


def test_errors_come_back_as_themselves(world):
    caller = world.caller()
    with pytest.raises(TransferError, match="the worker rank 3: not so") as caught:
        caller.call("fail", seconds=10)
    assert caught.value.phase == "load"
    with pytest.raises(WorkerError, match="rank 3: LookupError: unheard of"):
        caller.call("break", seconds=10)
    with pytest.raises(ConfigError, match="may not go to another process"):
        caller.call("odd", seconds=10)
    with pytest.raises(ConfigError, match="may not go to another process"):
        caller.call("echo", object(), seconds=10)
    assert caller.call("echo", seconds=10) == []
    caller.close()


def test_call_that_is_not_answered_ends_and_so_does_the_line(world):
    caller, begun = world.caller(), time.monotonic()
    with pytest.raises(DeadlineError, match=r"the worker did not answer 'wait' within 0\.2 s"):
        caller.call("wait", seconds=0.2)
    assert time.monotonic() - begun < 5
    with pytest.raises(StateError, match="cannot be asked for 'echo'"):  # else it would get the answer to `wait`
        caller.call("echo", seconds=10)
    caller.close()


def test_second_engine_is_told_who_is_here_and_may_come_later(world):
    first, second = world.caller(), world.caller()
    assert first.call("echo", 1, seconds=10) == [1]
    with pytest.raises(StateError, match=rf"process {os.getpid()} has this server; one at a time"):
        second.call("echo", 2, seconds=10)
    first.close()
    assert world.left.wait(5)
    third = world.caller()
    assert third.call("echo", 3, seconds=10) == [3]
    third.close()


def test_end_of_the_other_side_is_told_at_once(world):
    caller = world.caller(lost=lambda: "ended with signal 9")
    caller.call("echo", seconds=10)
    threading.Timer(0.2, world.desk.close).start()
    begun = time.monotonic()
    with pytest.raises(StateError, match="the worker has gone while it was asked for 'wait': ended with signal 9"):
        caller.call("wait", seconds=30)
    assert time.monotonic() - begun < 5
    caller.close()


def test_close_ends_a_call_that_waits(world):
    caller = world.caller()
    threading.Timer(0.2, caller.close).start()
    with pytest.raises(StateError, match="has gone"):
        caller.call("wait", seconds=30)


def test_nobody_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"the worker cannot be reached at .*an engine and its server share a host"):
        Caller(str(tmp_path / "none"), prefix=PREFIX, who="the worker")


def test_what_is_no_message_is_refused_and_the_desk_goes_on(world):
    for head in (b"GET / HTTP/1.1\r\n\r\n" * 4, HEAD.pack(MAGIC, MOST[0] + 1, 0, 0), HEAD.pack(MAGIC, 0, 0, 300)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(str(world.path))
            stranger.sendall(head)
            with contextlib.suppress(ConnectionResetError):  # what it did not read makes it one
                assert stranger.recv(1) == b""
    caller = world.caller()
    assert caller.call("echo", 1, seconds=10) == [1]
    caller.close()


def test_segment_of_another_run_is_not_read(world, tmp_path):
    secret = wire.FOLDER / f"{wire.RUN_PREFIX}other-{os.getpid()}"
    secret.write_bytes(b"x")
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(world.path))
            line = Line(made)
            line.send([wire.pack(["echo", []])[0], b"", secret.name.encode()])
            fault = wire.unpack(line.receive(5))["fault"]
        assert "none of this run's" in fault["message"]
    finally:
        secret.unlink()


def test_message_that_stops_within_has_a_deadline(monkeypatch):
    monkeypatch.setattr("powertrain_vllm.relay.PART_SECONDS", 0.2)
    here, there = socket.socketpair()
    line = Line(here)
    there.sendall(HEAD.pack(MAGIC, 10, 0, 0) + b"half")
    with pytest.raises(TimeoutError):
        line.receive(None)
    there.close()
    with pytest.raises(LineClosed):
        line.receive(None)
    line.close()


def test_folder_that_others_can_enter_is_refused(tmp_path):
    made = tmp_path / "made"
    assert private(str(made)).stat().st_mode & 0o777 == 0o700
    made.chmod(0o750)
    with pytest.raises(ConfigError, match="has mode 750 or another owner; it needs 700"):
        private(str(made))


def test_plugin_does_nothing_in_a_server_that_is_not_ours():
    code = (
        "import sys, threading\nfrom powertrain_vllm.extension import plugin\nplugin()\n"
        "print(threading.active_count(), [name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("POWERTRAIN_VLLM")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "[]"]

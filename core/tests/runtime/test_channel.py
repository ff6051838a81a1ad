"""The handshake and what the channel refuses, over real sockets in one process."""

from __future__ import annotations

import json
import logging
import queue

import numpy as np
import pytest
import zmq

from powertrain.errors import HandshakeError, WorkerError
from powertrain.interfaces.launcher import ProcessStatus
from powertrain.runtime import channel as channel_module
from powertrain.runtime import wire
from powertrain.runtime.channel import DriverChannel, WorkerChannel, refusal
from powertrain.runtime.wire import RankFault
from powertrain.specs import API_VERSION

BIG = np.arange(50_000)


def hello(name="toy-r0", api=API_VERSION):
    return {"name": name, "pid": 1, "python": "/py", "powertrain": "9.9", "api": list(api)}


@pytest.fixture
def statuses():
    return []


@pytest.fixture
def driver(statuses):
    channel = DriverChannel(lambda: statuses)
    yield channel
    channel.close()


@pytest.fixture
def join(driver):
    """Return a function that lets a worker's channel say hello; messages for it come in its queue `inbox`."""
    joined = []

    def make(greeting, **invitation):
        inbox = queue.SimpleQueue()
        worker = WorkerChannel({**driver.invitation, **invitation}, lambda *message: inbox.put(message))
        worker.begin(greeting)
        worker.inbox = inbox
        joined.append(worker)
        return worker

    yield make
    for worker in joined:
        worker.close()


def test_a_worker_of_the_same_api_is_welcomed(driver, join):
    greeting = driver.expect("toy-r0", engine="toy", rank=0)
    join(hello())
    assert greeting.result(5)["python"] == "/py"


@pytest.mark.parametrize(
    ("theirs", "mine", "allowed"),
    [
        ((1, 0), (1, 0), True),
        ((1, 0), (1, 4), True),
        ((1, 5), (1, 4), False),
        ((2, 0), (1, 4), False),
        ((0, 9), (1, 0), False),
    ],
)
def test_same_major_and_no_newer_minor_is_allowed(theirs, mine, allowed):
    assert (refusal(hello(api=theirs), mine) == "") == allowed


def test_another_api_is_refused_on_both_sides_naming_both_versions(driver, join):
    greeting = driver.expect("toy-r0", engine="toy", rank=0)
    major, minor = API_VERSION
    kind, _, reason = join(hello(api=(major + 1, 0))).inbox.get(timeout=5)
    assert kind == "refuse"
    with pytest.raises(
        HandshakeError, match=rf"core API {major + 1}\.0 \(powertrain 9\.9.*this driver {major}\.{minor}"
    ) as caught:
        greeting.result(5)
    assert str(caught.value) == reason


def test_a_second_worker_of_one_name_is_refused_and_the_first_stays(driver, join):
    greeting = driver.expect("toy-r0", engine="toy", rank=0)
    first = join(hello())
    greeting.result(5)
    assert "has registered already" in join(hello()).inbox.get(timeout=5)[2]
    (future,) = driver.call(["toy-r0"], [wire.pack(["m", []])])
    assert first.inbox.get(timeout=5)[0] == "call"
    assert not future.done()


def test_a_name_that_nobody_expects_is_refused(join):
    assert "no worker 'stranger' is expected" in join(hello("stranger")).inbox.get(timeout=5)[2]


def test_a_wrong_token_is_ignored_and_logged(driver, join, caplog):
    greeting = driver.expect("toy-r0", engine="toy", rank=0)
    with caplog.at_level(logging.WARNING, "powertrain.channel"):
        join(hello(), token="guessed")
        join(hello("other"))  # its refusal shows that the first message has been read
        greeting.done()
    assert not greeting.done()


def test_garbage_neither_stops_the_channel_nor_registers(driver, join):
    greeting = driver.expect("toy-r0", engine="toy", rank=0)
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(driver.invitation["address"])
    token = driver.invitation["token"].encode()
    for frames in (
        [b"x"],
        [token, b"hello", b"x", b"", b"", b""],
        [token, b"hello", b"0", b"\xc1", b"", b""],
        [b""] * 6,
    ):
        raw.send_multipart(frames)
    raw.close(linger=1000)
    join(hello())
    assert greeting.result(5) == hello()


@pytest.fixture
def pair(driver, join):
    greeting = driver.expect("toy-r0", engine="toy", rank=0)
    worker = join(hello())
    greeting.result(5)
    return driver, worker


def test_large_arrays_go_by_segments_both_ways_and_none_is_left(pair, segments):
    driver, worker = pair
    (future,) = driver.call(["toy-r0"], [wire.pack(["m", [BIG]], prefix=driver.prefix)])
    _, number, (_, (found,)) = worker.inbox.get(timeout=5)
    assert len(segments()) == 1
    worker.send("answer", number, wire.pack(found + 1, prefix=driver.prefix))
    np.testing.assert_array_equal(future.result(5), BIG + 1)
    assert segments() == []


def test_a_segment_is_kept_until_a_cancelled_call_was_answered(pair, segments):
    driver, worker = pair
    (future,) = driver.call(["toy-r0"], [wire.pack(["m", [BIG]], prefix=driver.prefix)])
    number = worker.inbox.get(timeout=5)[1]
    future.cancel()
    assert worker.inbox.get(timeout=5) == ("cancel", number, None)
    assert len(segments()) == 1
    worker.send("fault", number, wire.pack({"type": "CancelledError", "message": ""}))
    (second,) = driver.call(["toy-r0"], [wire.pack(["n", []])])
    number = worker.inbox.get(timeout=5)[1]
    worker.send("answer", number, wire.pack(1))
    assert second.result(5) == 1
    assert segments() == []


def test_a_fault_arrives_as_plain_data(pair):
    driver, worker = pair
    (future,) = driver.call(["toy-r0"], [wire.pack(["m", []])])
    worker.send("fault", worker.inbox.get(timeout=5)[1], wire.pack({"message": "no"}))
    with pytest.raises(RankFault, match="no"):
        future.result(5)


def test_an_answer_that_cannot_be_read_fails_the_call(pair):
    driver, worker = pair
    (future,) = driver.call(["toy-r0"], [wire.pack(["m", []])])
    worker.send("answer", worker.inbox.get(timeout=5)[1], [b"\xc1", b"", b""])
    with pytest.raises(WorkerError, match="toy rank 0 sent an answer that cannot be read"):
        future.result(5)


def test_a_process_that_ended_fails_its_calls_and_later_ones(pair, statuses, segments):
    driver, worker = pair
    (future,) = driver.call(["toy-r0"], [wire.pack(["m", [BIG]], prefix=driver.prefix)])
    worker.inbox.get(timeout=5)
    statuses.append(ProcessStatus(name="toy-r0", pid=77, code=3, log="/logs/toy-r0.log", tail="it broke"))
    with pytest.raises(WorkerError, match=r"(?s)toy rank 0 \(process 77\) ended with exit code 3.*it broke"):
        future.result(5)
    (later,) = driver.call(["toy-r0"], [wire.pack(["m", []])])
    with pytest.raises(WorkerError, match="exit code 3"):
        later.result(5)
    assert segments() == []


def test_closing_fails_what_is_outstanding_and_sweeps(pair, segments):
    driver, worker = pair
    (future,) = driver.call(["toy-r0"], [wire.pack(["m", [BIG]], prefix=driver.prefix)])
    worker.inbox.get(timeout=5)
    driver.close()
    with pytest.raises(WorkerError, match="toy rank 0 cannot answer: the driver has been closed"):
        future.result(5)
    (later,) = driver.call(["toy-r0"], [wire.pack(["m", []])])
    with pytest.raises(WorkerError, match="toy rank 0 cannot answer: the driver has been closed"):
        later.result(5)
    assert segments() == []


def test_a_worker_learns_that_its_driver_is_silent(pair, monkeypatch):
    _, worker = pair
    monkeypatch.setattr(channel_module, "GONE", 0)
    assert worker.inbox.get(timeout=5) == ("gone", 0, None)


def test_both_ends_beat(monkeypatch, pair):
    driver, worker = pair
    monkeypatch.setattr(channel_module, "BEAT", 1)
    monkeypatch.setattr(channel_module, "TICK", 0.01)
    beats = queue.SimpleQueue()
    for end in (driver, worker):
        received = end._received

        def listen(sender, kind, *rest, received=received, end=end):
            received(sender, kind, *rest)
            if kind == "beat":
                beats.put(end)

        monkeypatch.setattr(end, "_received", listen)
    heard = {beats.get(timeout=5)}
    while len(heard) < 2:
        heard.add(beats.get(timeout=5))
    assert driver.silence("toy-r0") < 5


def test_the_invitation_is_plain_text_for_the_environment(driver):
    assert json.loads(json.dumps(driver.invitation)) == driver.invitation
    assert driver.invitation["address"].startswith("tcp://127.0.0.1:")

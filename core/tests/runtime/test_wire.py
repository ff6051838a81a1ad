"""What crosses a process border and what does not."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import dataclass

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.interfaces.build import EngineSpec, OptimSpec
from powertrain.interfaces.data import Completion, GenerateRequest, GenerateResult, SamplingParams, Segment, TrainBatch
from powertrain.runtime import wire
from powertrain.weights import Update, WeightVersion

PREFIX = "powertrain-test-wire-"
BIG = np.arange(20_000, dtype=np.float64)  # 160 kB: more than a message carries

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(plain)
def test_plain_data_comes_back_equal_with_its_types(value):
    assert repr(wire.copied(value)) == repr(value)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=50))
def test_damaged_messages_give_only_our_error(data, arrays):
    try:
        wire.unpack([data, arrays, b""])
    except ConfigError:
        return


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_floats_survive(value):
    assert repr(wire.copied(value)) == repr(value)


@pytest.mark.parametrize(
    "record",
    [
        SamplingParams(max_tokens=3, stop_token_ids=(1, 2)),
        WeightVersion(2, 17),
        Update(version=WeightVersion(1, 2), kind="adapter", adapter="policy-v1.2", adapter_config={"r": 8}),
        EngineSpec(backend="b", role="train", model="m", optim=OptimSpec(lr=1e-3), options={"a": [1, {"b": None}]}),
        Segment(0, 3, "1.1"),
    ],
)
def test_records_come_back_as_their_class(record):
    assert wire.copied(record) == record


def test_nested_results_come_back_with_arrays_and_tuples():
    done = Completion(
        tokens=np.asarray([1, 2]),
        logprobs=np.asarray([-0.5, -np.inf], np.float32),
        logprobs_t1=np.zeros(2, np.float32),
        finish="stop",
        segments=(Segment(0, 2, "1.1"),),
    )
    back = wire.copied(GenerateResult(request_id="r", completions=(done,)))
    assert back.completions[0].segments == (Segment(0, 2, "1.1"),)
    assert back.completions[0].logprobs.tolist() == [-0.5, -np.inf]
    assert back.completions[0].logprobs.dtype == np.float32


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.asarray(3.5, np.float32),
        np.zeros((0, 8), np.float32),
        np.asarray([True, False]),
        np.asarray(["a", "bcd"]),
        np.arange(4, dtype=">i4"),
        BIG,
    ],
    ids=["transposed", "scalar", "empty", "bool", "text", "big-endian", "large"],
)
def test_arrays_keep_dtype_shape_and_content(array):
    back = wire.copied({"a": array, "after": np.arange(3)})
    assert (back["a"].dtype, back["a"].shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back["a"], array)
    assert back["after"].tolist() == [0, 1, 2]


def test_received_arrays_are_writable_copies():
    array = np.zeros(3)
    back = wire.copied([array, array])
    back[0][:] = 1
    assert array.sum() == 0
    assert back[1].sum() == 0


def test_numpy_scalars_arrive_as_python_numbers():
    back = wire.copied([np.int64(3), np.float32(0.5), np.bool_(True)])
    assert back == [3, 0.5, True]
    assert [type(item) for item in back] == [int, float, bool]


@dataclass
class Stranger:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (Stranger(), "Stranger"),
        (object(), "object"),
        ({1, 2}, "set"),
        (lambda: None, "function"),
        (np.asarray([object()]), "dtype object"),
        (2**70, "cannot be sent"),
        ({"deep": [Stranger()]}, "Stranger"),
    ],
)
def test_other_values_are_refused_by_name(value, word):
    with pytest.raises(ConfigError, match=word):
        wire.pack(value)


def test_a_record_that_is_not_allowed_is_refused_on_arrival():
    inner = msgpack.packb(["Stranger", [1]])
    with pytest.raises(ConfigError, match="'Stranger', which is not allowed"):
        wire.unpack([msgpack.packb(msgpack.ExtType(2, inner)), b"", b""])


def test_a_record_with_refused_content_is_refused_on_arrival():
    batch = TrainBatch.from_sequences([[1]], [[2]])
    fields = {"tokens": batch.tokens, "starts": batch.starts[:1], "prompt_lens": batch.prompt_lens}
    fields["weights"] = batch.weights
    block = bytearray()
    data = wire._encode(msgpack.ExtType(2, wire._encode(["TrainBatch", fields], block)), block)
    with pytest.raises(ConfigError, match="training batch"):
        wire.unpack([data, bytes(block), b""])


def test_too_much_plain_data_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(wire, "MAX_PLAIN", 1 << 20)
    with pytest.raises(ConfigError, match="2 MiB of plain data, the most is 1 MiB"):
        wire.pack("x" * (2 << 20))


def test_small_arrays_travel_in_the_message():
    assert wire.pack(np.zeros(100), prefix=PREFIX)[2] == b""


def test_large_arrays_travel_by_a_segment_that_its_owner_removes():
    frames = wire.pack({"a": BIG, "b": BIG + 1}, prefix=PREFIX)
    segment = wire.FOLDER / frames[2].decode()
    assert segment.stat().st_mode & 0o077 == 0
    assert sum(map(len, frames)) < 1000
    for _ in range(2):
        back = wire.unpack(frames, prefix=PREFIX)
        np.testing.assert_array_equal(back["b"], BIG + 1)
    wire.release(frames)
    assert not segment.exists()
    np.testing.assert_array_equal(back["a"], BIG)


@pytest.mark.parametrize("path", ["/etc/passwd", "another-run-1", f"{PREFIX}1/../../etc/passwd"])
def test_a_segment_of_someone_else_is_refused(path):
    with pytest.raises(ConfigError, match="none of this run's"):
        wire.unpack([msgpack.packb(None), b"", path.encode()], prefix=PREFIX)


def test_sweep_removes_what_a_killed_process_left():
    segment = wire.FOLDER / wire.pack(BIG, prefix=PREFIX)[2].decode()
    assert segment.exists()
    wire.sweep(PREFIX)
    assert not segment.exists()


def test_only_runs_whose_driver_is_gone_are_swept():
    living, dead = f"{wire.RUN_PREFIX}{os.getpid()}a-", f"{wire.RUN_PREFIX}{os.getpid()}b-"
    claims = [wire.claim(living), wire.claim(dead)]
    segments = [wire.FOLDER / wire.pack(BIG, prefix=prefix)[2].decode() for prefix in (living, dead)]
    claims[1].close()
    wire.sweep_dead()
    assert [segment.exists() for segment in segments] == [True, False]
    wire.sweep(living)
    claims[0].close()


def test_full_shared_memory_is_told_with_the_size_and_leaves_nothing(monkeypatch, tmp_path):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def write(self, block):
            raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(wire, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "fdopen", lambda fd, mode: os.close(fd) or Full())
    with pytest.raises(ConfigError, match=r"8 MiB of arrays do not fit into .*no space left"):
        wire.pack(np.zeros(1 << 20), prefix=PREFIX)
    assert list(tmp_path.iterdir()) == []


def test_an_array_of_objects_is_refused_on_arrival():
    header = msgpack.packb(["|O", [1], 0])
    with pytest.raises(ConfigError, match="dtype object may not go"):
        wire.unpack([msgpack.packb(msgpack.ExtType(3, header)), bytes(8), b""])


def test_a_request_keeps_its_prompt():
    request = GenerateRequest(request_id="r", prompt=np.asarray([5, 6]))
    assert wire.copied(request).prompt.tolist() == [5, 6]

"""Copies worked out once: `CopyProgram`, and a sink's prepared pieces."""

import pytest
import torch

from powertrain.errors import StateError, TransferError
from powertrain.interfaces.weights import Piece
from powertrain.tensors.copies import CopyProgram, copy_into
from powertrain.tensors.sink import BoxSink, whole_manifest
from powertrain.weights import Update, WeightVersion


def update(counter=1, **changes):
    return Update(version=WeightVersion(1, counter), **changes)


@pytest.fixture
def named():
    return {"a": torch.zeros(4, 3), "b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.zeros(())}


@pytest.fixture
def sink(named):
    return BoxSink(whole_manifest(named, casts=True), named)


def pieces(step):
    whole = {
        "a": torch.arange(12.0).reshape(4, 3) + step,
        "b": torch.tensor([1.0, 2.0]) + step,
        "c": torch.tensor(7.0 + step),
    }
    split = [Piece("a", (0, 0), whole["a"][:2]), Piece("a", (2, 0), whole["a"][2:])]
    return whole, [*split, Piece("b", (0,), whole["b"]), Piece("c", (), whole["c"])]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [3, 30_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", ["neither", "target", "source"])
def test_a_copy_is_the_same_however_it_is_made(threads, rows, dtype, strided):
    source = torch.arange(rows * 4.0).reshape(4, rows).t() if strided == "source" else torch.rand(rows, 4)
    room = torch.full((rows, 9), -1.0, dtype=dtype)
    target = room[:, 2:6] if strided == "target" else torch.empty(rows, 4, dtype=dtype)
    copy_into(target, source)
    assert torch.equal(target, source.to(dtype))
    assert bool((room[:, :2] == -1).all() and (room[:, 6:] == -1).all())


def test_a_program_copies_casts_and_strides_each_time_it_runs():
    source, target = torch.arange(6.0).reshape(2, 3), torch.zeros(3, 2, dtype=torch.float64)
    program = CopyProgram([(target.t(), source)])
    for _ in range(2):
        source += 1
        program.run()
        assert torch.equal(target.t(), source.double())
    assert program.bytes == 6 * 8


def test_prepared_pieces_are_written_in_every_update(sink, named):
    whole, given = pieces(0)
    prepared = sink.prepare(given)
    for step in (1, 2):
        for tensor in whole.values():
            tensor += 1
        sink.begin(update(step))
        assert sink.replay(prepared)
        sink.finish()
        sink.publish(f"1.{step}")
        assert all(torch.equal(named[name].float(), whole[name]) for name in whole)


def test_preparing_writes_nothing_and_opens_nothing(sink, named):
    sink.prepare(pieces(1)[1])
    assert sink.state == "steady"
    assert not any(tensor.any() for tensor in named.values())


def test_prepared_pieces_that_leave_a_gap_are_told_by_finish(sink):
    prepared = sink.prepare(pieces(0)[1][:-1])
    sink.begin(update())
    sink.replay(prepared)
    with pytest.raises(TransferError, match=r"'c'.* was not written by update 1\.1"):
        sink.finish()


def test_a_gap_is_filled_by_other_pieces_and_nothing_is_written_twice(sink):
    given = pieces(0)[1]
    prepared = sink.prepare(given[:2])
    sink.begin(update())
    sink.apply(given[2:])
    sink.replay(prepared)
    with pytest.raises(TransferError, match="arrived twice"):
        sink.apply(given[:1])
    sink.finish()
    sink.begin(update(2))
    sink.apply(given[1:2])
    with pytest.raises(TransferError, match=r"'a'\[2:4, 0:3\] arrived twice"):
        sink.replay(prepared)


def test_nothing_is_added_to_what_was_prepared_whole(sink):
    given = pieces(0)[1]
    prepared = sink.prepare(given)
    sink.begin(update())
    sink.replay(prepared)
    with pytest.raises(TransferError, match="arrived twice"):
        sink.apply(given[-1:])


def test_storages_that_moved_are_prepared_again(sink, named):
    prepared = sink.prepare(pieces(0)[1])
    named["a"].data = named["a"].clone()
    sink.begin(update())
    assert not sink.replay(prepared)
    assert not named["b"].any()
    sink.abort()
    assert sink.state == "steady"


def test_pieces_are_checked_when_they_are_prepared(sink):
    with pytest.raises(TransferError, match="none of that name"):
        sink.prepare([Piece("x", (0,), torch.zeros(1))])
    with pytest.raises(TransferError, match="does not hold all of that range"):
        sink.prepare([Piece("a", (3, 0), torch.zeros(2, 3))])


def test_prepared_pieces_need_an_open_update(sink):
    prepared = sink.prepare(pieces(0)[1])
    with pytest.raises(StateError, match="state 'steady'"):
        sink.replay(prepared)
    sink.begin(update(kind="adapter", adapter="x-v1.1"))
    assert not sink.replay(prepared)

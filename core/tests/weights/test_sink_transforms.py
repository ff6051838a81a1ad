"""A torch sink runs the transforms that its entries name, and refuses those that it does not have."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from carrying import box, whole

from powertrain.errors import TransferError
from powertrain.interfaces.weights import Piece
from powertrain.tensors.sink import BoxSink
from powertrain.weights import Entry, Manifest, Update, WeightVersion, plan_transfer

SENT = torch.arange(24, dtype=torch.float32).reshape(6, 4)


class Offered:
    """As much of a source as sharing asks for."""

    def changes(self):
        return 0


def opened(entry, memory):
    sink = BoxSink(Manifest(0, 1, (entry,)), {"w": memory})
    sink.begin(Update(version=WeightVersion(1, 1)))
    return sink


def test_pieces_are_transposed_where_the_entry_says_so():
    entry = Entry("w", "float32", (4, 6), (box((0, 0), (4, 6)),), transform="transpose")
    sink, source = opened(entry, torch.zeros(4, 6)), Manifest(0, 1, (whole("w", (6, 4), "float32"),))
    plan = plan_transfer([source], [sink.manifest()], bucket_bytes=256)
    for read in plan.reads[0][0]:
        rows = slice(read.start[0], read.start[0] + read.size[0])
        sink.apply([Piece(read.name, read.start, SENT[rows])])
    sink.finish()
    assert torch.equal(sink.tensors()["w"], SENT.T)


def test_square_tensor_that_is_transposed_is_never_shared():
    entry = Entry("w", "float32", (4, 4), (box((0, 0), (4, 4)),), transform="transpose")
    sink = opened(entry, torch.zeros(4, 4))
    assert not sink.share(Offered(), [Piece("w", (0, 0), SENT[:4])])
    sink.apply([Piece("w", (0, 0), SENT[:4])])
    sink.finish()
    assert torch.equal(sink.tensors()["w"], SENT[:4].T)


def test_transform_that_the_sink_lacks_is_refused_before_it_writes():
    entry = Entry("w", "float8_e4m3fn", (6, 4), (box((0, 0), (6, 4)),), ("float32",), transform="fp8_block")
    sink = opened(entry, torch.zeros(6, 4).to(torch.float8_e4m3fn))
    with pytest.raises(TransferError, match="'w' names the transform 'fp8_block', which BoxSink does not have"):
        sink.apply([Piece("w", (0, 0), SENT)])
    sink.abort()
    assert sink.state == "steady"

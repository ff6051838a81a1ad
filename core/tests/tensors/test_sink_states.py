"""BoxSink: states, copying by boxes, and what it refuses."""

import pytest
import torch

from powertrain.errors import StateError, TransferError, UnfitError
from powertrain.interfaces.weights import Piece
from powertrain.tensors.sink import BoxSink, whole_manifest
from powertrain.weights import Update, WeightVersion

V1, V2, V3 = (WeightVersion(1, i) for i in (1, 2, 3))


class Sink(BoxSink):
    """Counts refreshes and keeps adapters."""

    def __init__(self, named, casts=False):
        super().__init__(whole_manifest(named, casts=casts), named)
        self.refreshed = 0
        self.adapters = []

    def refresh(self):
        self.refreshed += 1

    def add_adapter(self, name, config, tensors):
        self.adapters.append((name, dict(config), dict(tensors)))

    def drop_adapter(self, name):
        self.adapters = [a for a in self.adapters if a[0] != name]


class Source:
    """A weight source of one tensor."""

    def __init__(self, **named):
        self.named, self.count = named, 0

    def changes(self):
        return self.count

    def pieces(self):
        return [Piece(name, (0,) * t.dim(), t) for name, t in self.named.items()]


@pytest.fixture
def sink():
    made = Sink({"a": torch.zeros(4, 2), "b": torch.zeros(3)})
    made.publish("1.1")
    return made


def fill(sink, version=V2, value=2.0):
    sink.begin(Update(version=version))
    sink.apply([Piece("a", (0, 0), torch.full((4, 2), value)), Piece("b", (0,), torch.full((3,), value))])


def test_update_is_published_only_at_the_end(sink):
    fill(sink)
    sink.finish()
    assert (sink.state, sink.version, sink.refreshed) == ("finished", "1.1", 1)
    sink.publish("1.2")
    assert (sink.state, sink.version, sink.base_version) == ("steady", "1.2", "1.2")
    assert (sink.tensors()["a"] == 2).all()


def test_pieces_of_a_row_come_in_any_order(sink):
    sink.begin(Update(version=V2))
    sink.apply([Piece("a", (2, 0), torch.full((2, 2), 7.0)), Piece("b", (0,), torch.ones(3))])
    sink.apply([Piece("a", (0, 1), torch.full((2, 1), 8.0)), Piece("a", (0, 0), torch.full((2, 1), 9.0))])
    sink.finish()
    assert sink.tensors()["a"].tolist() == [[9, 8], [9, 8], [7, 7], [7, 7]]


def test_unwritten_range_is_named(sink):
    sink.begin(Update(version=V2))
    sink.apply([Piece("a", (0, 0), torch.ones(3, 2)), Piece("b", (0,), torch.ones(3))])
    with pytest.raises(TransferError, match=r"'a'\[3:4, 0:2\] was not written by update 1\.2"):
        sink.finish()
    sink.abort()
    assert sink.state == "unfit"


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Piece("c", (0,), torch.ones(3)), "none of that name"),
        (Piece("b", (1,), torch.ones(3)), "does not hold all of that range"),
        (Piece("b", (0, 0), torch.ones(3, 1)), "2 dimensions"),
        (Piece("b", (0,), torch.ones(3, dtype=torch.float64)), "arrived as float64"),
    ],
)
def test_piece_that_does_not_fit_writes_nothing(sink, piece, words):
    sink.begin(Update(version=V2))
    with pytest.raises(TransferError, match=words):
        sink.apply([piece])
    sink.abort()
    assert sink.state == "steady"
    assert (sink.tensors()["b"] == 0).all()


def test_element_written_twice_is_refused(sink):
    fill(sink)
    with pytest.raises(TransferError, match=r"'b'\[1:2\] arrived twice"):
        sink.apply([Piece("b", (1,), torch.ones(1))])


def test_accepted_dtype_is_cast():
    sink = Sink({"a": torch.zeros(2, dtype=torch.bfloat16)}, casts=True)
    sink.begin(Update(version=V2))
    sink.apply([Piece("a", (0,), torch.tensor([1.0, 2.0]))])
    sink.finish()
    assert sink.tensors()["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("write", "state"), [(False, "steady"), (True, "unfit")])
def test_abort_is_steady_before_the_first_write_and_unfit_after(sink, write, state):
    sink.begin(Update(version=V2))
    if write:
        sink.apply([Piece("b", (0,), torch.ones(3))])
    sink.abort()
    assert (sink.state, sink.version) == (state, "1.1")


def test_unfit_sink_is_healed_by_the_next_update(sink):
    fill(sink)
    sink.finish()
    sink.abort()
    with pytest.raises(UnfitError, match=r"neither version 1.1"):
        sink.publish(None)
    fill(sink, V3, 3.0)
    sink.finish()
    sink.publish("1.3")
    assert sink.state == "steady"


def test_healing_that_stops_before_a_write_leaves_it_unfit(sink):
    fill(sink)
    sink.abort()
    sink.begin(Update(version=V3))
    sink.abort()
    assert sink.state == "unfit"


def test_wrong_calls_name_the_state(sink):
    with pytest.raises(StateError, match="'steady'"):
        sink.apply([])
    with pytest.raises(StateError, match=r"no update to 1.9 has finished"):
        sink.publish("1.9")
    sink.begin(Update(version=V2))
    with pytest.raises(StateError, match=r"update 1.2 is still open"):
        sink.begin(Update(version=V3))


def test_publishing_another_version_is_refused(sink):
    fill(sink)
    sink.finish()
    with pytest.raises(StateError, match=r"finished is 1.2"):
        sink.publish("1.3")


def test_adapter_over_two_buckets_is_added_once_and_whole(sink):
    buffer = torch.zeros(8, 64)
    names = [f"base_model.model.l{i}.q_proj.lora_{x}.weight" for i in range(2) for x in "AB"]
    values = [1.0, -1.0, 2.0, -2.0]
    sink.begin(Update(version=V2, kind="adapter", adapter="policy-v1.2", adapter_config={"r": 8}))
    for name, value in zip(names, values, strict=True):
        buffer.fill_(value)
        sink.apply([Piece(name, (0, 0), buffer[:4]), Piece(name, (4, 0), buffer[4:])])
    buffer.fill_(9.0)
    sink.finish()
    sink.publish("1.2")
    [(name, config, tensors)] = sink.adapters
    assert (name, config) == ("policy-v1.2", {"r": 8})
    assert {n: t.unique().tolist() for n, t in tensors.items()} == {n: [v] for n, v in zip(names, values, strict=True)}
    assert (sink.version, sink.base_version, sink.refreshed) == ("1.2", "1.1", 0)


def test_adapter_with_a_hole_is_refused(sink):
    sink.begin(Update(version=V2, kind="adapter", adapter="p-v1.2"))
    sink.apply([Piece("q.lora_A.weight", (4, 0), torch.ones(4, 8))])
    with pytest.raises(TransferError, match=r"do not make up a whole of shape \[8, 8\]"):
        sink.finish()


def test_adapter_piece_that_comes_twice_does_not_hide_a_hole(sink):
    sink.begin(Update(version=V2, kind="adapter", adapter="p-v1.2"))
    pieces = [Piece("q.lora_A.weight", (start, 0), torch.ones(2, 8)) for start in (0, 0, 4)]
    with pytest.raises(TransferError, match=r"'q.lora_A.weight'\[0:2, 0:8\] arrived twice"):
        sink.apply(pieces)


def test_given_up_adapter_is_dropped_and_the_base_stays(sink):
    sink.begin(Update(version=V2, kind="adapter", adapter="p-v1.2"))
    sink.apply([Piece("q.lora_A.weight", (0, 0), torch.ones(4, 8))])
    sink.finish()
    sink.abort()
    assert (sink.adapters, sink.state) == ([], "steady")


def test_buffer_used_again_changes_nothing_that_was_copied(sink):
    buffer = torch.full((4, 2), 1.0)
    sink.begin(Update(version=V2))
    sink.apply([Piece("a", (0, 0), buffer), Piece("b", (0,), torch.ones(3))])
    buffer.fill_(9.0)
    assert (sink.tensors()["a"] == 1).all()


def shared(sink, source, version):
    sink.begin(Update(version=version))
    assert sink.share(source, source.pieces())
    sink.finish()
    sink.publish(str(version))


def test_shared_weights_are_the_trainers_memory_and_guarded(sink):
    source = Source(a=torch.ones(4, 2), b=torch.ones(3))
    shared(sink, source, V2)
    assert sink.tensors()["a"].data_ptr() == source.named["a"].data_ptr()
    sink.guard()
    source.count += 1
    with pytest.raises(StateError, match=r"changed under version 1.2; push first"):
        sink.guard()
    shared(sink, source, V3)
    sink.guard()


def test_copy_after_sharing_leaves_the_trainer_alone(sink):
    source = Source(a=torch.ones(4, 2), b=torch.ones(3))
    shared(sink, source, V2)
    fill(sink, V3, 5.0)
    assert (source.named["a"] == 1).all()
    assert (sink.tensors()["a"] == 5).all()


def test_weights_of_another_dtype_are_not_shared(sink):
    source = Source(a=torch.ones(4, 2, dtype=torch.bfloat16), b=torch.ones(3))
    sink.begin(Update(version=V2))
    assert not sink.share(source, source.pieces())
    assert sink.tensors()["b"].tolist() == [0, 0, 0]


def test_tied_tensors_are_listed_once():
    weight = torch.zeros(3)
    manifest = whole_manifest({"embed": weight, "head": weight})
    assert ([e.name for e in manifest], manifest.tied) == (["embed"], {"head": "embed"})

"""Whose fault a failed update is: sinks that failed by themselves, else those that are blamed; never the trainer's."""

from dataclasses import dataclass

import pytest

from powertrain.errors import DeadlineError, TransferError
from powertrain.weights import Update, WeightVersion
from powertrain.weights.transaction import run_update, together


@dataclass
class Engine:
    """An engine that answers everything, and fails the transfer's command with a given error."""

    name: str
    fault: Exception | None = None
    version: str | None = "1.0"
    unfit: bool = False

    async def call(self, method, *args, deadline):
        if method == "endpoint.call" and self.fault is not None:
            self.fault.engine = self.name
            raise self.fault
        return [[(0.0, None), (0.0, "steady"), (0.0, "1.0")]]


class Moves:
    """A transfer whose command goes to all engines at once."""

    name = "moves"

    def __init__(self, source, sinks):
        self.source, self.sinks = source, sinks

    async def plan(self, source, sinks, *, deadline):
        return None

    async def gather(self, plan, update, *, deadline):
        return None

    async def move(self, plan, update, meter, *, deadline):
        await together(engine.call("endpoint.call", deadline=deadline) for engine in (self.source, *self.sinks))


def late(who):
    return DeadlineError(f"x waited for y; {who} is stopped", who=who)


def told(text):
    return TransferError(text)


CASES = {
    "its own": ({"b/1": told("b/1 rank 0: disk is gone")}, ("b/1",)),
    "blamed by the trainer": ({"a": told("a rank 0: a rank 0 waited, and b/1 rank 0 did not come along")}, ("b/1",)),
    "the cause, not who is waited for": ({"a": late("b/0 rank 1")}, ("b/0",)),
    "its own beside those that blame others": (
        {"b/0": told("b/0 rank 0: a rank 0 did not come along"), "b/10": late("b/10 rank 0")},
        ("b/10",),
    ),
    "no part of a longer name": ({"a": told("and b/10 rank 0 did not come along")}, ("b/10",)),
    "the trainer's": ({"a": told("a rank 1: no memory")}, ()),
    "the trainer's and a sink's": ({"a": told("a rank 1: no memory"), "b/1": told("b/1 rank 0: no memory")}, ()),
    "the trainer is blamed": ({"b/1": told("b/1 rank 0: waited for trainer rank 0; it has died")}, ()),
    "all alike": ({name: told(f"{name} rank 0: no") for name in ("b/0", "b/1", "b/10")}, ("b/0", "b/1", "b/10")),
}


@pytest.mark.parametrize(("faults", "failed"), CASES.values(), ids=CASES)
async def test_the_error_names_the_sinks_whose_fault_it_is(faults, failed):
    source, *sinks = (Engine(name, faults.get(name)) for name in ("a", "b/0", "b/1", "b/10"))
    with pytest.raises(TransferError) as info:
        await run_update(Moves(source, sinks), Update(version=WeightVersion(1, 1)), deadline=1.0, pause_mode="wait")
    assert info.value.failed == failed


async def test_a_fault_of_the_drivers_side_is_nobodys():
    transfer = Moves(Engine("a"), [Engine("b")])

    async def cut(*args, **kwargs):
        message = "the wire was cut"
        raise RuntimeError(message)

    transfer.move = cut
    with pytest.raises(TransferError) as info:
        await run_update(transfer, Update(version=WeightVersion(1, 1)), deadline=1.0, pause_mode="wait")
    assert info.value.failed == ()

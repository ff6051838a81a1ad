"""Numbers in shared memory that let a waiting rank go on."""

import threading

import pytest

from powertrain.errors import DeadlineError, TransferError
from powertrain.tensors.turns import Turn, await_turn


@pytest.fixture
def turn():
    made = Turn.make("test", 0)
    yield made
    made.close()


def test_waiting_ends_with_the_number_that_is_posted(turn):
    other = Turn.attach(turn.path)
    turn.settle()
    poster = threading.Timer(0.05, turn.post, (2,))
    poster.start()
    await_turn([(0, other)], 2, seconds=20)
    assert other.number == 2
    await_turn([(0, other)], 1, seconds=0)
    other.close()
    poster.join()


def test_a_number_that_never_comes_names_the_rank_and_the_seconds(turn):
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for update 1 of trainer rank 3") as info:
        await_turn([(3, turn)], 1, seconds=0.05)
    assert (info.value.who, info.value.seconds) == ("trainer rank 3", 0.05)


def test_a_negative_number_gives_up_at_once(turn):
    turn.post(-4)
    with pytest.raises(TransferError, match="trainer rank 0 have moved"):
        await_turn([(0, turn)], 4, seconds=20)


def test_nothing_is_left_of_a_turn():
    from pathlib import Path

    made = Turn.make("test", 1)
    path = Path(made.path)
    assert path.exists()
    made.close()
    made.close()
    assert not path.exists()

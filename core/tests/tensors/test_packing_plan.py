import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.interfaces.data import TrainBatch
from powertrain.tensors.packing import plan, render, scored_tokens


@st.composite
def batches(draw):
    prompts = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4))
    head = draw(st.lists(st.integers(1, 9), max_size=5))
    prompts = [head + prompt for prompt in prompts]
    owner = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=9))
    completions = [draw(st.lists(st.integers(1, 9), min_size=0, max_size=7)) for _ in owner]
    batch = TrainBatch.from_sequences([prompts[o] for o in owner], completions, groups=owner)
    zero = draw(st.lists(st.booleans(), min_size=len(batch.tokens), max_size=len(batch.tokens)))
    batch.weights[np.asarray(zero)] = 0
    return batch


@settings(max_examples=80, deadline=None)
@given(
    batch=batches(),
    mode=st.sampled_from(["shared", "packed", "padded"]),
    world=st.integers(1, 4),
    budget=st.integers(1, 40),
)
def test_each_scored_token_is_computed_exactly_once(batch, mode, world, budget):
    scored = scored_tokens(batch, weighted=True)
    places = []
    for share in plan(batch, scored, mode=mode, world=world, budget=budget, hidden_size=64):
        for rows in share:
            micro = render(batch, rows, scored)
            ids = micro.inputs["input_ids"]
            assert ids.numel() <= budget or len(rows) == 1
            places += micro.place.tolist()
            assert micro.targets.tolist() == batch.tokens[micro.place.numpy()].tolist()
            previous = ids.flatten()[micro.source[micro.rows]].tolist()
            assert previous == batch.tokens[micro.place.numpy() - 1].tolist()
    assert sorted(places) == np.flatnonzero(scored).tolist()


def test_ranks_are_balanced_by_tokens():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 64)
    batch = TrainBatch.from_sequences([[1]] * 64, [[2] * int(n) for n in lengths])
    shares = plan(batch, scored_tokens(batch, weighted=False), mode="padded", world=4, budget=128)
    loads = [sum(c.tokens for rows in share for row in rows for c in row) for share in shares]
    assert sum(loads) == lengths.sum()
    assert max(loads) - min(loads) <= 2


def test_one_group_is_split_over_the_ranks():
    batch = TrainBatch.from_sequences([[1] * 4] * 8, [[2] * 10] * 8)
    shares = plan(batch, scored_tokens(batch, weighted=False), mode="shared", world=2, budget=1000)
    assert [sorted(i for rows in s for row in rows for c in row for i in c.members) for s in shares] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_long_completions_are_not_put_into_one_quadratic_row():
    batch = TrainBatch.from_sequences([[1] * 4] * 8, [[2] * 400] * 8)
    [[*micros]] = plan(
        batch, scored_tokens(batch, weighted=False), mode="shared", world=1, budget=10**6, hidden_size=64
    )
    assert max(len(c.members) for rows in micros for row in rows for c in row) == 1


def test_more_ranks_than_sequences_leaves_ranks_empty():
    batch = TrainBatch.from_sequences([[1]], [[2, 3]])
    shares = plan(batch, scored_tokens(batch, weighted=False), mode="shared", world=3, budget=10)
    assert [len(share) for share in shares] == [1, 0, 0]


def test_single_sequences_need_no_mask():
    batch = TrainBatch.from_sequences([[1, 2], [3]], [[4, 5], [6]])
    scored = scored_tokens(batch, weighted=False)
    [[rows]] = plan(batch, scored, mode="shared", world=1, budget=100)
    assert set(render(batch, rows, scored).inputs) == {"input_ids", "position_ids"}


def test_model_inputs_follow_their_tokens():
    batch = TrainBatch.from_sequences([[1, 2]] * 2, [[4, 5], [6, 7, 8]])
    batch = TrainBatch(
        tokens=batch.tokens,
        starts=batch.starts,
        prompt_lens=batch.prompt_lens,
        weights=batch.weights,
        model_inputs={"kinds": batch.tokens * 10},
    )
    scored = scored_tokens(batch, weighted=False)
    [[rows]] = plan(batch, scored, mode="shared", world=1, budget=100)
    inputs = render(batch, rows, scored).inputs
    assert inputs["kinds"].tolist() == [[10, 20, 60, 70], [10, 20, 40, 10]]


def test_model_inputs_that_are_not_per_token_are_refused():
    batch = TrainBatch.from_sequences([[1, 2]], [[4, 5]])
    batch = TrainBatch(
        tokens=batch.tokens,
        starts=batch.starts,
        prompt_lens=batch.prompt_lens,
        weights=batch.weights,
        model_inputs={"image": np.zeros(3)},
    )
    scored = scored_tokens(batch, weighted=False)
    with pytest.raises(ConfigError, match="'image' has 3 values for 4 tokens"):
        plan(batch, scored, mode="padded", world=1, budget=100)

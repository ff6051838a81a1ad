"""Training batches: what is refused before an engine sees it."""

import dataclasses

import numpy as np
import pytest

from powertrain import TrainBatch
from powertrain.errors import ConfigError


def batch(**changes):
    made = TrainBatch.from_sequences([[1, 2, 3], [4]], [[5, 6], [7]])
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": np.ones(7, dtype=np.float32)}, "4 prompt tokens have a weight"),
        ({"prompt_lens": np.array([3, 8])}, "sequence 1 has 2 tokens and a prompt of 8"),
        ({"prompt_lens": np.array([0, 1])}, "a prompt length is 0"),
        ({"prompt_lens": np.array([1])}, "1 prompt lengths for 2 sequences"),
        ({"starts": np.array([0, 5, 6])}, "starts must rise from 0 to the number of tokens"),
        ({"weights": np.zeros(6, dtype=np.float32)}, "6 weights for 7 tokens"),
        ({"token_fields": {"values": np.zeros(3)}}, "3 values of token field 'values' for 7 tokens"),
        ({"sample_fields": {"scale": np.zeros(3)}}, "3 values of sample field 'scale' for 2 sequences"),
        ({"groups": np.array([0])}, "1 group numbers for 2 sequences"),
    ],
)
def test_batch_whose_parts_do_not_fit_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        batch(**changes)


def test_sequence_that_is_all_prompt_is_taken():
    assert TrainBatch.from_sequences([[1, 2], [4]], [[], [7]]).total_weight() == 1.0


def test_weights_lie_on_completions_alone():
    made = batch()
    assert made.weights.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert made.size == 2


@pytest.mark.parametrize("prompt", [[], [[1, 2]], [0.5], 7, ["a"]])
def test_prompt_that_is_no_row_of_ids_is_refused(prompt):
    from powertrain.interfaces.data import GenerateRequest

    with pytest.raises(ConfigError, match="request 'r': a prompt is one row of at least 1 token id"):
        GenerateRequest(request_id="r", prompt=prompt)


def test_prompt_given_as_a_list_becomes_an_array():
    from powertrain.interfaces.data import GenerateRequest

    prompt = GenerateRequest(request_id="r", prompt=[3, 4]).prompt
    assert (prompt.dtype, prompt.tolist()) == (np.int64, [3, 4])

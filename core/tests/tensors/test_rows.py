"""Keys of draws, and the same numbers on a tensor as on an array."""

import numpy as np
import torch

from powertrain.tensors.rows import row_key
from powertrain.tensors.sampling import uniforms, uniforms_on


def test_uniform_numbers_are_the_same_on_tensors():
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 2**64, 4096, dtype=np.uint64)
    positions = rng.integers(0, 2**40, 4096, dtype=np.uint64)
    found = uniforms_on(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions.view(np.int64)))
    assert np.array_equal(found.numpy(), uniforms(keys, positions))


def test_keys_differ_by_seed_request_and_sample():
    keys = {row_key(seed, name, sample) for seed in (0, 1) for name in ("a", "b", "1/a") for sample in range(4)}
    assert len(keys) == 24

"""Drawing tokens: the distribution, its log-probs and the numbers behind the draws."""

import numpy as np
import pytest
import torch

from powertrain.tensors.rows import row_key
from powertrain.tensors.sampling import draw, uniforms


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, uniform=None):
    rows = len(logits)
    uniform = torch.rand(rows, dtype=torch.float64) if uniform is None else uniform
    return draw(
        logits, torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p), uniform
    )


def expected(logits, temperature, top_k, top_p):
    """Return the distribution of one row in plain float64 steps."""
    probs = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))
    keep = order[: top_k or len(order)]
    probs = torch.tensor([probs[i].item() if i in keep else 0.0 for i in range(len(probs))], dtype=torch.float64)
    probs /= probs.sum()
    kept, total = [], 0.0
    for i in keep:
        kept.append(i)
        total += probs[i].item()
        if total >= top_p:
            break
    probs = torch.tensor([probs[i].item() if i in kept else 0.0 for i in range(len(probs))], dtype=torch.float64)
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.6), (0.8, 6, 0.7)]
)
def test_draws_follow_the_distribution_and_report_its_logprobs(temperature, top_k, top_p):
    torch.manual_seed(1)
    row = torch.randn(12) * 1.5
    right = expected(row, temperature, top_k, top_p)
    rows = 4000
    uniform = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    tokens, logprobs, plain = sample(row.expand(rows, -1).clone(), temperature, top_k, top_p, uniform)
    share = torch.bincount(tokens, minlength=12).double() / rows
    assert (share - right).abs().max() <= 1.01 / rows
    assert torch.allclose(logprobs.double(), right.log()[tokens], atol=1e-5)
    assert torch.allclose(plain.double(), row.double().log_softmax(-1)[tokens], atol=1e-5)


def test_greedy_takes_the_likeliest_with_certainty():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, logprobs, plain = sample(logits, temperature=0.0)
    assert (tokens.item(), logprobs.item()) == (1, 0.0)
    assert plain.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())


def test_rows_of_one_batch_keep_their_own_settings():
    logits = torch.tensor([[0.0, 0.1, 3.0]]).expand(3, -1).clone()
    uniform = torch.tensor([0.01, 0.01, 0.01], dtype=torch.float64)
    tokens, _, _ = draw(
        logits, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), torch.tensor([1.0, 1.0, 1.0]), uniform
    )
    assert tokens.tolist() == [0, 2, 2]


def test_token_without_probability_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for u in (0.0, 0.5, 1 - 2**-53):
        assert sample(logits, uniform=torch.tensor([u], dtype=torch.float64))[0].item() == 1


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 1000)])
def test_logprobs_over_a_whole_vocabulary_are_not_off_to_one_side(temperature, top_k):
    torch.manual_seed(3)
    logits = torch.randn(64, 49152) * 4
    logits[:, 7] = logits.amax(-1) + 3
    tokens, logprobs, plain = sample(logits, temperature, top_k)
    exact = (logits.double() / temperature).log_softmax(-1)
    if top_k:
        kept = exact.topk(top_k).values
        exact = exact - kept.logsumexp(-1, keepdim=True)
    error = logprobs.double() - exact.gather(1, tokens[:, None])[:, 0]
    assert error.abs().max() < 1.5e-6  # of the result's own rounding
    assert error.mean().abs() < 1e-7
    error = plain.double() - logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert error.abs().max() < 1.5e-6
    assert error.mean().abs() < 1e-7


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1e-38, 0, 1.0), (1e-38, 2, 0.5), (1e-4, 0, 0.9)])
def test_tiny_temperature_is_all_but_greedy(temperature, top_k, top_p):
    logits = torch.tensor([[20.0, 23.0, 21.0, -torch.inf]])
    tokens, logprobs, _ = sample(logits, temperature, top_k, top_p)
    assert (tokens.item(), logprobs.item()) == (1, 0.0)


def test_uniforms_are_even_and_independent():
    keys = np.array([row_key(7, f"r{i}", s) for i in range(100) for s in range(10)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(len(keys), p, dtype=np.uint64)) for p in range(20)])
    assert table.min() >= 0
    assert table.max() < 1
    assert abs(table.mean() - 0.5) < 4 / np.sqrt(12 * table.size)
    assert np.abs(np.corrcoef(table)[~np.eye(20, dtype=bool)]).max() < 0.15


@pytest.mark.parametrize("other", [(8, "r0", 0), (7, "r1", 0), (7, "r0", 1)])
def test_key_depends_on_seed_request_and_sample(other):
    assert row_key(7, "r0", 0) != row_key(*other)
    assert row_key(7, "r0", 0) == row_key(7, "r0", 0)

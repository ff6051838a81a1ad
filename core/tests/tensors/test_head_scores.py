import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.errors import ConfigError
from powertrain.tensors.head import LMHead

V, H, K = 37, 8, 11
COMBOS = [(True, None), (True, 4), (False, None), (False, 4)]


class WeightCasts(TorchDispatchMode):
    """Counts float32 casts of anything that has the weight's shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = tuple(shape), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and tuple(args[0].shape) == self.shape
            and out.dtype == torch.float32
            and args[0].dtype != torch.float32
        ):
            self.count += 1
        return out


def _parts(dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(K, H, generator=gen).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(V, H, generator=gen).to(dtype))
    targets = torch.randint(0, V, (K,), generator=gen)
    return hidden, weight, targets


def _reference(hidden, weight, targets, *, temperature=1.0, softcap=None, bias=None, rows=None):
    logits = hidden.float() @ weight.float().T
    if bias is not None:
        logits = logits + bias.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    rows = torch.arange(len(targets)) if rows is None else rows
    return logp[rows, targets], entropy[rows]


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scores_and_gradients_equal_plain_autograd(chunk, softcap, temperature, with_bias):
    hidden, weight, targets = _parts()
    bias = torch.nn.Parameter(torch.linspace(-1, 1, V)) if with_bias else None
    head = LMHead(lambda: weight, lambda: bias, chunk=chunk, softcap=softcap)
    pull = torch.linspace(-1, 2, K)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]

    want_lp, want_ent = _reference(hidden, weight, targets, temperature=temperature, softcap=softcap, bias=bias)
    want = torch.autograd.grad((want_lp * pull + 0.3 * want_ent * pull.flip(0)).sum(), leaves)
    got_lp, got_ent = head.score(hidden, targets, temperature=temperature, entropy=True)
    got = torch.autograd.grad((got_lp * pull + 0.3 * got_ent * pull.flip(0)).sum(), leaves)

    torch.testing.assert_close(got_lp, want_lp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_ent, want_ent, rtol=1e-5, atol=1e-5)
    for have, expected in zip(got, want, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 3])
def test_rows_may_serve_several_targets(chunk):
    hidden, weight, _ = _parts()
    rows = torch.tensor([0, 0, 5, 2, 10, 0, 9])
    targets = torch.tensor([3, 3, 4, 1, 36, 7, 0])
    pull = torch.linspace(1, 2, len(rows))
    want_lp, want_ent = _reference(hidden, weight, targets, rows=rows)
    want = torch.autograd.grad(((want_lp + want_ent) * pull).sum(), [hidden, weight])
    lp, ent = LMHead(lambda: weight, chunk=chunk).score(hidden, targets, rows=rows, entropy=True)
    got = torch.autograd.grad(((lp + ent) * pull).sum(), [hidden, weight])
    torch.testing.assert_close(lp, want_lp, rtol=1e-5, atol=1e-5)
    for have, expected in zip(got, want, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("fp32", "chunk"), COMBOS)
def test_flags_are_independent_in_bf16(fp32, chunk):
    hidden, weight, targets = _parts(torch.bfloat16)
    lp, ent = LMHead(lambda: weight, fp32=fp32, chunk=chunk).score(hidden, targets, entropy=True)
    exact, _ = _reference(hidden, weight, targets)
    rounded = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert lp.dtype == ent.dtype == torch.float32
    torch.testing.assert_close(lp, exact if fp32 else rounded, rtol=1e-6, atol=2e-6)
    assert not torch.allclose(rounded, exact, atol=1e-4)
    (lp.sum() + ent.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [None, 4])
def test_weight_gradient_is_rounded_once(chunk):
    hidden, weight, targets = _parts(torch.bfloat16)
    want_lp, _ = _reference(hidden, weight, targets)
    (want,) = torch.autograd.grad(want_lp.sum(), [weight])
    lp, _ = LMHead(lambda: weight, chunk=chunk).score(hidden, targets)
    (got,) = torch.autograd.grad(lp.sum(), [weight])
    torch.testing.assert_close(got, want, rtol=8e-3, atol=1e-6)  # one bf16 step at most


@pytest.mark.parametrize(
    ("dtype", "fp32", "casts"), [(torch.bfloat16, True, 1), (torch.float32, True, 0), (torch.bfloat16, False, 0)]
)
@pytest.mark.parametrize("chunk", [None, 2])
def test_one_weight_cast_each_way_for_all_chunks(dtype, fp32, casts, chunk):
    hidden, weight, targets = _parts(dtype)
    head = LMHead(lambda: weight, fp32=fp32, chunk=chunk)
    with WeightCasts(weight.shape) as forward:
        lp, ent = head.score(hidden, targets, entropy=True)
    with WeightCasts(weight.shape) as backward:
        (lp.sum() + ent.sum()).backward()
    assert (forward.count, backward.count) == (casts, casts)


@pytest.mark.parametrize("chunk", [None, 2])
def test_no_float32_copy_outlives_the_forward(chunk):
    hidden, weight, targets = _parts(torch.bfloat16)
    lp, _ = LMHead(lambda: weight, chunk=chunk).score(hidden, targets)
    saved = [t for t in lp.grad_fn.saved_tensors if t is not None and tuple(t.shape) == tuple(weight.shape)]
    assert [t.dtype for t in saved] == [torch.bfloat16]
    assert saved[0].data_ptr() == weight.data_ptr()


def test_in_place_update_and_new_parameter_are_seen_at_once():  # B13
    module = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    head = LMHead(lambda: module.weight)
    hidden = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    first = head.logits(hidden)
    module.weight.data.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    second = head.logits(hidden)
    module.weight = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=torch.bfloat16))
    third = head.logits(hidden)
    assert [t.tolist() for t in (first, second, third)] == [[3.0, 6.0], [2.0, 1.0], [3.0, 6.0]]
    assert {t.dtype for t in (first, second, third)} == {torch.float32}


@pytest.mark.parametrize("chunk", [None, 1])
def test_update_between_two_scores_is_seen(chunk):
    hidden, weight, targets = _parts(torch.bfloat16)
    head = LMHead(lambda: weight, chunk=chunk)
    head.score(hidden, targets)
    weight.data.copy_(weight.data.flip(0))
    lp, _ = head.score(hidden, targets)
    torch.testing.assert_close(lp, _reference(hidden, weight, targets)[0], rtol=1e-5, atol=1e-5)


def test_tied_head_stays_tied_and_keeps_its_dtype():  # B15
    embed = torch.nn.Embedding(4, 2, dtype=torch.bfloat16)
    linear = torch.nn.Linear(2, 4, bias=False, dtype=torch.bfloat16)
    linear.weight = embed.weight
    torch.nn.init.constant_(embed.weight, 2.0)
    model = torch.nn.ModuleList([embed, linear])
    head = LMHead(lambda: linear.weight)
    hidden = embed(torch.tensor([0, 1, 2, 3]))
    assert hidden.dtype == torch.bfloat16
    assert head.logits(hidden).dtype == torch.float32
    head.score(hidden, torch.tensor([0, 1, 2, 3]))[0].sum().backward()
    embed.weight.grad = torch.ones_like(embed.weight)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert linear.weight is embed.weight
    assert sum(p.numel() for p in model.parameters()) == 8
    assert embed.weight.dtype == torch.bfloat16
    assert embed.weight.unique().tolist() == linear.weight.unique().tolist() == [1.0]


def test_gradients_of_a_tied_weight_add_up():
    weight = torch.nn.Parameter(torch.randn(V, H, generator=torch.Generator().manual_seed(1)))
    ids, targets = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    (want,) = torch.autograd.grad(_reference(weight[ids], weight, targets)[0].sum(), [weight])
    lp, _ = LMHead(lambda: weight, chunk=2).score(weight[ids], targets)
    (got,) = torch.autograd.grad(lp.sum(), [weight])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_autocast_around_the_head_changes_nothing():
    hidden, weight, targets = _parts()
    head = LMHead(lambda: weight)
    plain, _ = head.score(hidden, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = head.score(hidden, targets)
    assert torch.equal(plain, inside)


def test_backward_twice_gives_the_same_gradient():
    hidden, weight, targets = _parts()
    lp, _ = LMHead(lambda: weight).score(hidden, targets)
    (first,) = torch.autograd.grad(lp.sum(), [weight], retain_graph=True)
    (second,) = torch.autograd.grad(lp.sum(), [weight])
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    hidden, weight, targets = _parts()
    with pytest.raises(ConfigError, match="above 0"):
        LMHead(lambda: weight).score(hidden, targets, temperature=temperature)


def test_chunk_below_one_is_refused():
    with pytest.raises(ConfigError, match="chunk is 0"):
        LMHead(lambda: torch.zeros(1), chunk=0)

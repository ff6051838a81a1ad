import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from powertrain.errors import ConfigError
from powertrain.interfaces.data import TrainBatch
from powertrain.tensors.head import LMHead
from powertrain.tensors.packing import choose_mode, plan, render, scored_tokens

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _model(kind, *, tied=False, attention="sdpa", **extra):
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[kind]
    config = config_class(**SMALL, tie_word_embeddings=tied, attn_implementation=attention, **extra)
    if kind == "qwen3":
        config.head_dim = 8
    return model_class(config).float().eval()


def _batch(seed=0, head=0):
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 61, head).tolist()
    prompts = [shared + rng.integers(1, 61, n).tolist() for n in (5, 1, 9)]
    owner = [0, 0, 0, 1, 1, 2, 0]
    completions = [rng.integers(1, 61, n).tolist() for n in (4, 1, 7, 3, 3, 6, 2)]
    batch = TrainBatch.from_sequences([prompts[o] for o in owner], completions, groups=owner)
    batch.weights[:] *= rng.uniform(0.5, 1.5, len(batch.weights))
    return batch


def _naive(model, batch):
    out = torch.zeros(len(batch.tokens))
    for i in range(batch.size):
        begin, end = int(batch.starts[i]), int(batch.starts[i + 1])
        ids = torch.from_numpy(batch.tokens[begin:end])[None]
        logp = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        first = int(batch.prompt_lens[i])
        out = out.index_put((torch.arange(begin + first, end),), logp.gather(1, ids[0, 1:, None])[first - 1 :, 0])
    return out


def _packed(model, batch, mode, *, world=1, budget=64, attention="sdpa", masked=True, hidden_size=32):
    head = LMHead.of(model)
    scored = scored_tokens(batch, weighted=False)
    out = torch.zeros(len(batch.tokens))
    for share in plan(batch, scored, mode=mode, world=world, budget=budget, hidden_size=hidden_size, masked=masked):
        for rows in share:
            micro = render(batch, rows, scored, attention=attention if masked else "flash_attention_2")
            hidden = model.base_model(**micro.inputs, use_cache=False).last_hidden_state
            hidden = hidden.flatten(0, 1)[micro.source]
            out = out.index_put((micro.place,), head.score(hidden, micro.targets, rows=micro.rows)[0])
    return out


def _gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["shared", "packed", "padded"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_layout_equals_one_sequence_at_a_time(kind, tied, mode, world):
    model, batch = _model(kind, tied=tied), _batch()
    weights = torch.from_numpy(batch.weights)
    want = _naive(model, batch)
    want_grads = _gradients(model, (want * weights).sum())
    got = _packed(model, batch, mode, world=world)
    got_grads = _gradients(model, (got * weights).sum())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_that_begin_alike_share_their_beginning(attention):
    model, batch = _model("qwen3", tied=True, attention=attention), _batch(head=12)
    scored = scored_tokens(batch, weighted=False)
    [[[row]]] = plan(batch, scored, mode="shared", world=1, budget=200, hidden_size=64)
    assert {cluster.prefix for cluster in row} == {12}
    assert len(row) == 3
    want = _naive(model, batch)
    want_grads = _gradients(model, want.sum())
    got = _packed(model, batch, "shared", budget=200, attention=attention, hidden_size=64)
    got_grads = _gradients(model, got.sum())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["shared", "packed"])
def test_eager_attention_takes_the_additive_mask(mode):
    model, batch = _model("llama", attention="eager"), _batch()
    got = _packed(model, batch, mode, attention="eager")
    torch.testing.assert_close(got, _naive(model, batch), rtol=1e-5, atol=1e-5)


def test_packed_without_mask_marks_borders_by_positions():
    model, batch = _model("qwen3"), _batch()
    got = _packed(model, batch, "packed", masked=False, budget=30)
    torch.testing.assert_close(got, _naive(model, batch), rtol=1e-5, atol=1e-5)


def test_padded_is_right_for_a_sliding_window():
    model, batch = _model("mistral", sliding_window=4), _batch()
    assert choose_mode(model, "auto", "sdpa") == "padded"
    torch.testing.assert_close(_packed(model, batch, "padded"), _naive(model, batch), rtol=1e-5, atol=1e-5)


def test_shared_feeds_a_prompt_once():
    batch = TrainBatch.from_sequences([[1, 2, 3, 4]] * 3, [[5, 6], [7], [8, 9, 10]])
    scored = scored_tokens(batch, weighted=False)
    [[[row]]] = plan(batch, scored, mode="shared", world=1, budget=100)
    micro = render(batch, [row], scored)
    assert micro.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8, 9]]
    assert micro.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 5]]
    assert micro.source.tolist() == [3, 4, 5, 6]
    assert micro.rows.tolist() == [0, 1, 0, 0, 2, 3]
    assert micro.targets.tolist() == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("wanted", ["shared", "packed"])
def test_layouts_that_would_be_wrong_are_refused(wanted):
    with pytest.raises(ConfigError, match="use padded"):
        choose_mode(_model("mistral", sliding_window=4), wanted, "sdpa")


@pytest.mark.parametrize(
    ("attention", "wanted", "mode"),
    [
        ("sdpa", "auto", "shared"),
        ("eager", "auto", "shared"),
        ("flash_attention_2", "auto", "packed"),
        ("sdpa", "padded", "padded"),
    ],
)
def test_mode_follows_the_attention(attention, wanted, mode):
    assert choose_mode(_model("llama"), wanted, attention) == mode


def test_shared_under_flash_attention_is_refused():
    with pytest.raises(ConfigError, match="packed or padded"):
        choose_mode(_model("llama"), "shared", "flash_attention_2")


def test_unknown_mode_lists_the_known():
    with pytest.raises(ConfigError, match="'dense'; it takes auto, shared"):
        choose_mode(_model("llama"), "dense", "sdpa")

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from powertrain.errors import ConfigError, NumericsError, StateError
from powertrain.interfaces.build import HeadSpec, LoraSpec, OptimSpec, ScheduleSpec
from powertrain.interfaces.data import LossSpec, TrainBatch
from powertrain_fsdp.engine import FsdpEngine

sys.path.insert(0, str(Path(__file__).parent / "modules"))
LOSS = LossSpec(name="powertrain_fsdp_test_losses:policy", entropy=True)


def _opened(spec):
    engine = FsdpEngine()
    engine.prepare({})
    engine.build(spec)
    return engine


def reference(spec, batches, temperature=1.0):
    """A plain float32 loop: one sequence at a time, autograd, torch's own clipping and AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32)
    optim = spec.optim
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    seen = []
    for batch in batches:
        loss = torch.zeros(())
        for i in range(batch.size):
            begin, end, prompt = int(batch.starts[i]), int(batch.starts[i + 1]), int(batch.prompt_lens[i])
            ids = torch.from_numpy(batch.tokens[begin:end])[None]
            logp = (model(input_ids=ids).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
            chosen = logp.gather(1, ids[0, prompt:, None])[:, 0]
            entropy = -(logp.exp() * logp).sum(-1)
            span = slice(begin + prompt, end)
            advantages = torch.from_numpy(batch.token_fields["advantages"][span])
            scale = float(batch.sample_fields["scale"][i])
            terms = -chosen * advantages * scale - 0.01 * entropy
            loss = loss + (terms * torch.from_numpy(batch.weights[span])).sum()
        loss = loss / batch.total_weight()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        adam.step()
        seen.append((float(loss.detach()), float(norm)))
    return seen, dict(model.named_parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_three_steps_equal_the_plain_loop(make_spec, batches, kind, tied, packing):
    spec = make_spec(kind, tied, options={"microbatch_tokens": 24, "packing": packing})
    loss = dataclasses.replace(LOSS, temperature=0.8)
    want, weights = reference(spec, batches, 0.8)
    with _opened(spec) as engine:
        results = [engine.train_step(batch, loss) for batch in batches]
        got = engine.weights().tensors()
    np.testing.assert_allclose([(r.loss, r.grad_norm) for r in results], want, rtol=1e-5, atol=1e-6)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, weights[name].detach(), rtol=1e-5, atol=2e-6)
    assert [r.step for r in results] == [1, 2, 3]
    assert [r.tokens for r in results] == [int((b.weights != 0).sum()) for b in batches]


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"microbatch_tokens": 10_000}},
        {"options": {"microbatch_tokens": 1}},
        {"options": {"microbatch_tokens": 24, "activation_checkpointing": True}},
        {"options": {"microbatch_tokens": 24, "attention": "eager"}},
        {"options": {"microbatch_tokens": 24, "shard": "always"}},
        {"head": HeadSpec(chunk=3)},
        {"deterministic": True},
    ],
)
def test_no_setting_changes_the_numbers(make_spec, batches, changes):
    def run(spec):
        with _opened(spec) as engine:
            results = [engine.train_step(batch, LOSS) for batch in batches]
            return results, engine.logprobs(batches[0])

    try:
        want, want_logprobs = run(make_spec())
        got, logprobs = run(make_spec(**changes))
    finally:
        torch.use_deterministic_algorithms(False)
    for have, expected in zip(got, want, strict=True):
        assert have.loss == pytest.approx(expected.loss, rel=1e-5)
        assert have.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert have.metrics == pytest.approx(expected.metrics, rel=1e-4)
    np.testing.assert_allclose(logprobs, want_logprobs, atol=2e-4)


def test_two_runs_are_bitwise_equal(make_spec, batches):
    def run():
        with _opened(make_spec()) as engine:
            results = [dataclasses.replace(engine.train_step(b, LOSS), seconds={}) for b in batches]
            return results, [t.clone() for t in engine.weights().tensors().values()]

    (first, one), (second, two) = run(), run()
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_logprobs_are_those_of_the_model(make_spec, batches):
    from transformers import AutoModelForCausalLM

    spec = make_spec(optim=None)
    batch = batches[0]
    batch.weights[:] = 0  # scoring does not look at weights
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32)
    with _opened(spec) as engine:
        got = engine.logprobs(batch, 0.7)
    assert got.dtype == np.float32
    for i in range(batch.size):
        begin, end, prompt = int(batch.starts[i]), int(batch.starts[i + 1]), int(batch.prompt_lens[i])
        ids = torch.from_numpy(batch.tokens[begin:end])[None]
        logp = (model(input_ids=ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(got[begin + prompt : end], logp[prompt - 1 :].detach(), atol=1e-5)
        assert (got[begin : begin + prompt] == 0).all()


def test_only_allowed_tensors_reach_the_model(make_spec, batches):
    batch = batches[0]
    batch = TrainBatch(
        **{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        | {"model_inputs": {"kinds": batch.tokens}}
    )
    seen = []
    with _opened(make_spec()) as plain, pytest.raises(ConfigError, match=r"kinds.*model_inputs"):
        plain.train_step(batch, LOSS)
    spec = make_spec(options={"microbatch_tokens": 24, "model_inputs": ["kinds"]})
    with _opened(spec) as engine:
        body = engine._built.scorer.model.base_model
        body.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, set(kwargs))), with_kwargs=True)
        engine.train_step(batch, LOSS)
        engine.train_step(batches[1], LOSS)
    assert all(args == () for args, _ in seen)
    names = set().union(*(kwargs for _, kwargs in seen))
    assert names == {"input_ids", "position_ids", "attention_mask", "kinds", "use_cache"}


@pytest.mark.parametrize(("name", "config"), [("explode", {"limit": 1.0}), ("infinite_gradient", {})])
def test_not_finite_leaves_weights_and_moments_alone(make_spec, batches, name, config):
    with _opened(make_spec()) as engine:
        engine.train_step(batches[0], LOSS)
        before = [t.clone() for t in engine.weights().tensors().values()]
        changes = engine.weights().changes()
        with pytest.raises(NumericsError, match=r"step 2: .*must be finite"):
            engine.train_step(batches[1], LossSpec(name=f"powertrain_fsdp_test_losses:{name}", config=config))
        assert all(torch.equal(a, b) for a, b in zip(before, engine.weights().tensors().values(), strict=True))
        assert engine.weights().changes() == changes
        assert engine.state == "ready"
        bad, good = engine.train_step(batches[1], LOSS), None
    with _opened(make_spec()) as engine:
        engine.train_step(batches[0], LOSS)
        good = engine.train_step(batches[1], LOSS)
    assert dataclasses.replace(bad, seconds={}) == dataclasses.replace(good, seconds={})


def test_loss_that_raises_is_named(make_spec, batches):
    with _opened(make_spec()) as engine:
        with pytest.raises(ConfigError, match=r"fail.*rank 0: RuntimeError: boom"):
            engine.train_step(batches[0], LossSpec(name="powertrain_fsdp_test_losses:fail", config={"limit": 0.0}))
        with pytest.raises(ConfigError, match=r"terms has shape \(\)"):
            engine.train_step(batches[0], LossSpec(name="powertrain_fsdp_test_losses:wrong_shape"))
        assert engine.train_step(batches[0], LOSS).step == 1


def test_weights_that_add_up_to_nothing_are_refused(make_spec, batches):
    batches[0].weights[:] = 0
    with _opened(make_spec()) as engine, pytest.raises(ConfigError, match="add up to 0"):
        engine.train_step(batches[0], LOSS)


def test_engine_without_optimizer_only_scores(make_spec, batches):
    with _opened(make_spec(optim=None)) as engine:
        assert engine.logprobs(batches[0]).any()
        with pytest.raises(ConfigError, match="only scores"):
            engine.train_step(batches[0], LOSS)


def test_learning_rate_follows_the_schedule(make_spec, batches):
    optim = OptimSpec(lr=1e-2, schedule=ScheduleSpec(kind="linear", total_steps=4, warmup_steps=2))
    with _opened(make_spec(optim=optim)) as engine:
        rates = [engine.train_step(b, LOSS).lr for b in batches]
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2])


def test_given_denominator_scales_loss_and_gradient(make_spec, batches):
    double = dataclasses.replace(batches[0], denominator=batches[0].total_weight() * 2)
    with _opened(make_spec()) as engine:
        half = engine.train_step(double, LOSS)
    with _opened(make_spec()) as engine:
        whole = engine.train_step(batches[0], LOSS)
    assert half.loss * 2 == pytest.approx(whole.loss, rel=1e-6)
    assert half.grad_norm * 2 == pytest.approx(whole.grad_norm, rel=1e-5)


def test_tokens_without_weight_count_nowhere(make_spec, batches):
    batch = batches[0]
    keep = batch.weights.copy()
    batch.weights[batch.starts[2] : batch.starts[4]] = 0
    parts = [i for i in range(batch.size) if i not in (2, 3)]
    spans = [slice(int(batch.starts[i]), int(batch.starts[i + 1])) for i in parts]
    cut = {
        "weights": np.concatenate([keep[s] for s in spans]),
        "tokens": np.concatenate([batch.tokens[s] for s in spans]),
    }
    fewer = TrainBatch(
        **cut,
        starts=np.concatenate([[0], np.cumsum([s.stop - s.start for s in spans])]),
        prompt_lens=batch.prompt_lens[parts],
        token_fields={k: np.concatenate([v[s] for s in spans]) for k, v in batch.token_fields.items()},
        sample_fields={k: v[parts] for k, v in batch.sample_fields.items()},
    )
    with _opened(make_spec()) as engine:
        masked = engine.train_step(batch, LOSS)
    with _opened(make_spec()) as engine:
        gone = engine.train_step(fewer, LOSS)
    assert (masked.loss, masked.tokens) == (pytest.approx(gone.loss, rel=1e-6), gone.tokens)
    assert masked.metrics == pytest.approx(gone.metrics, rel=1e-6)


def test_switches_are_set_before_the_model_is_made(make_spec):
    try:
        with _opened(make_spec(deterministic=True)) as engine:
            record = engine.health()["build"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert [entry["stage"] for entry in record] == [
        "determinism",
        "head",
        "attention",
        "construct",
        "load",
        "patch",
        "wrap",
    ]
    seen = next(entry for entry in record if entry["stage"] == "construct")
    assert seen["deterministic_algorithms"] is True
    assert seen["matmul_tf32"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"packing": "dense"}}, "packing"),
        ({"options": {"nosuch": 1}}, "unknown option 'nosuch'"),
        ({"model": "./nowhere"}, "does not exist"),
        ({"optim": OptimSpec(schedule=ScheduleSpec(kind="linear"))}, "total_steps"),
    ],
)
def test_what_cannot_be_built_says_why(make_spec, changes, message):
    engine = FsdpEngine()
    engine.prepare({})
    with pytest.raises(ConfigError, match=message):
        engine.build(make_spec(**changes))
    assert engine.state == "failed"
    engine.close()
    assert engine.state == "closed"


def test_calls_in_a_wrong_state_are_refused(make_spec, batches):
    engine = FsdpEngine()
    with pytest.raises(StateError, match="'new'"):
        engine.train_step(batches[0], LOSS)
    engine.prepare({})
    engine.build(make_spec())
    engine.offload()
    with pytest.raises(StateError, match="'offloaded'"):
        engine.logprobs(batches[0])
    engine.onload()
    assert engine.train_step(batches[0], LOSS).step == 1
    engine.close()
    engine.close()


def test_bf16_with_float32_master_holds_small_steps(make_spec, batches):
    options = {"microbatch_tokens": 24, "master_dtype": "float32"}
    tiny = OptimSpec(lr=1e-6)
    with _opened(make_spec(dtype="bfloat16", options=options, optim=tiny)) as engine:
        start = {n: t.clone() for n, t in engine.weights().tensors().items()}
        engine.train_step(batches[0], LOSS)
        moved = engine.weights().tensors()
        assert {t.dtype for t in moved.values()} == {torch.float32}
        assert all(not torch.equal(start[n], moved[n]) for n in start)
        want = engine.logprobs(batches[0])
    with _opened(make_spec(dtype="bfloat16", optim=tiny)) as engine:
        assert {t.dtype for t in engine.weights().tensors().values()} == {torch.bfloat16}
        np.testing.assert_allclose(engine.logprobs(batches[0]), want, atol=0.1)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_training_pass_computes_what_scoring_does(make_spec, batches, kind, checkpointing):
    """These models have dropout of their own, gpt2 in modules, opt within its layers' forward."""
    options = {"microbatch_tokens": 24, "activation_checkpointing": checkpointing}
    with _opened(make_spec(kind, options=options)) as engine:
        scored = engine.logprobs(batches[0])
        result = engine.train_step(batches[0], LossSpec(name="powertrain.tensors.loss:cross_entropy"))
    assert result.loss == pytest.approx(-(scored * batches[0].weights).sum() / batches[0].total_weight(), rel=1e-5)


def test_adapters_dropout_is_on_in_training_alone(make_spec, batches):
    norms = []
    for dropout in (0.0, 0.5):
        with _opened(make_spec(lora=LoraSpec(rank=4, dropout=dropout))) as engine:
            assert np.array_equal(engine.logprobs(batches[0]), engine.logprobs(batches[0]))
            norms.append(engine.train_step(batches[0], LOSS).grad_norm)
    assert abs(norms[0] - norms[1]) > 1e-3 * norms[0]


@pytest.mark.parametrize("clip", [None, 0.0])
def test_clip_of_nothing_leaves_the_gradient(make_spec, batches, clip):
    with _opened(make_spec(optim=OptimSpec(lr=1e-2, clip=clip))) as engine:
        norm = engine.train_step(batches[0], LOSS).grad_norm
        first = [state["exp_avg"] for state in engine._optimizer.state.values()]
    assert sum(float(m.square().sum()) for m in first) ** 0.5 == pytest.approx(0.1 * norm, rel=1e-5)


def test_batch_without_a_scored_token_moves_weights_as_one_without_gradient(make_spec, batches):
    nothing = dataclasses.replace(batches[1], weights=np.zeros_like(batches[1].weights), denominator=9.0)
    constant = dataclasses.replace(
        batches[1], token_fields={"advantages": np.zeros_like(batches[1].weights)}, denominator=9.0
    )
    ends = []
    for batch in (nothing, constant):
        with _opened(make_spec()) as engine:
            engine.train_step(batches[0], LOSS)
            before = {n: t.clone() for n, t in engine.weights().tensors().items()}
            result = engine.train_step(batch, LossSpec(name=LOSS.name))
            assert (result.loss, result.grad_norm, result.step) == (0.0, 0.0, 2)
            assert not np.isnan(engine.logprobs(batch)).any()
            ends.append({n: t.clone() for n, t in engine.weights().tensors().items()})
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
    assert not torch.equal(ends[0]["model.norm.weight"], before["model.norm.weight"])


def test_step_that_breaks_off_among_its_writes_counts_and_fails(make_spec, batches, monkeypatch):
    def broken():
        raise RuntimeError("out of memory")

    engine = _opened(make_spec())
    source = engine.weights()
    before = source.changes()
    monkeypatch.setattr(engine._optimizer, "step", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.train_step(batches[0], LOSS)
    assert source.changes() != before
    assert engine.state == "failed"
    engine.close()

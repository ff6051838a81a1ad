import dataclasses

import numpy as np
import pytest
import torch

from powertrain.interfaces.build import HeadSpec, LoraSpec, OptimSpec
from powertrain.interfaces.data import LossSpec
from powertrain.weights import Box

EXPLODE = "powertrain_fsdp_test_losses"


def _close(one, other, tolerance=1e-6):
    for a, b in zip(one["results"], other["results"], strict=True):
        for field in ("loss", "grad_norm", "lr"):
            assert getattr(a, field) == pytest.approx(getattr(b, field), rel=tolerance * 10, abs=tolerance)
        assert (a.tokens, a.step) == (b.tokens, b.step)
        assert a.metrics == pytest.approx(b.metrics, rel=1e-4, abs=1e-6)
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(tensor, other["weights"][name], rtol=0, atol=tolerance)
    np.testing.assert_allclose(one["after"], other["after"], atol=2e-5)


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", False)])
def test_two_ranks_equal_one(run_ranks, make_spec, batches, kind, tied):
    spec = make_spec(kind, tied)
    [alone] = run_ranks("train", 1, spec=spec, batches=batches)
    first, second = run_ranks("train", 2, spec=spec, batches=batches)
    assert first["results"] == second["results"]
    assert (first["after"] == second["after"]).all()
    _close(first, alone)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"microbatch_tokens": 24, "sync_each_microbatch": True}},
        {"options": {"microbatch_tokens": 24, "activation_checkpointing": True}},
        {"options": {"microbatch_tokens": 1, "packing": "padded"}, "head": HeadSpec(chunk=2)},
        {"lora": LoraSpec(rank=4), "optim": OptimSpec(lr=1e-3, eps=1e-5)},
    ],
    ids=["sync", "checkpointing", "micro", "lora"],
)
def test_two_ranks_equal_one_under_options(run_ranks, make_spec, batches, changes):
    spec = make_spec(**changes)
    [alone] = run_ranks("train", 1, spec=spec, batches=batches)
    first, second = run_ranks("train", 2, spec=spec, batches=batches)
    assert first["results"] == second["results"]
    _close(first, alone, 2e-6)


def test_ranks_without_work_take_part(run_ranks, make_spec, few_batches):
    [alone] = run_ranks("train", 1, spec=make_spec(), batches=few_batches)
    answers = run_ranks("train", 3, spec=make_spec(), batches=few_batches)
    for answer in answers:
        assert answer["results"] == answers[0]["results"]
        _close(answer, alone)


@pytest.mark.parametrize("world", [2, 3])
def test_boxes_of_all_ranks_cover_each_tensor_once(run_ranks, make_spec, batches, world):
    """The vocabulary (61) and most rows divide by neither number of ranks."""
    answers = run_ranks("train", world, spec=make_spec(tied=True), batches=batches[:1])
    manifests = [answer["pieces"][0] for answer in answers]
    assert len({tuple(e.name for e in m.entries) for m in manifests}) == 1
    assert all(m.tied == {"lm_head.weight": "model.embed_tokens.weight"} for m in manifests)
    assert [m.rank for m in manifests] == list(range(world))
    for name, whole in answers[0]["weights"].items():
        rebuilt, times = torch.full_like(whole, float("nan")), torch.zeros(whole.shape, dtype=torch.int)
        for answer, manifest in zip(answers, manifests, strict=True):
            entry = manifest.by_name()[name]
            assert entry.shape == tuple(whole.shape)
            storage = answer["pieces"][1]
            for box in entry.boxes:
                at = tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))
                rebuilt[at] = torch.as_strided(storage[box.storage], box.size, box.stride, box.offset)
                times[at] += 1
        assert (times == 1).all()
        assert torch.equal(rebuilt, whole)


def test_more_ranks_than_rows_leaves_empty_shards(run_ranks, make_spec, batches):
    """A norm of 64 rows on 3 ranks: 22, 22, 20; LoRA matrices of 2 rows: 1, 1, none."""
    spec = make_spec(lora=LoraSpec(rank=2, targets=("q_proj",)), optim=OptimSpec(lr=1e-3))
    answers = run_ranks("train", 3, spec=spec, batches=batches[:1])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    boxes = [answer["pieces"][0].by_name()[name].boxes for answer in answers]
    assert boxes == [
        (Box((0, 0), (1, 64), name, 0, (64, 1)),),
        (Box((1, 0), (1, 64), name, 0, (64, 1)),),
        (),
    ]
    assert answers[0]["pieces"][0].kind == "adapter"


def test_faults_are_raised_on_all_ranks_and_change_nothing(run_ranks, make_spec, batches):
    limit = float(max(batches[0].sample_fields["scale"]))
    losses = [
        LossSpec(name=f"{EXPLODE}:explode", config={"limit": limit}),
        LossSpec(name=f"{EXPLODE}:fail", config={"limit": limit}),
        LossSpec(name=f"{EXPLODE}:infinite_gradient"),
    ]
    first, second = run_ranks("faults", 2, spec=make_spec(), batches=batches, losses=losses)
    assert first["told"] == second["told"]
    assert [kind for kind, _ in first["told"]] == ["NumericsError", "ConfigError", "NumericsError"]
    assert "boom" in first["told"][1][1]
    assert first["same"]
    assert second["same"]
    assert first["state"] == second["state"] == "ready"
    [alone] = run_ranks("train", 1, spec=make_spec(), batches=batches[:1])
    assert first["next"].loss == pytest.approx(alone["results"][0].loss, rel=1e-5)


def test_close_leaves_the_group_and_no_thread(run_ranks, make_spec, batches):
    assert run_ranks("threads", 2, spec=make_spec(), batches=batches) == [([], False, "closed")] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_bitwise(run_ranks, make_spec, batches, tmp_path, world):
    spec = make_spec("qwen3", False)
    for answer in run_ranks("resume", world, spec=spec, batches=batches, checkpoint=str(tmp_path / "c")):
        assert answer["draws"][0] == answer["draws"][1]
        assert answer["results"][0] == answer["results"][1]
        assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in answer["weights"]), strict=True))


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
def test_resume_on_another_number_of_ranks(run_ranks, make_spec, batches, tmp_path, first, then, lora):
    spec = make_spec(lora=lora)
    saved = run_ranks("resume", first, spec=spec, batches=batches, checkpoint=str(tmp_path / "c"))[0]
    for answer in run_ranks("go_on", then, spec=spec, batches=batches[1:], checkpoint=str(tmp_path / "c")):
        for got, want in zip(answer["results"], saved["results"][0], strict=True):
            assert (got.loss, got.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-5)
            assert (got.step, got.lr) == (want.step, want.lr)
        for name, tensor in saved["weights"][0].items():
            torch.testing.assert_close(answer["weights"][name], tensor, rtol=0, atol=2e-6)


def test_damaged_shard_is_refused_on_all_ranks(run_ranks, make_spec, batches, tmp_path):
    spec, checkpoint = make_spec(), tmp_path / "c"
    run_ranks("resume", 2, spec=spec, batches=batches[:1], checkpoint=str(checkpoint))
    shard = sorted((checkpoint / "shards").glob("*.distcp"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    first, second = run_ranks("load_fault", 2, spec=spec, checkpoint=str(checkpoint))
    assert first == second
    assert first[0] == "CheckpointError"
    assert shard.name in first[1]


def test_export_of_two_ranks_is_whole(run_ranks, make_spec, tmp_path):
    from transformers import AutoModelForCausalLM

    weights = run_ranks("export", 2, spec=make_spec("qwen3", False), target=str(tmp_path / "out"))[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    state = dict(model.named_parameters())
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_bf16_with_master_on_two_ranks_equals_one(run_ranks, make_spec, batches):
    spec = make_spec(dtype="bfloat16", options={"microbatch_tokens": 24, "master_dtype": "float32"})
    [alone] = run_ranks("train", 1, spec=spec, batches=batches[:1])
    first, second = run_ranks("train", 2, spec=spec, batches=batches[:1])
    assert first["results"] == second["results"]
    assert first["results"][0].loss == pytest.approx(alone["results"][0].loss, rel=2e-2)
    assert {e.dtype for e in first["pieces"][0].entries} == {"float32"}
    assert dataclasses.asdict(first["results"][0])["tokens"] == alone["results"][0].tokens

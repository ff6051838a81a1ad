from __future__ import annotations

import numpy as np
import pytest

from powertrain.errors import CheckpointError, PowertrainError
from powertrain.interfaces.data import Completion, GenerateResult, Segment
from powertrain_ppo.evaluate import evaluate
from powertrain_ppo.hooks import OPTIONS
from powertrain_ppo.rewards import Reward
from powertrain_ppo.rollouts import Ages, judged, training_batch
from powertrain_ppo.state import check_state, read_state, save_state


def completion(tokens, segments=None, finish="stop"):
    return Completion(
        tokens=np.asarray(tokens, dtype=np.int64),
        logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
        logprobs_t1=np.full(len(tokens), -0.25, dtype=np.float32),
        finish=finish,
        segments=tuple(segments or [Segment(0, len(tokens), "1.1")]),
    )


class Texts:
    """Ids are code points; no tokenizer is needed to see which rows are counted."""

    stop_ids = (0,)

    def encode(self, record):
        return [ord(c) for c in record["prompt"]]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def by_first_token(record, text, tokens):
    return float(tokens[0])


REWARD = Reward(by_first_token, "by_first_token", deadline=5, parallel=1)


async def judge(completions_of_prompts):
    records = [(10 + i, {"prompt": f"p{i}"}) for i in range(len(completions_of_prompts))]
    results = [GenerateResult(request_id=str(i), completions=tuple(c)) for i, c in enumerate(completions_of_prompts)]
    encoded = [Texts().encode(record) for _, record in records]
    return await judged(records, encoded, results, texts=Texts(), reward=REWARD)


async def test_partly_lost_group_keeps_its_own_mean():
    samples, lost = await judge(
        [
            [completion([1]), completion([0]), completion([], finish="abort"), completion([0])],
            [completion([1]), completion([1]), completion([0]), completion([1])],
        ]
    )
    assert lost == 1
    ages = [[0] * len(sample.completion.tokens) for sample in samples]
    batch, advantages = training_batch(samples, ages, std="population", eps=1e-6)
    assert advantages[:3] == pytest.approx([1.41421, -0.70711, -0.70711], abs=1e-5)
    assert advantages[3:] == pytest.approx([0.57735, 0.57735, -1.73205, 0.57735], abs=1e-5)
    assert batch.groups.tolist() == [10] * 3 + [11] * 4


async def test_aborted_completion_with_tokens_is_lost_too():
    samples, lost = await judge([[completion([1, 2], finish="abort"), completion([3])]])
    assert (len(samples), lost) == (1, 1)


async def test_batch_scores_completion_tokens_only():
    samples, _ = await judge([[completion([1, 2, 3]), completion([0])]])
    batch, _ = training_batch(samples, [[0, 1, 1], [0]], std="none", eps=0)
    assert batch.tokens.tolist() == [*map(ord, "p0"), 1, 2, 3, *map(ord, "p0"), 0]
    assert batch.weights.tolist() == [0, 0, 1, 1, 1, 0, 0, 1]
    assert batch.token_fields["old_logprobs"].tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0, -0.5]
    assert batch.token_fields["fresh"].tolist() == [0, 0, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("first_tokens", "kept"), [([[1, 0], [1, 1], [0, 2]], [10, 10, 12, 12]), ([[1, 1], [0, 0]], [10, 10])]
)
async def test_constant_groups_are_skipped_but_counted(first_tokens, kept):
    samples, _ = await judge([[completion([token, 5]) for token in group] for group in first_tokens])
    batch, advantages = training_batch(samples, [[0, 0]] * len(samples), std="none", eps=0, skip_constant=True)
    assert batch.groups.tolist() == kept
    assert batch.total_weight() == 2 * len(samples)
    assert len(advantages) == len(samples)


def test_staleness_is_measured_for_each_segment():
    ages = Ages()
    ages.published("1.1", 0)
    ages.published("1.2", 1)
    ages.published("2.5", 3)
    cut = completion([1, 2, 3, 4], [Segment(0, 1, "1.1"), Segment(1, 3, "1.2"), Segment(3, 4, "2.5")])
    assert ages.of_tokens(cut, trained=3) == [3, 2, 2, 0]


def test_unknown_version_is_refused():
    with pytest.raises(PowertrainError, match=r"'1\.1', which this run never published"):
        Ages().of_tokens(completion([1]), trained=0)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
async def test_accuracy_counts_each_row_once(count):
    asked = []

    async def generate(requests):
        asked.append(len(requests))
        # Row i answers with i % 2 first, so the odd rows are right.
        rows = [int(request.request_id.rsplit("-", 1)[1]) for request in requests]
        assert all(request.sampling.temperature == 0 and request.sampling.n == 1 for request in requests)
        return [
            GenerateResult(request_id=r.request_id, completions=(completion([i % 2, 5]),))
            for r, i in zip(requests, rows, strict=True)
        ]

    found = await evaluate(
        [{"prompt": f"p{i}"} for i in range(count)],
        name="eval",
        generate=generate,
        texts=Texts(),
        reward=REWARD,
        check=None,
        max_tokens=4,
        batch=4,
        adapter=None,
    )
    assert sum(asked) == count
    assert max(asked) <= 4
    assert found["eval/accuracy"] == (count // 2) / count
    assert found["eval/rows"] == count
    assert found["eval/tokens"] == 2


async def test_check_decides_accuracy_where_given():
    async def generate(requests):
        return [GenerateResult(request_id=r.request_id, completions=(completion([1]),)) for r in requests]

    common = {"name": "e", "generate": generate, "texts": Texts(), "max_tokens": 1, "batch": 2, "adapter": None}
    never = Reward(lambda *_: 0, "never", deadline=5, parallel=1)
    found = await evaluate([{"prompt": "p"}], reward=REWARD, check=never, **common)
    assert (found["eval/accuracy"], found["eval/reward"]) == (0.0, 1.0)


def test_state_comes_back(tmp_path):
    options = {spec.name: spec.default for spec in OPTIONS}
    save_state(tmp_path, step=7, options={**options, "data_options": {10: 1, 9: 2}}, seed=3)
    state = read_state(tmp_path, step=7)
    assert (state["step"], state["seed"]) == (7, 3)
    assert state["options"]["data_options"] == {"10": 1, "9": 2}


def test_state_is_that_of_the_data_alone(tmp_path):
    options = {spec.name: spec.default for spec in OPTIONS}
    save_state(tmp_path, step=7, options=options, seed=3)
    check_state(tmp_path, read_state(tmp_path, step=7), options={**options, "steps": 999}, seed=3)


def test_state_of_other_data_is_refused(tmp_path):
    options = {spec.name: spec.default for spec in OPTIONS}
    save_state(tmp_path, step=7, options=options, seed=3)
    with pytest.raises(CheckpointError, match=r"group_size was 8 and is 4.*seed was 3 and is 4"):
        check_state(tmp_path, read_state(tmp_path, step=7), options={**options, "group_size": 4}, seed=4)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda text: "{}", "cannot be read"),
        (lambda text: "[]", "cannot be read"),
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: text.replace('"step": 7', '"step": 5'), "has CRC-32"),
    ],
    ids=["keys", "list", "half", "empty", "one bit"],
)
def test_damaged_state_is_told(tmp_path, harm, said):
    save_state(tmp_path, step=7, options={spec.name: spec.default for spec in OPTIONS}, seed=3)
    file = tmp_path / "recipe.json"
    file.write_text(harm(file.read_text()))
    with pytest.raises(CheckpointError, match=rf"damaged: recipe\.json {said}"):
        read_state(tmp_path, step=7)


def test_renamed_checkpoint_is_told(tmp_path):
    save_state(tmp_path, step=7, options={spec.name: spec.default for spec in OPTIONS}, seed=3)
    with pytest.raises(CheckpointError, match="is that of step 7"):
        read_state(tmp_path, step=8)


def test_no_single_bit_of_the_state_may_change(tmp_path):
    save_state(tmp_path, step=7, options={spec.name: spec.default for spec in OPTIONS}, seed=3)
    file = tmp_path / "recipe.json"
    whole = file.read_bytes()
    passed = []
    for bit in range(len(whole) * 8):
        file.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        try:
            read_state(tmp_path, step=7)
            passed.append(bit)
        except CheckpointError:
            continue
    assert passed == []

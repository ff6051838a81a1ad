from __future__ import annotations

import json

import pytest

from powertrain.errors import ConfigError
from powertrain_ppo.data import Data, load_data, split
from powertrain_ppo.tasks import exact, sums

SUMS = {"data": "powertrain_ppo.tasks:sums", "data_options": {"low": 10, "high": 19}, "held_out": 20}


def load(tmp_path, seed=0, **options):
    return load_data({**SUMS, **options}, seed=seed, path=lambda text: tmp_path / text)


def numbers(count):
    return [{"prompt": f"p{i}", "row": i} for i in range(count)]


def test_held_out_prompts_are_never_trained_on(tmp_path):
    data = load(tmp_path)
    keys = [{row["key"] for row in side} for side in (data.train, data.held_out)]
    assert not keys[0] & keys[1]
    assert len(data.train) + len(data.held_out) == len(sums(10, 19))
    assert len(data.held_out) >= 20


def test_rows_with_one_prompt_stay_together():
    rows = [{"prompt": f"p{i % 7}"} for i in range(70)]
    data = split(rows, 20, seed=1)
    assert not {r["prompt"] for r in data.train} & {r["prompt"] for r in data.held_out}
    assert len(data.held_out) == 20


def test_split_follows_the_seed():
    first, again, other = (split(numbers(50), 10, seed).held_out for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_epoch_sees_every_row_once():
    data = Data(numbers(10), [])
    batches = [data.batch(step, 5, seed=3) for step in (1, 2, 3, 4)]
    seen = [record["row"] for batch in batches for _, record in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert [position for batch in batches for position, _ in batch] == list(range(20))


def test_batch_may_cross_epochs():
    data = Data(numbers(3), [])
    assert len(data.batch(1, 8, seed=0)) == 8


def test_batch_depends_on_step_and_seed_alone():
    data = Data(numbers(40), [])
    assert data.batch(4, 8, seed=0) == data.batch(4, 8, seed=0)
    assert data.batch(4, 8, seed=0) != data.batch(4, 8, seed=1)


def test_jsonl_file_is_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in numbers(6)) + "\n\n")
    data = load(tmp_path, data="rows.jsonl", held_out=2)
    assert (len(data.train), len(data.held_out)) == (4, 2)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"prompt": "a"}\n{"prompt"\n', "line 2"),
        ('{"question": "a"}\n', "row 0 has no `prompt`"),
        ('{"prompt": []}\n', "row 0 has no `prompt`"),
        ('{"prompt": [{"role": "user"}]}\n', "row 0 has no `prompt`"),
        ('{"prompt": "a"}\n', "none is left to train on"),
    ],
)
def test_unusable_rows_are_explained(tmp_path, text, match):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=match):
        load(tmp_path, data="rows.jsonl", held_out=1)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        load(tmp_path, data="rows.jsonl")


def test_own_split_is_taken_and_must_be_disjoint(tmp_path):
    (tmp_path / "own.py").write_text(
        "def good():\n    return {'train': [{'prompt': 'a'}], 'held_out': [{'prompt': 'b'}]}\n"
        "def bad():\n    return {'train': [{'prompt': 'a'}], 'held_out': [{'prompt': 'a'}]}\n"
    )
    assert load(tmp_path, data="own.py:good", data_options={}).held_out == [{"prompt": "b"}]
    with pytest.raises(ConfigError, match="1 prompts are in train and in held_out"):
        load(tmp_path, data="own.py:bad", data_options={})


def test_wrong_data_options_are_told(tmp_path):
    with pytest.raises(ConfigError, match="does not take data_options"):
        load(tmp_path, data_options={"lowest": 1})


@pytest.mark.parametrize(
    ("text", "reward"), [("37", 1.0), (" 37\n", 1.0), ("37.", 0.0), ("12 + 25 = 37", 0.0), ("38", 0.0), ("", 0.0)]
)
def test_only_the_answer_itself_is_right(text, reward):
    assert exact({"answer": "37"}, text, []) == reward


def test_every_sum_is_right():
    for record in sums(10, 30):
        a, _, b, _ = record["prompt"].splitlines()[-1].split()
        assert int(record["answer"]) == int(a) + int(b)

from __future__ import annotations

import json

import pytest

from powertrain.errors import ConfigError
from powertrain_ppo.data import Data, load_data, split
from powertrain_ppo.tasks import exact, sums

SUMS = {"data": "powertrain_ppo.tasks:sums", "data_options": {"low": 10, "high": 19}, "held_out": 20}


def load(tmp_path, seed=0, **options):
    given = {"data_options": {}} if options.get("data", "").endswith(".jsonl") else {}
    return load_data({**SUMS, **given, **options}, seed=seed, path=lambda text: tmp_path / text)


def numbers(count):
    return [{"prompt": f"p{i}", "row": i} for i in range(count)]


def test_held_out_prompts_are_never_trained_on(tmp_path):
    data = load(tmp_path)
    keys = [{row["key"] for row in side} for side in (data.train, data.held_out)]
    assert not keys[0] & keys[1]
    assert len(data.train) + len(data.held_out) == len(sums(10, 19))
    assert len(data.held_out) >= 20


def test_options_of_a_file_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"ppo.data_options is {'low': 1}, which a file cannot take: ppo.data"):
        load(tmp_path, data="rows.jsonl", data_options={"low": 1}, held_out=1)


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
        ('{"prompt": "a"}\n{"prompt"\n', "line 2 of .* is not JSON"),
        ("[" * 5000, "line 1 of .* is not JSON"),
        ('\n{"question": "a"}\n', "line 2 of .* has no `prompt`"),
        ('{"prompt": []}\n', "line 1 of .* has no `prompt`"),
        ('{"prompt": [{"role": "user"}]}\n', "line 1 of .* has no `prompt`"),
        ('{"prompt": "a"}\n', r"1 rows are held out \(ppo.held_out is 1\), none is left to train on"),
        ("", "rows.jsonl' is empty"),
        (" \n\n", "rows.jsonl' is empty"),
        (b'{"prompt": "\xff"}', r"is not UTF-8 \(byte 12: .*save it as UTF-8"),
    ],
)
def test_unusable_rows_are_explained(tmp_path, text, match):
    (tmp_path / "rows.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=match) as caught:
        load(tmp_path, data="rows.jsonl", held_out=1)
    assert "relative path" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "row.jsonl",
            r"there is no file '[^']*row.jsonl' \(did you mean 'rows.jsonl'\?\); a relative path is read from",
        ),
        ("deep/rows.jsonl", "there is no file .*deep/rows.jsonl'"),
        ("powertrain_ppo.tasks", "a function is named 'powertrain_ppo.tasks:FUNCTION'"),
        ("own.py", "is a Python file; name the function in it: 'own.py:FUNCTION'"),
        ("own:good", r"did you mean the file, 'own.py:good'\?"),
        ("\0", "is no path of a file: embedded null byte"),
        ("\0:x", "cannot be imported|not of the form"),
        ("\0.py:x", "there is no file"),
        ("", "cannot be read: Is a directory"),
        (":", "not of the form"),
    ],
)
def test_file_that_is_not_there_is_told_once(tmp_path, name, match):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "own.py").write_text("def good():\n    return []\n")
    with pytest.raises(ConfigError, match=match) as caught:
        load(tmp_path, data=name, data_options={})
    assert str(caught.value).startswith("ppo.data")
    assert str(caught.value).count(str(tmp_path)) <= 1


def test_line_separators_inside_of_texts_end_no_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('\ufeff{"prompt": "a\u2028b\x85c"}\r\n', encoding="utf-8", newline="")
    assert load(tmp_path, data="rows.jsonl", held_out=0).train == [{"prompt": "a\u2028b\x85c"}]


ROWS = "{'train': [{'prompt': 'a'}], 'held_out': [%s]}"


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("raise RuntimeError('no net')", r"raised RuntimeError: no net at .*own.py:2 in give: raise RuntimeError"),
        ("raise SystemExit(3)", r"raised SystemExit: 3 at .*own.py:2"),
        ("return 1 + None", r"raised TypeError: .* at .*own.py:2"),
        ("yield 1 / 0", r"raised ZeroDivisionError: .* at .*own.py:2"),
        ("return None", r"returned NoneType \(.*own.py:1 in give\); it must return a list of records"),
        ("return 5", "returned int .*must return a list"),
        ("return 'text'", "returned str .*must return a list"),
        ("return {'train': None}", "returned NoneType as train rows"),
        ("return {'trian': []}", r"the key 'trian' \(did you mean 'train'\?\); it takes train and held_out"),
        ("return []", "gives no rows"),
        ("return {}", "gives no rows"),
        ("return [{'prompt': 'a'}, 'b']", "row 2 has no `prompt`"),
        ("return " + ROWS % "{}", "held_out row 1 has no `prompt`"),
    ],
)
def test_failing_data_function_is_explained(tmp_path, body, match):
    (tmp_path / "own.py").write_text(f"def give():\n    {body}\n")
    with pytest.raises(ConfigError, match=match) as caught:
        load(tmp_path, data="own.py:give", data_options={}, held_out=0)
    assert str(caught.value).startswith("ppo.data 'own.py:give'")


def test_data_function_may_be_a_generator_and_keys_may_be_anything(tmp_path):
    (tmp_path / "own.py").write_text("def give():\n    yield from ({'prompt': 'a', 'key': {1, i}} for i in (1, 2))\n")
    data = load(tmp_path, data="own.py:give", data_options={}, held_out=1)
    assert (len(data.train), len(data.held_out)) == (1, 1)


def test_own_split_is_taken_and_must_be_disjoint(tmp_path):
    (tmp_path / "own.py").write_text(
        "def good():\n    return {'train': [{'prompt': 'a'}], 'held_out': [{'prompt': 'b'}]}\n"
        "def bad():\n    return {'train': [{'prompt': 'a'}], 'held_out': [{'prompt': 'a'}]}\n"
    )
    assert load(tmp_path, data="own.py:good", data_options={}).held_out == [{"prompt": "b"}]
    with pytest.raises(ConfigError, match="1 prompts are in train and in held_out"):
        load(tmp_path, data="own.py:bad", data_options={})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"lowest": 1},
            r"does not take data_options \{'lowest': 1\}: .*'lowest'.* in sums takes \(low=10, high=99, shots=2\)",
        ),
        ({"shotz": 1}, r"\(did you mean 'shots'\?\)"),
        ({5: 1}, "does not take data_options"),
        ({"low": "a"}, "raised TypeError: .*tasks.py:"),
    ],
)
def test_wrong_data_options_are_told(tmp_path, given, match):
    with pytest.raises(ConfigError, match=match):
        load(tmp_path, data_options=given)


@pytest.mark.parametrize(
    ("text", "reward"), [("37", 1.0), (" 37\n", 1.0), ("37.", 0.0), ("12 + 25 = 37", 0.0), ("38", 0.0), ("", 0.0)]
)
def test_only_the_answer_itself_is_right(text, reward):
    assert exact({"answer": "37"}, text, []) == reward


def test_every_sum_is_right():
    for record in sums(10, 30):
        a, _, b, _ = record["prompt"].splitlines()[-1].split()
        assert int(record["answer"]) == int(a) + int(b)

from __future__ import annotations

import asyncio
import threading

import pytest

from powertrain.errors import ConfigError
from powertrain_ppo.references import load_function
from powertrain_ppo.rewards import Reward, RewardError

CALLS = [({"prompt": f"question {i}"}, f"answer {i}", [i]) for i in range(5)]


def reward(function, deadline=5.0, parallel=2):
    return Reward(function, "mine:reward", deadline=deadline, parallel=parallel)


async def test_plain_function_answers_in_order():
    assert await reward(lambda record, text, tokens: tokens[0] / 2)(CALLS) == [0.0, 0.5, 1.0, 1.5, 2.0]


async def test_plain_function_is_called_one_at_a_time():
    names = set()

    def function(record, text, tokens):
        names.add(threading.current_thread().name)
        return 0

    await reward(function)(CALLS)
    assert names == {"powertrain-reward"}


async def test_async_rewards_run_together_up_to_the_bound():
    running, most = 0, 0

    async def function(record, text, tokens):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return tokens[0]

    assert await reward(function, parallel=2)(CALLS) == [0, 1, 2, 3, 4]
    assert most == 2


async def test_callable_object_may_be_async():
    class Judge:
        async def __call__(self, record, text, tokens):
            return 1

    assert await reward(Judge())(CALLS[:1]) == [1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]])
async def test_value_that_is_no_number_names_function_and_prompt(value):
    with pytest.raises(RewardError, match=r"'mine:reward' returned .* not a finite number.*question 0.*answer 0"):
        await reward(lambda *_: value)(CALLS)


async def test_numpy_scalar_counts_as_a_number():
    import numpy as np

    assert await reward(lambda *_: np.float32(0.5))(CALLS[:1]) == [0.5]


def raising(record, text, tokens):
    raise KeyError("answer")


async def raising_later(record, text, tokens):
    raise KeyError("answer")


@pytest.mark.parametrize("function", [raising, raising_later])
async def test_raising_reward_is_chained_and_named(function):
    with pytest.raises(RewardError, match=r"'mine:reward' raised KeyError.*py:\d+ in raising.*question") as caught:
        await reward(function)(CALLS)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_own_timeout_of_a_reward_is_told_as_such():
    def function(record, text, tokens):
        raise TimeoutError("judge")

    with pytest.raises(RewardError, match="raised TimeoutError: judge"):
        await reward(function)(CALLS)


async def test_hanging_plain_reward_ends_in_an_error():
    release = threading.Event()
    with pytest.raises(RewardError, match=r"no answer within 0\.05 s \(reward_deadline\).*question 0"):
        await reward(lambda *_: release.wait(), deadline=0.05)(CALLS)
    release.set()


async def test_hanging_async_reward_ends_in_an_error():
    async def function(record, text, tokens):
        await asyncio.Event().wait()

    with pytest.raises(RewardError, match=r"no answer within 0\.05 s"):
        await reward(function, deadline=0.05)(CALLS)


async def test_async_reward_that_blocks_its_thread_ends_in_an_error():
    release = threading.Event()

    async def function(record, text, tokens):
        release.wait()

    with pytest.raises(RewardError, match=r"blocked its thread and gave no answer within 0\.05 s.*question 0"):
        await reward(function, deadline=0.05)(CALLS)
    release.set()


async def test_async_rewards_of_all_batches_share_one_loop():
    loops = set()

    async def function(record, text, tokens):
        loops.add(asyncio.get_running_loop())
        return 0

    judge = reward(function)
    await judge(CALLS)
    await judge(CALLS)
    assert len(loops) == 1


def test_function_is_found_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def good(record, text, tokens):\n    return 1.0\n")
    assert load_function("mine.py:good", what="reward", path=lambda text: tmp_path / text)({}, "", []) == 1.0


def test_function_is_found_in_a_module():
    from powertrain_ppo.tasks import exact

    assert load_function("powertrain_ppo.tasks:exact", what="reward", path=None) is exact


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nothing", "not of the form"),
        ("none.py:good", "no file"),
        ("mine.py:god", r"no 'god' \(did you mean 'good'"),
        ("mine.py:number", "is a int, not a function"),
        ("broken.py:x", "cannot be imported: ZeroDivisionError"),
        ("no_such_module:x", "cannot be imported: ModuleNotFoundError"),
        ("powertrain_ppo.taskss:exact", r"No module .* \(did you mean 'powertrain_ppo.tasks'\?\)"),
        ("powertrain_pp.tasks:exact", r"\(did you mean 'powertrain_ppo'\?\)"),
        ("mine:good", r"\(did you mean the file, 'mine.py:good'\?\)"),
        ("mine.py", r"name the function in it: 'mine.py:FUNCTION'"),
        ("mien.py:good", r"no file .* \(did you mean 'mine.py'\?\)"),
        ("leaves.py:x", "cannot be imported: SystemExit: 4 at .*leaves.py:1"),
        ("powertrain_ppo.tasks:exat", r"reward: powertrain_ppo.tasks has no 'exat' \(did you mean 'exact'"),
    ],
)
def test_unusable_reference_is_explained(tmp_path, name, match):
    (tmp_path / "mine.py").write_text("number = 1\ndef good(*_): return 1.0\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(4)\n")
    with pytest.raises(ConfigError, match=match):
        load_function(name, what="reward", path=lambda text: tmp_path / text)

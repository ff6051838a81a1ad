"""Engines of several ranks: the same command for all, and one failing fails all alike."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import pytest_asyncio

from powertrain.errors import ConfigError, DeadlineError, WorkerError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def train(shared):
    """Two ranks."""
    return (await shared("toytrain:d2")).train["toytrain"]


@pytest_asyncio.fixture(loop_scope="module")
async def pool(shared):
    """Two engines of one rank."""
    return (await shared("toyinfer:d2", "never")).infer["toyinfer"]


async def facts(client, name):
    return [facts[name] for facts in await client.health()]


async def test_every_rank_gets_the_command_and_its_place(train, batch, order):
    assert (await train.train_step(batch, order("ok"))).step == 1
    assert await facts(train, "steps") == [["ok"], ["ok"]]
    first, second = await facts(train, "place")
    assert (first[:2], second[:2], first[2] == second[2] != "") == ([0, 2], [1, 2], True)
    ranks = await facts(train, "rank_env")
    assert [env["RANK"] for env in ranks] == ["0", "1"]
    assert {env["WORLD_SIZE"] for env in ranks} == {"2"}
    assert first[2] == f"127.0.0.1:{ranks[0]['MASTER_PORT']}"


async def test_one_rank_failing_fails_the_call_at_once_while_the_other_is_stuck(train, batch, order, monkeypatch):
    monkeypatch.setattr("powertrain.runtime.handles.ERROR_GRACE", 0.1)
    with pytest.raises(WorkerError, match="toytrain rank 1: KeyError") as caught:
        await train.train_step(batch, order("break", rank=1, stuck=60))
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match="not usable any more: 'train_step' failed on rank 1 where rank 0 did not"):
        await train.logprobs(batch)


async def test_a_refusal_by_all_ranks_alike_leaves_the_engine_usable(train, batch, order):
    with pytest.raises(ConfigError, match="toytrain rank 0: rank 0 refuses"):
        await train.train_step(batch, order("refuse"))
    assert (await train.train_step(batch, order("ok"))).step == 1


async def test_ranks_that_differ_fail_the_engine(train, batch, order):
    with pytest.raises(WorkerError, match="rank 0: KeyError"):
        await train.train_step(batch, order("break", rank=0))
    with pytest.raises(WorkerError, match="failed on rank 0 where the other ranks did not"):
        await train.train_step(batch, order("ok"))


async def test_a_deadline_names_the_silent_ranks(train, batch, order):
    with pytest.raises(DeadlineError, match=r"toytrain rank 1 did not answer 'train_step' within 0\.2 s"):
        await train.handle.call("train_step", batch, order("sleep", rank=1, seconds=0.5), deadline=0.2)


async def test_a_deadline_tells_the_frozen_rank_from_one_that_waits_for_it(train, batch, order, monkeypatch):
    monkeypatch.setattr(train.handle, "quiet", lambda: {1: 19.0})
    with pytest.raises(
        DeadlineError, match=r"rank 0, 1 did not .* within 0\.1 s; no sign of life from rank 1 for 19 s$"
    ):
        await train.handle.call("train_step", batch, order("sleep", seconds=0.3), deadline=0.1)


async def test_a_frozen_server_is_given_up_at_its_deadline_and_ended_at_once(make_driver, ask, monkeypatch):
    monkeypatch.setattr("powertrain.runtime.handles.QUIET", 0.0)
    monkeypatch.setattr("powertrain.runtime.driver.CLOSE_SECONDS", 600.0)  # longer than a test may take
    async with make_driver("toyinfer:d1", inline="never") as driver:
        pool = driver.infer["toyinfer"]
        os.kill((await pool.health())[0]["pid"], signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"toyinfer rank 0 did not answer 'generate' .* no sign of life"):
            await pool.handles[0].call("generate", ask("sleep"), deadline=0.1)
        with pytest.raises(WorkerError, match="'toyinfer' is not usable any more: toyinfer rank 0 did not answer"):
            await pool.generate(ask())


async def test_a_dead_rank_is_told_with_exit_and_the_end_of_its_log(train, batch, order):
    with pytest.raises(WorkerError, match=r"(?s)toytrain rank 1 .*signal 9.*last words before the end") as caught:
        await train.train_step(batch, order("die", rank=1))
    assert "last words" in caught.value.log
    with pytest.raises(WorkerError, match="not usable any more: toytrain rank 1"):
        await train.train_step(batch, order("ok"))


async def test_a_request_to_an_engine_that_died_raises_and_the_others_go_on(pool, ask):
    with pytest.raises(WorkerError, match=r"toyinfer/0 rank 0 .*signal 9"):
        await pool.handles[0].call("generate", ask("die"), deadline=10.0)
    with pytest.raises(WorkerError, match="'toyinfer/0' is not usable any more"):
        await pool.handles[0].call("generate", ask(), deadline=10.0)
    assert (await pool.handles[1].call("generate", ask(), deadline=10.0))[0].request_id == "r@1"


async def test_a_worker_killed_from_outside_fails_what_is_outstanding(make_driver, ask):
    async with make_driver("toyinfer:d1", inline="never") as driver:
        pool = driver.infer["toyinfer"]
        asked = asyncio.ensure_future(pool.generate(ask("sleep")))
        os.kill((await pool.health())[0]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"toyinfer rank 0 .*ended with signal 9"):
            await asked


async def test_a_worker_that_dies_while_it_builds_is_told(make_driver):
    driver = make_driver("toytrain:d2?fail=die")
    with pytest.raises(WorkerError, match=r"(?s)toytrain rank \d .*signal 9.*last words before the end"):
        await driver.start()


async def test_an_interpreter_without_powertrain_dies_with_its_log_shown(make_driver, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named powertrain; exit 1\n")
    python.chmod(0o755)
    driver = make_driver(f"toytrain:d2?python='{python}'")
    with pytest.raises(WorkerError, match=r"(?s)toytrain rank \d .*exit code 1.*No module named powertrain"):
        await driver.start()


async def test_batches_are_dealt_by_position_and_come_back_in_order(pool, ask):
    answers = await pool.generate_batch([ask(f"q{i}") for i in range(5)])
    assert [answer.request_id for answer in answers] == ["q0@0", "q1@1", "q2@0", "q3@1", "q4@0"]
    assert await facts(pool, "batches") == [[["q0", "q2", "q4"]], [["q1", "q3"]]]
    assert await pool.generate_batch([]) == []


async def test_single_requests_go_to_the_least_loaded_engine(pool, ask):
    long = asyncio.ensure_future(pool.generate(ask("sleep")))
    await asyncio.sleep(0)
    answers = [(await pool.generate(ask(f"q{i}"))).request_id for i in range(3)]
    long.cancel()
    assert answers == ["q0@1", "q1@1", "q2@1"]


async def test_one_share_failing_cancels_the_others(pool, ask):
    await pool.handles[1].call("pause", "wait", deadline=10.0)
    asked = asyncio.ensure_future(pool.generate_batch([ask("sleep"), ask("refuse")]))
    while await facts(pool, "batches") != [[["sleep"]], [["refuse"]]]:
        await asyncio.sleep(0.01)
    await pool.handles[1].call("resume", None, deadline=10.0)
    with pytest.raises(ConfigError, match="toyinfer/1 rank 0: refuse has 9 tokens"):
        await asked
    await pool.generate_batch([ask("a"), ask("b")])
    assert await facts(pool, "cancelled") == [["sleep"], []]


async def test_determinism_is_in_the_environment_before_the_worker_starts(make_driver):  # B21
    specs = {"toytrain": {"deterministic": True, "seed": 7}}
    async with make_driver("toytrain:d1", inline="never", specs=specs, env={"MY": "a=b, c"}) as driver:
        (found,) = await driver.train["toytrain"].health()
        assert found["hash_seed"] == "7"
        assert found["asked"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert (found["asked"]["MY"], found["missing"]) == ("a=b, c", [])


async def test_a_trainers_rank_variables_never_reach_a_server(make_driver, monkeypatch):  # B31
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    async with make_driver("toytrain:d1+toyinfer:d1", inline="never") as driver:
        assert await facts(driver.infer["toyinfer"], "rank_env") == [{}]
        assert (await facts(driver.train["toytrain"], "rank_env"))[0]["RANK"] == "0"


async def test_an_engine_may_have_an_interpreter_of_its_own(make_driver, tmp_path):
    import venv

    venv.EnvBuilder(symlinks=True, with_pip=False).create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    # Its packages are this environment's, found by a path file as an editable install would.
    import sys
    import sysconfig

    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    found = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("src"))]
    (site / "borrowed.pth").write_text("\n".join(found))
    async with make_driver(f"toytrain:d1?python='{python}'") as driver:
        assert await facts(driver.train["toytrain"], "python") == [str(python)]

"""`powertrain.open_engine`: engines for scripts without an event loop."""

from __future__ import annotations

import pytest

import powertrain
from powertrain.errors import ConfigError, WorkerError
from powertrain.interfaces.build import OptimSpec


@pytest.mark.parametrize(("text", "ranks"), [("toytrain:d1", 1), ("toytrain:d2", 2)])
def test_a_step_in_five_lines(batch, order, tmp_path, text, ranks):
    with powertrain.open_engine(text, model=str(tmp_path), device="cpu", optim=OptimSpec(lr=1e-4)) as engine:
        assert engine.train_step(batch, order("ok")).step == 1
        assert engine.logprobs(batch).tolist() == batch.tokens.tolist()
        assert len(engine.health()) == ranks
        assert engine.name == "toytrain"


@pytest.mark.parametrize("inline", ["auto", "never"])
def test_generation_blocks_until_it_is_there(ask, inline):
    with powertrain.open_engine("toyinfer:d1", device="cpu", inline=inline) as engine:
        assert engine.generate(ask()).completions[0].tokens.tolist() == [3, 2, 1]
        assert [answer.request_id for answer in engine.generate_batch([ask("a"), ask("b")])] == ["a@0", "b@0"]
        engine.resume("1.5")
        assert engine.version == "1.5"


def test_errors_come_through_and_closing_twice_is_fine(batch, order):
    engine = powertrain.open_engine("toytrain:d1", device="cpu")
    with pytest.raises(ConfigError, match="refuses 1 of 2"):
        engine.train_step(batch, order("refuse"))
    engine.close()
    engine.close()


def test_unknown_argument_is_told_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"no argument 'optimm' \(did you mean 'optim'"):
        powertrain.open_engine("toytrain:d1", optimm=None)


def test_several_parts_are_refused():
    with pytest.raises(ConfigError, match="has 2 parts; open_engine takes one"):
        powertrain.open_engine("toytrain:d1|toyinfer:d1")


def test_a_failed_start_is_cleaned_up(tmp_path):
    with pytest.raises(WorkerError, match="build fails on order"):
        powertrain.open_engine("toytrain:d1?fail=build", device="cpu", run_dir=tmp_path, inline="never")
    assert (tmp_path / "logs" / "toytrain-r0.log").exists()

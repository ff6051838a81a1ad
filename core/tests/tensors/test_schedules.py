"""Learning-rate schedules: shapes, warmup rules, resuming, and the checkpoint options beside them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.interfaces.build import EngineSpec, ScheduleSpec
from powertrain.options import resolve
from powertrain.run.options import CHECKPOINT_OPTIONS
from powertrain.tensors.schedules import KINDS, check_schedule, learning_rate


def rates(steps, **fields):
    spec = ScheduleSpec(**fields)
    return [learning_rate(step, 1.0, spec) for step in steps]


def test_constant_without_anything_is_the_peak():
    assert rates([0, 1, 10**6]) == [1.0, 1.0, 1.0]


def test_warmup_rises_from_the_first_step_to_the_peak():
    assert rates(range(6), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_spans_warmup_to_total():
    found = rates([3, 4, 8, 12, 99], kind="linear", total_steps=12, warmup_steps=4, min_ratio=0.2)
    assert found == pytest.approx([1.0, 1.0, 0.6, 0.2, 0.2])


def test_cosine_decay_spans_warmup_to_total():
    found = rates([4, 6, 8, 10, 12, 13], kind="cosine", total_steps=12, warmup_steps=4, min_ratio=0.1)
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    assert found == pytest.approx([1.0, quarter, 0.55, 1.1 - quarter, 0.1, 0.1])


def test_peak_scales_the_rate():
    assert learning_rate(0, 3e-4, ScheduleSpec(warmup_steps=3)) == pytest.approx(1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("steps", "ratio", "total", "warmup"),
    [
        (None, 0.1, 100, 10),
        (None, 0.29, 100, 29),
        (None, 0.1, 19, 1),
        (None, 0.03, 5, 0),
        (0, 0.1, 100, 0),
        (7, 0.1, 100, 7),
        (None, 0.0, 1, 0),
    ],
)
def test_fixed_warmup_wins_and_none_is_proportional(kind, steps, ratio, total, warmup):
    assert check_schedule(ScheduleSpec(kind=kind, total_steps=total, warmup_steps=steps, warmup_ratio=ratio)) == warmup


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "warmup"), [({"warmup_steps": 20}, 20), ({"warmup_steps": 25}, 25), ({"warmup_ratio": 1.0}, 20)]
)
def test_warmup_without_a_step_after_it_is_refused(kind, fields, warmup):
    spec = ScheduleSpec(kind=kind, total_steps=20, **fields)
    with pytest.raises(ConfigError, match=f"{warmup} of 20 steps"):
        learning_rate(0, 1.0, spec)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "cosin"}, "'cosin'"),
        ({"kind": "linear"}, "needs total_steps"),
        ({"kind": "cosine"}, "needs total_steps"),
        ({"warmup_ratio": 0.1}, "share of total_steps"),
        ({"warmup_ratio": 1.5, "total_steps": 9}, "warmup_ratio is 1.5"),
        ({"min_ratio": -0.1}, "min_ratio is -0.1"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"total_steps": 0}, "total_steps is 0"),
    ],
)
def test_faulty_schedule_is_refused(fields, told):
    with pytest.raises(ConfigError, match=told):
        check_schedule(ScheduleSpec(**fields))


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check_schedule(ScheduleSpec(kind="linear", min_ratio=2.0, warmup_steps=-3))
    assert len(str(caught.value).splitlines()) == 3


def test_negative_step_is_refused():
    with pytest.raises(ConfigError, match="step is -1"):
        learning_rate(-1, 1.0, ScheduleSpec())


@pytest.mark.parametrize("kind", KINDS)
def test_run_resumed_with_another_warmup_equals_an_unbroken_one(kind):
    before = ScheduleSpec(kind=kind, total_steps=200, warmup_steps=10)
    after = ScheduleSpec(kind=kind, total_steps=200, warmup_steps=50)
    for step in range(30):
        learning_rate(step, 1.0, before)
    resumed = [learning_rate(step, 1.0, after) for step in range(30, 200)]
    unbroken = [learning_rate(step, 1.0, after) for step in range(200)]
    assert resumed == unbroken[30:]
    assert resumed[0] == 31 / 50


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    total=st.integers(1, 500),
    share=st.floats(0, 0.99),
    floor=st.floats(0, 1),
    step=st.integers(0, 1000),
)
def test_rate_stays_between_floor_and_peak(kind, total, share, floor, step):
    spec = ScheduleSpec(kind=kind, total_steps=total, warmup_ratio=share, min_ratio=floor)
    warmup = check_schedule(spec)
    rate = learning_rate(step, 1.0, spec)
    assert 0.0 <= rate <= 1.0 + 1e-12
    if step >= warmup:
        assert rate >= floor - 1e-12
        assert learning_rate(step + 1, 1.0, spec) <= rate + 1e-12
    if step + 1 < warmup:
        assert learning_rate(step + 1, 1.0, spec) > rate


def test_checkpoint_options_are_off_and_tell_the_trade():
    assert resolve(CHECKPOINT_OPTIONS, {}, where="checkpoint") == {"no_save_optim": False, "no_load_optim": False}
    assert {option.name: option.help for option in CHECKPOINT_OPTIONS} == {
        "no_save_optim": (
            "leave the optimizer state out of checkpoints: they are smaller and quicker to write, "
            "but a resumed run starts with fresh Adam moments at full learning rate"
        ),
        "no_load_optim": (
            "do not load the optimizer state of a checkpoint: one without it, or from another optimizer, can be used, "
            "but the resumed run starts with fresh Adam moments at full learning rate"
        ),
    }


@pytest.mark.parametrize("option", CHECKPOINT_OPTIONS, ids=lambda option: option.name)
def test_checkpoint_options_are_fields_of_the_engine(option):
    spec = EngineSpec(backend="any", role="train", model="folder", **{option.name: True})
    assert getattr(spec, option.name) is True

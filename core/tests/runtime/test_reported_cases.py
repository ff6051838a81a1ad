"""Reported cases through the path that a start takes: what each process of a plan would get (B23, B25, B31, B33)."""

from __future__ import annotations

import pytest

from powertrain.errors import DeviceError
from powertrain.interfaces.build import RankSpec

PARENT = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), "3"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "4"),
    "GROUP_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
    "HF_HOME": "/h",
}
RANK_WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def on_cards(make_driver, monkeypatch):
    """Return a function from a config string and the parent's variable to a driver whose engines want cards."""

    def make(text, variable, count=0):
        monkeypatch.setattr("powertrain.runtime.placement.count_cards", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if variable is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        card = {"place": RankSpec(device="cuda")}
        return make_driver(text, inline="never", specs={"toytrain": card, "toyinfer": card})

    return make


def environments(driver, plan):
    found = plan.placed().environments(visible=driver._visible, ranks_on_host=driver.layout.cards, user=driver._env)
    return [env for env, _ in found]


def cards(driver):
    """Return for each engine the entries of its ranks, in rank order."""
    return {
        plan.name: ",".join(env["CUDA_VISIBLE_DEVICES"] for env in environments(driver, plan)) for plan in driver.plans
    }


@pytest.mark.parametrize(
    ("variable", "count", "inference", "training"),
    [
        ("4,5,6,7", 8, "4,5", "6,7"),
        ("GPU-aa,GPU-bb,GPU-cc,GPU-dd", 8, "GPU-aa,GPU-bb", "GPU-cc,GPU-dd"),
        (None, 4, "0,1", "2,3"),
    ],
)
def test_b23_children_get_the_parents_own_entries(on_cards, variable, count, inference, training):
    assert cards(on_cards("toyinfer:t2+toytrain:d2", variable, count)) == {"toyinfer": inference, "toytrain": training}


def test_b23_colocated_sides_get_the_same_entries(on_cards):
    assert cards(on_cards("toyinfer:t2|toytrain:d2", "6,7", 8)) == {"toyinfer": "6,7", "toytrain": "6,7"}


@pytest.mark.parametrize(("variable", "have"), [("", 0), ("4,5,6", 3)])
def test_b23_too_few_entries_are_refused(on_cards, variable, have):
    with pytest.raises(DeviceError, match=f"{have} devices visible, 4 needed"):
        on_cards("toyinfer:t2+toytrain:d2", variable, 8)


def test_b25_separate_parts_add_up_and_colocated_ones_do_not(on_cards):
    assert cards(on_cards("toytrain:d4|toyinfer:t4", None, 4)) == {"toytrain": "0,1,2,3", "toyinfer": "0,1,2,3"}
    assert cards(on_cards("toytrain:d2+toyinfer:t2", None, 4)) == {"toytrain": "0,1", "toyinfer": "2,3"}
    with pytest.raises(DeviceError, match="4 devices visible, 8 needed"):
        on_cards("toytrain:d2t2+toyinfer:d2t2", None, 4)


def test_b31_servers_get_no_rank_and_ports_of_their_own(make_driver, monkeypatch):
    for name, value in PARENT.items():
        monkeypatch.setenv(name, value)
    one, two = make_driver("toytrain:d4+toyinfer:d2t2"), make_driver("toyinfer:d2t2")
    placed = [plan.placed() for driver in (one, two) for plan in driver.plans]
    train, *servers = [[env for env, _ in plan.environments(visible=(), ranks_on_host=8, user=None)] for plan in placed]
    for env in (env for server in servers for env in server):
        assert [
            name for name in env if name in RANK_WORDS or name.startswith(("TORCHELASTIC", "GROUP_", "ROLE_"))
        ] == []
        assert (env["HF_HOME"], env["OMP_NUM_THREADS"], "PATH" in env) == ("/h", "1", True)
        assert {type(value) for value in env.values()} == {str}
    ports = [plan.specs[0].place.rendezvous for plan in placed]
    assert len(set(ports)) == len(ports) == 5
    assert "127.0.0.1:29500" not in ports
    assert [(env["RANK"], env["WORLD_SIZE"]) for env in train] == [(str(rank), "4") for rank in range(4)]
    assert {f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" for env in train} == {ports[0]}


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("toytrain:d2t8+toyinfer:d4t2", [[16, 17], [18, 19], [20, 21], [22, 23]]),
        ("toytrain:d8|toyinfer:d2t4", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("toyinfer:d8", [[card] for card in range(8)]),
    ],
)
def test_b33_instances_come_from_the_serving_side(make_driver, text, slots):
    plans = [plan for plan in make_driver(text).plans if plan.part.role == "infer"]
    assert [list(plan.slots) for plan in plans] == slots
    assert [[spec.place.rank for spec in plan.specs] for plan in plans] == [list(range(len(own))) for own in slots]

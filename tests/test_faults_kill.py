"""A driver or a worker is killed at exact places, again and again; the run goes on with the unbroken run's numbers.

Each chain is one run: at every start one fault is waiting, drawn in an order and at a call that a seed decides, and the
next `powertrain resume` meets the next one.
"""

from __future__ import annotations

import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")
pytest.importorskip("powertrain_ppo")

sys.path.append(str(Path(__file__).parent))
from faults_world import World, segments, steady, versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SEED = 20


@dataclass(frozen=True)
class Moment:
    """Where a process is struck. calls: the first and the last of the calls among which the seed picks one.

    resumes: only a run that has a checkpoint comes there.
    """

    name: str
    at: str
    calls: tuple[int, int] = (1, 1)
    who: str = "driver"
    when: str = "before"
    do: str = "kill"
    words: tuple[str, ...] = ()
    resumes: bool = False


STEP, SAVE, RECIPE = "powertrain_fsdp.step", "powertrain_fsdp.checkpoint", "powertrain_ppo.recipe"
SINK, FOLDER = "powertrain.tensors.sink:BoxSink", "powertrain.run.folder"
INLINE = [
    Moment("while it samples", "powertrain_hf.decode:Decoder.step", (3, 9)),
    Moment("between forward and backward", f"{STEP}:_loss_of", (1, 2), when="after"),
    Moment("between optimizer step and update", "powertrain.run.context:RunContext.push", (2, 2)),
    # The engines share memory in the other starts; here the weights are copied.
    Moment("inside an update", f"{SINK}._targets", (3, 15), words=("transfer_options.local.share='no'",)),
    Moment("after an update", f"{SINK}.finish", (2, 3), when="after"),
    Moment("in the metrics' line", f"{FOLDER}:append_metrics", do="torn"),
    Moment("before its state is written", f"{SAVE}:_random_states", (1, 2)),
    Moment("before the rename", f"{RECIPE}:save_state", (1, 2), when="after"),
    Moment("while an old checkpoint goes", f"{FOLDER}:RunFolder._drop", (1, 2), when="after"),
    Moment("while it reads a checkpoint", f"{SAVE}:_set_random_states", resumes=True),
    Moment("before metrics are taken back", f"{FOLDER}:cut_metrics", resumes=True),
]
WORKERS = [
    Moment("a sampling worker", "powertrain_hf.decode:Decoder.step", (3, 6), who="hf-0-r0"),
    Moment("a training worker in its loss", f"{STEP}:_loss_of", (1, 2), who="fsdp-r1", when="after"),
    Moment("a worker inside an update", f"{SINK}._targets", (3, 15), who="hf-1-r0"),
    Moment("the driver inside an update", "powertrain.tensors.shm:ShmTransfer._call", (6, 9)),
    Moment("a worker in its checkpoint", f"{SAVE}:_random_states", (1, 2), who="fsdp-r1"),
    Moment("the driver in a checkpoint", f"{RECIPE}:save_state", (1, 2)),
    Moment("a worker reading a checkpoint", f"{SAVE}:_set_random_states", who="fsdp-r0", resumes=True),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("engines", "moments"),
    [("fsdp:d1|hf:d1", INLINE), ("fsdp:d2|hf:d2", WORKERS)],
    ids=["inline", "workers"],
)
def test_killed_run_goes_on_with_the_numbers_of_an_unbroken_one(world, engines, moments):
    rng = random.Random(SEED)
    recipe = world.recipe(engines)
    whole, folder = (world.folder / f"{recipe.stem}-{name}" for name in ("whole", "broken"))
    done = world.run("run", recipe, "--folder", whole)
    assert done.code == 0, done.err
    left = []
    starts = ["run", recipe, "--folder", folder]
    for moment in sorted(rng.sample(moments, len(moments)), key=lambda moment: moment.resumes):
        call = rng.randint(*moment.calls)
        fault = {"who": moment.who, "at": moment.at, "call": call, "when": moment.when, "do": moment.do}
        ended = world.run(*starts, *moment.words, faults=[fault])
        where = f"{moment.name} (call {call}): {ended.err}"
        assert ended.met == [moment.at], where
        if moment.who == "driver":
            assert ended.code == -signal.SIGKILL, where
        else:
            assert ended.code == 1, where
            assert "ended with signal 9" in ended.err, where
            assert f"powertrain resume {folder}" in ended.err, where
            assert "Traceback" not in ended.err, where
            assert not segments(ended), where
        left.append(ended)
        share = ["transfer_options.local.share='auto'"] if engines == "fsdp:d1|hf:d1" else []
        starts = ["resume", folder, *share]
    done = world.run(*starts)
    assert done.code == 0, done.err
    assert steady(folder) == steady(whole)
    assert not [name for ended in [*left, done] for name in segments(ended)]
    assert len(set(versions(folder))) == len(versions(folder))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000015", "step-000016"]

"""A run is killed and interrupted at exact places, again and again, and goes on with the numbers of an unbroken run.

Each chain is one run: every start has one fault waiting, and the next `powertrain resume` meets the next one. The seed
(SEED, or the variable FAULTS_SEED) decides which moments are met, in which order, and at which call.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")
pytest.importorskip("powertrain_ppo")

sys.path.append(str(Path(__file__).parent))
from faults_world import World, segments, steady, versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SEED = int(os.environ.get("FAULTS_SEED", "16"))
INLINE, WORKERS = "fsdp:d1|hf:d1", "fsdp:d2|hf:d2"
STEP, SAVE, RECIPE = "powertrain_fsdp.step", "powertrain_fsdp.checkpoint", "powertrain_ppo.recipe"
SINK, FOLDER = "powertrain.tensors.sink:BoxSink", "powertrain.run.folder"
BUILD, PUSH, SAMPLE = "powertrain_fsdp.model:build", "powertrain.run.context:RunContext.push", "powertrain_hf.decode"


@dataclass(frozen=True)
class Moment:
    """Where a process is struck. calls: the first and the last of the calls among which the seed picks one.

    signals: sent to the foreground group while the process lingers there; without any, it kills itself. always: met
    whatever the seed. resumes: only a run that has a checkpoint comes there.
    """

    name: str
    at: str
    calls: tuple[int, int] = (1, 1)
    who: str = "driver"
    when: str = "before"
    do: str = "kill"
    words: tuple[str, ...] = ()
    signals: tuple[int, ...] = ()
    always: bool = False
    resumes: bool = False


TWICE = (signal.SIGINT, signal.SIGINT)
# The engines of one process share memory; the word `share` makes one start copy the weights.
MOMENTS = {
    INLINE: [
        Moment("while it samples", f"{SAMPLE}:Decoder.step", (3, 9)),
        Moment("between forward and backward", f"{STEP}:_loss_of", (1, 2), when="after"),
        Moment("between optimizer step and update", PUSH, (2, 2)),
        Moment("in an update", f"{SINK}._targets", (3, 15), words=("transfer_options.local.share='no'",), always=True),
        Moment("after an update", f"{SINK}.finish", (2, 3), when="after"),
        Moment("in a line of metrics", f"{FOLDER}:append_metrics", (1, 2), do="torn", always=True),
        Moment("in a checkpoint, some files written", f"{SAVE}:_random_states", (1, 2), always=True),
        Moment("in a checkpoint, before its rename", f"{RECIPE}:save_state", (1, 2), when="after"),
        Moment("while an old checkpoint goes", f"{FOLDER}:RunFolder._drop", when="after"),
        Moment("while it reads a checkpoint", f"{SAVE}:_set_random_states", resumes=True),
        Moment("before metrics are taken back", f"{FOLDER}:cut_metrics", resumes=True),
        Moment("Ctrl-C while it builds", BUILD, do="linger", signals=TWICE[:1]),
        Moment("Ctrl-C twice in a step", f"{STEP}:_loss_of", (2, 2), do="linger", signals=TWICE, always=True),
        Moment("Ctrl-C in a checkpoint", f"{RECIPE}:save_state", do="linger", signals=TWICE[:1]),
        Moment("SIGTERM before an update", PUSH, (2, 2), do="linger", signals=(signal.SIGTERM,)),
        Moment("SIGTERM in a checkpoint", f"{RECIPE}:save_state", do="linger", signals=(signal.SIGTERM, signal.SIGINT)),
    ],
    WORKERS: [
        Moment("a worker samples", f"{SAMPLE}:Decoder.step", (3, 6), who="hf-0-r0"),
        Moment("a worker is in its loss", f"{STEP}:_loss_of", (1, 2), who="fsdp-r1", when="after"),
        Moment("a worker is in an update", f"{SINK}._targets", (3, 15), who="hf-1-r0", always=True),
        Moment("the driver is in an update", "powertrain.tensors.shm:ShmTransfer._call", (6, 9), always=True),
        Moment("a worker is in its checkpoint", f"{SAVE}:_random_states", (1, 2), who="fsdp-r1", always=True),
        Moment("the driver is in a checkpoint", f"{RECIPE}:save_state", (1, 2)),
        Moment("a worker reads a checkpoint", f"{SAVE}:_set_random_states", who="fsdp-r0", resumes=True),
        Moment("a worker is built", BUILD, who="fsdp-r1"),
        Moment("Ctrl-C twice at the start", BUILD, who="fsdp-r1", do="linger", signals=TWICE),
        Moment("Ctrl-C in a step", f"{STEP}:_loss_of", (2, 2), who="fsdp-r0", do="linger", signals=TWICE[:1]),
        Moment("SIGTERM in a checkpoint", f"{RECIPE}:save_state", do="linger", signals=(signal.SIGTERM,)),
    ],
}
MET = {INLINE: 7, WORKERS: 4}
"""How many moments a run meets; the variable FAULTS_MET raises it (99: all)."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("resume"))


def drawn(moments, count, rng):
    """Return `count` moments in the order in which they are met."""
    kept = [moment for moment in moments if moment.always]
    others = [moment for moment in moments if not moment.always]
    kept += rng.sample(others, min(count, len(moments)) - len(kept))
    return sorted(rng.sample(kept, len(kept)), key=lambda moment: moment.resumes)


def met(world, folder, words, moment, call):
    """Start the command, let the moment come, and check how it ended."""
    fault = {"who": moment.who, "at": moment.at, "call": call, "when": moment.when, "do": moment.do}
    started = world.start(*words, *moment.words, faults=[fault])
    if moment.signals:
        started.until(lambda seen: any("met" in fact for fact in seen.told))
        for number in moment.signals:
            started.interrupt(number)
            time.sleep(0.2)  # as fast as somebody is at the keyboard
    ended = started.end()
    where = f"{moment.name} (seed {SEED}, call {call}): {ended.code} {ended.err}"
    assert ended.met == [moment.at], where
    if moment.who == "driver" and not moment.signals:
        assert ended.code == -signal.SIGKILL, where
        return ended
    said = "interrupted, all engines are closed" if moment.signals else f"{moment.who[:-3].replace('-', '/')} rank"
    assert ended.code == (130 if moment.signals else 1), where
    assert said in ended.err, where
    assert moment.signals or "ended with signal 9" in ended.err, where
    assert f"powertrain resume {folder}" in ended.err, where
    assert "Traceback" not in ended.err, where
    assert not segments(ended), where
    assert not list(folder.glob("checkpoints/.*")), where
    return ended


@pytest.mark.parametrize("engines", MOMENTS, ids=["inline", "workers"])
def test_broken_run_goes_on_with_the_numbers_of_an_unbroken_one(world, engines):
    rng = random.Random(SEED)
    recipe = world.recipe(engines)
    whole, folder = (world.folder / f"{recipe.stem}-{name}" for name in ("whole", "broken"))
    unbroken = world.start("run", recipe, "--folder", whole)
    words, endings = ["run", recipe, "--folder", folder], []
    for moment in drawn(MOMENTS[engines], int(os.environ.get("FAULTS_MET", MET[engines])), rng):
        endings.append(met(world, folder, words, moment, rng.randint(*moment.calls)))
        words = ["resume", folder, *(["transfer_options.local.share='auto'"] if engines == INLINE else [])]
    endings += [world.run(*words), unbroken.end()]
    assert [(ended.code, ended.err) for ended in endings[-2:]] == [(0, "")] * 2
    assert steady(folder) == steady(whole)
    assert [name for ended in endings for name in segments(ended)] == []
    assert len(set(versions(folder))) == len(versions(folder))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000015", "step-000016"]

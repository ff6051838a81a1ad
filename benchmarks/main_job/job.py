"""The job that both sides do, read from the demo's recipe, and how each side is started on it."""

import json
import os
import sys
from pathlib import Path

from pace import Side

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPE = "examples/grpo_sums.yaml"
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""What `powertrain run` tells glibc's allocator on CPU; the sweep asks if it helps TRL too."""
SAME = ("ppo.advantage_std=sample", "ppo.advantage_eps=1e-4", "ppo.held_out=0", "ppo.export=false", "ppo.plot=false")
"""TRL's advantages divide by the sample deviation plus 1e-4, and have no option for another; so ours do too."""
FORCED = (f"ppo.reward={HERE / 'rewards.py'}:first_line", "ppo.skip_constant=false")


def words(seed, steps, *, forced):
    """Return the words behind `powertrain run RECIPE`."""
    return [f"seed={seed}", f"ppo.steps={steps}", *SAME, *(FORCED if forced else ())]


def make_job(seed, steps, *, forced, settings):
    """Return TRL's job file as a mapping: the same records in the same order, rates and numbers as the recipe's."""
    from powertrain.registry import Registry
    from powertrain.run.config import load_config
    from powertrain.tensors.models import materialize
    from powertrain.tensors.schedules import learning_rate
    from powertrain_ppo.data import load_data
    from powertrain_ppo.prompts import Prompts

    config = load_config(ROOT / RECIPE, words(seed, steps, forced=forced), registry=Registry())
    options, optim = config.recipe_options, config.optim
    folder = materialize(config["model"])
    data = load_data(options, seed=seed, path=config.path)
    batches = [data.batch(step, options["prompts_per_step"], seed) for step in range(1, steps + 1)]
    named = ("prompts_per_step", "group_size", "max_tokens", "temperature", "clip_low", "clip_high")
    return {
        "model": folder,
        "seed": seed,
        "forced": forced,
        "prompts": [[record for _, record in batch] for batch in batches],
        "stop_ids": list(Prompts(folder, options["stop"]).stop_ids),
        "lr": [learning_rate(step, optim.lr, optim.schedule) for step in range(steps)],
        "optim": {name: getattr(optim, name) for name in ("beta1", "beta2", "eps", "weight_decay")},
        "clip": optim.clip,
        **{name: options[name] for name in named},
        "settings": settings,
    }


def environment(threads, *, allocator):
    """Return this process's environment with what the measured process needs; threads: of torch."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "MALLOC_"))}
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**plain, **quiet, "OMP_NUM_THREADS": str(threads), **(ALLOCATOR if allocator else {})}


def start_ours(seed, steps, *, forced, threads, folder):
    """Start our side; folder: where runs and logs go."""
    env = environment(threads, allocator=False) | ({"BENCH_FORCED": "1"} if forced else {})
    run = folder / f"ours-{seed}-{'forced' if forced else 'natural'}-{len(list(folder.iterdir()))}"
    command = [sys.executable, str(HERE / "ours.py"), "run", RECIPE, "--folder", str(run)]
    command += [*words(seed, steps, forced=forced), f"env.OMP_NUM_THREADS={threads}"]
    return Side("ours", command, folder / "ours.log", env=env, cwd=ROOT)


def start_theirs(python, seed, steps, *, forced, settings, folder):
    """Start TRL's side in its environment; settings: of the sweep, `threads` and `allocator` among them."""
    settings = dict(settings)
    env = environment(settings.pop("threads"), allocator=settings.pop("allocator"))
    file = folder / f"job-{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(make_job(seed, steps, forced=forced, settings=settings)))
    return Side("trl", [str(python), str(HERE / "theirs.py"), str(file)], folder / "trl.log", env=env, cwd=HERE)

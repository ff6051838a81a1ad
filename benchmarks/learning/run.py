"""Does the main job learn? Three seeds with the exact reward, and two controls that must not learn.

    make bench                                          # all five runs, about 40 minutes on 2 cores
    .venvs/dev/bin/python benchmarks/learning/run.py --seeds 0 --controls --steps 5

Each run is `powertrain run examples/grpo_sums.yaml` in a process of its own. Held-out prompts, disjoint from training,
are answered greedily before and after; a rise is told in standard errors of the difference of two proportions,
sqrt(p0 (1 - p0) / n + p1 (1 - p1) / n). Results go to benchmarks/results/learning.json and learning.png.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CONTROLS = "benchmarks/learning/controls.py"


def launch(name, seed, reward, args):
    """Start one run; returns its process and folder."""
    folder = Path(args.runs).absolute() / f"learning-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    command = [sys.executable, "-m", "powertrain.cli", "run", "examples/grpo_sums.yaml", "--folder", str(folder)]
    command += [f"seed={seed}", "ppo.export=false", f"engines={args.engines}"]
    command += [f"ppo.reward={reward}", "ppo.check=powertrain_ppo.tasks:exact"] if reward else []
    command += [f"ppo.steps={args.steps}"] if args.steps else []
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    command += [f"env.OMP_NUM_THREADS={args.threads}"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL), folder


def result_of(name, seed, folder):
    """Read one run's metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    before, after, n = evaluated[0]["eval/accuracy"], evaluated[-1]["eval/accuracy"], evaluated[0]["eval/rows"]
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / n)
    steps = [row for row in rows if row.get("reward/mean") is not None]
    return {
        "name": name,
        "seed": seed,
        "held_out_rows": n,
        "accuracy_before": before,
        "accuracy_after": after,
        "rise_in_standard_errors": (after - before) / error if error else 0.0,
        "steps": len(steps),
        "reward": [row["reward/mean"] for row in steps],
        "mismatch": [row["mismatch/mean"] for row in steps],
        "evaluations": [[row["step"], row["eval/accuracy"]] for row in evaluated],
        "seconds_training": sum(row["time/step"] for row in steps),
        "seconds_evaluating": sum(row["time/eval"] for row in evaluated),
    }


def draw(results, file):
    """Plot reward, held-out accuracy and mismatch over steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for result in results:
        style = "-" if result["name"].startswith("seed") else "--"
        steps = range(1, result["steps"] + 1)
        axes[0].plot(steps, result["reward"], style, label=result["name"])
        axes[1].plot(*zip(*result["evaluations"], strict=True), style, marker="o", label=result["name"])
        drawn = [value if value else math.nan for value in result["mismatch"]]
        axes[2].plot(steps, drawn, style, label=result["name"])
    titles = ("reward (mean of each step's rollouts)", "held-out exact accuracy", "train/infer mean |Δ log-prob|")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[2].set_yscale("log")
    axes[1].legend(fontsize=8, loc="center right")
    figure.savefig(file, dpi=110)


def main():
    """Run everything two at a time, then write the results and say whether they hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--controls", nargs="*", default=["constant", "shuffled"])
    parser.add_argument("--steps", type=int, help="fewer steps than the recipe's, for a quick look")
    parser.add_argument("--engines", default="fsdp:d1|hf:d1")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each run")
    parser.add_argument("--runs", default="runs")
    args = parser.parse_args()
    todo = [(f"seed {seed}", seed, "") for seed in args.seeds]
    todo += [(control, 0, f"{CONTROLS}:{control}") for control in args.controls]
    results, running = [], []
    while todo or running:
        while todo and len(running) < args.parallel:
            name, seed, reward = todo.pop(0)
            running.append((name, seed, *launch(name.replace(" ", "-"), seed, reward, args)))
        name, seed, process, folder = running.pop(0)
        if process.wait():
            message = f"run {name!r} ended with {process.returncode}; see {folder}"
            raise SystemExit(message)
        results.append(result_of(name, seed, folder))
        last = results[-1]
        print(
            f"{name}: {last['accuracy_before']:.3f} -> {last['accuracy_after']:.3f} on {last['held_out_rows']} rows, "
            f"{last['rise_in_standard_errors']:+.1f} standard errors, {last['seconds_training']:.0f} s of training",
            flush=True,
        )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages = ("torch", "transformers", "powertrain", "powertrain-fsdp", "powertrain-hf", "powertrain-ppo")
    facts = {
        "date": f"{datetime.date.today()}",
        "commit": commit.strip(),
        "command": " ".join(["benchmarks/learning/run.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": f"{args.parallel} runs at a time, {args.threads} torch threads each",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "learning.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(results, RESULTS / "learning.png")
    learnt = [row["rise_in_standard_errors"] >= 3 for row in results if row["name"].startswith("seed")]
    still = [row["rise_in_standard_errors"] < 2 for row in results if not row["name"].startswith("seed")]
    print(f"seeds that rose by 3 standard errors: {sum(learnt)} of {len(learnt)}")
    print(f"controls that did not rise: {sum(still)} of {len(still)}")
    raise SystemExit(0 if all(learnt) and all(still) else 1)


if __name__ == "__main__":
    main()

"""The demo's job on TRL's GRPOTrainer and on ours, side by side in one run, taking turns step by step.

    python benchmarks/main_job/run.py --trl-python .venvs/trl/bin/python

Two parts, see README.md. `timing`: every completion has exactly max_tokens tokens and every group is trained on, on
both sides, so both do the same work; fresh pairs of processes, `--repeats` times. `learning`: the demo as it is, with
its stops, for every seed. Ratios are theirs over ours, of steps that stand next to each other. Ends with 1 when ours is
not 1.3 times as fast in `timing`, or its reward in `learning` is worse by more than two standard errors.
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
import tempfile
from pathlib import Path
from statistics import mean, median, stdev

from job import RECIPE, ROOT, start_ours, start_theirs
from pace import Lost
from sweep import RESULT as SWEEP
from sweep import versions

RESULT = ROOT / "benchmarks" / "results" / "main_job.json"
AIM = 1.3
TIMES = ("seconds", "cpu_seconds", "generate", "train")


def pair(args, settings, folder, *, seed, steps, forced, turned):
    """Run one pair of processes; returns {"ours": [step, ...], "trl": [...]}. turned: TRL goes first."""
    starts = {
        "ours": lambda: start_ours(seed, steps, forced=forced, threads=args.threads, folder=folder),
        "trl": lambda: start_theirs(args.trl_python, seed, steps, forced=forced, settings=settings, folder=folder),
    }
    order = ("trl", "ours") if turned else ("ours", "trl")
    sides, taken = {}, {name: [] for name in order}
    try:
        for name in order:
            sides[name] = starts[name]()
            sides[name].facts()  # one loads after the other
        for number in range(1, steps + 1):
            for name in order if number % 2 else reversed(order):
                taken[name].append(sides[name].step())
            row = {name: round(taken[name][-1]["seconds"], 2) for name in sorted(taken)}
            rewards = {name: round(taken[name][-1]["reward"], 3) for name in sorted(taken)}
            print(f"  step {number}: seconds {row}, reward {rewards}, load {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        for side in sides.values():
            side.end()
    return taken


def summary(pairs, warmups):
    """Return medians of both sides and ratios of neighbouring steps; the first `warmups` of each pair are left out."""
    kept = {name: [step for taken in pairs for step in taken[name][warmups:]] for name in ("ours", "trl")}
    result = {}
    for name, steps in kept.items():
        row = {f"{key}_median": round(median(step[key] for step in steps), 3) for key in TIMES}
        row["tokens"] = sum(step["tokens"] for step in steps)
        row["tokens_per_s"] = round(row["tokens"] / sum(step["seconds"] for step in steps), 2)
        row["peak_rss_gib"] = round(max(step["peak_rss_bytes"] for step in steps) / 2**30, 2)
        result[name] = row
    ratios = {}
    for key in TIMES:
        each = [theirs[key] / ours[key] for ours, theirs in zip(kept["ours"], kept["trl"], strict=True)]
        ratios[key] = {"median": round(median(each), 2), "least": round(min(each), 2), "most": round(max(each), 2)}
    return {"steps_measured": len(kept["ours"]), **result, "trl_over_ours": ratios}


def learning(pairs, seeds):
    """Return rewards over steps and the difference of their means, with its standard error over steps and seeds."""
    rewards = {name: [[step["reward"] for step in taken[name]] for taken in pairs] for name in ("ours", "trl")}
    # Both sides ask the same prompts at each step, so the differences of steps are paired.
    gaps = [a - b for x, y in zip(rewards["ours"], rewards["trl"], strict=True) for a, b in zip(x, y, strict=True)]
    error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    result = {"seeds": seeds, "reward": rewards, "difference": round(mean(gaps), 4), "standard_error": round(error, 4)}
    return {**result, "means": {name: round(mean(mean(row) for row in rows), 4) for name, rows in rewards.items()}}


def draw(result, file):
    """Plot the rewards and the seconds of both sides."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for color, (name, label) in zip(("C0", "C1"), (("ours", "powertrain"), ("trl", "TRL")), strict=True):
        for number, rows in enumerate(result["learning"]["rewards"]["reward"][name]):
            left.plot(range(1, len(rows) + 1), rows, color=color, label=label if number == 0 else None)
        parts = [result["timing"][name][f"{key}_median"] for key in ("generate", "train")]
        right.barh(label, parts[0], color=color, alpha=0.5)
        right.barh(label, parts[1], left=parts[0], color=color)
    left.set(title="reward, the demo's stops, each seed", xlabel="step")
    right.set(title="seconds of a step: generation (light), training", xlabel="s")
    left.legend()
    left.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def table(document):
    """Return the result as a page in Markdown, beside the file of numbers."""
    lines = [
        f"Made by `{document['command']}` on {document['date']}: {document['device']}, {document['threads']} threads."
    ]
    for part in ("timing", "learning"):
        found = document[part]
        heading = f"{part}, {found['steps_measured']} steps of each"
        lines += ["", f"| {heading} | powertrain | TRL | TRL / powertrain (least to most) |"]
        lines += ["|---|---|---|---|"]
        for key, label in zip(TIMES, ("seconds of a step", "CPU seconds", "generation, s", "training, s"), strict=True):
            ours, theirs = (found[side][f"{key}_median"] for side in ("ours", "trl"))
            ratio = found["trl_over_ours"][key]
            middle, least, most = (ratio[name] for name in ("median", "least", "most"))
            lines.append(f"| {label} | {ours:.2f} | {theirs:.2f} | {middle:.2f} ({least:.2f} to {most:.2f}) |")
        for key, label in (
            ("tokens", "tokens generated"),
            ("tokens_per_s", "tokens/s"),
            ("peak_rss_gib", "peak RSS, GiB"),
        ):
            ours, theirs = (found[side][key] for side in ("ours", "trl"))
            lines += [f"| {label} | {ours} | {theirs} | {theirs / ours:.2f} |"]
    rewards = document["learning"]["rewards"]
    means = rewards["means"]
    lines += ["", f"Mean reward over {len(rewards['reward']['ours'][0])} steps of seeds {rewards['seeds']}: "]
    lines[-1] += (
        f"powertrain {means['ours']:.3f}, TRL {means['trl']:.3f}, difference {rewards['difference']:+.3f} with a "
    )
    lines[-1] += (
        f"standard error of {rewards['standard_error']:.3f}. TRL's settings: `{json.dumps(document['trl_settings'])}`."
    )
    return "\n".join(lines) + "\n"


def facts(args, settings):
    """Return what must be known to repeat the run."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Where files lie is this machine's affair.
    numbers = {name: getattr(args, name) for name in ("threads", "repeats", "timed_steps", "warmups", "steps")}
    words = [f"--{name.replace('_', '-')} {value}" for name, value in numbers.items()]
    words.append(f"--seeds {' '.join(map(str, args.seeds))}")
    names = ("torch", "transformers", "numpy", "powertrain", "powertrain-fsdp", "powertrain-hf", "powertrain-ppo")
    return {
        "benchmark": "main_job",
        "date": f"{datetime.date.today()}",
        "commit": commit.strip(),
        "command": " ".join(["benchmarks/main_job/run.py", *words]),
        "recipe": RECIPE,
        "python": platform.python_version(),
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "threads": args.threads,
        "dtype": "float32",
        "versions": {
            "ours": {name: importlib.metadata.version(name) for name in names},
            "trl": versions(args.trl_python),
        },
        "trl_settings": settings,
    }


def measure(args, settings, folder):
    """Run all pairs and return both parts."""
    timing, natural, steps = [], [], args.warmups + args.timed_steps
    for repeat in range(args.repeats):
        print(f"timing, pair {repeat + 1} of {args.repeats}")
        timing.append(pair(args, settings, folder, seed=0, steps=steps, forced=True, turned=bool(repeat % 2)))
    for number, seed in enumerate(args.seeds):
        print(f"learning, seed {seed}")
        one = pair(args, settings, folder, seed=seed, steps=args.steps, forced=False, turned=bool(number % 2))
        natural.append(one)
    raw = {"timing": timing, "learning": natural}
    parts = {
        "timing": summary(timing, args.warmups),
        "learning": {**summary(natural, args.warmups), "rewards": learning(natural, args.seeds)},
    }
    return parts | {"raw": {name: [trimmed(one) for one in pairs] for name, pairs in raw.items()}}


def trimmed(taken):
    """Return a pair's steps as rows of what matters, for the file."""
    keys = (*TIMES, "tokens", "trained_tokens", "reward", "load_1min")
    return {name: [{key: round(step[key], 3) for key in keys} for step in steps] for name, steps in taken.items()}


def main():
    """Measure, write, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venvs/trl/bin/python")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=2, help="pairs of processes of the part `timing`")
    parser.add_argument("--timed-steps", type=int, default=2, help="measured steps of each of these pairs")
    parser.add_argument("--warmups", type=int, default=1, help="first steps of a pair that are not measured")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--steps", type=int, default=8, help="steps of each seed in the part `learning`")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="result of sweep.py, whose best settings TRL gets")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    settings = {**json.loads(args.sweep.read_text())["best"]["settings"], "threads": args.threads}
    begun = datetime.datetime.now()
    with tempfile.TemporaryDirectory() as folder:
        try:
            parts = measure(args, settings, Path(folder))
        except Lost as exc:
            raise SystemExit(str(exc)) from exc
    minutes = (datetime.datetime.now() - begun).total_seconds() / 60
    document = {**facts(args, settings), "minutes": round(minutes, 1), **parts}
    args.output.write_text(json.dumps(document, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(table(document))
    draw(document, args.output.with_suffix(".png"))
    for name in ("timing", "learning"):
        print(name, json.dumps({key: document[name][key] for key in ("ours", "trl", "trl_over_ours")}, indent=1))
    rewards = document["learning"]["rewards"]
    print({key: rewards[key] for key in ("means", "difference", "standard_error")})
    fast = document["timing"]["trl_over_ours"]["seconds"]["median"] >= AIM
    as_good = rewards["difference"] >= -2 * rewards["standard_error"]
    print(f"at least {AIM} times as fast: {fast}; reward at equal steps not worse: {as_good}")
    return 0 if fast and as_good else 1


if __name__ == "__main__":
    sys.exit(main())

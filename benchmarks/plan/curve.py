"""CPU time and memory of a plan against the number of tensors, ranks and patterns.

    python benchmarks/plan/curve.py [--repeats 3] [--output FILE]

Every point is `powertrain plan LAYOUT --model FOLDER --json` in a fresh interpreter: user plus system CPU seconds of
the whole process (`wait4`) and its peak resident memory. One sweep lets the tensors grow (experts in a layer), one the
ranks (copies on both sides), one the patterns (expert-parallel ranks, so that the experts lie in more places).
`patterns` are the groups of tensors that lie alike on both sides, each of which is worked out once.
The exit status is 1 when the issue's layout takes more than 20 s or 2 GiB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = json.loads((ROOT / "tests" / "data" / "deepseek_v3_like" / "config.json").read_text())
LARGE = "megatron:d8t8p16e64+sglang:d32t16"
SWEEPS: dict[str, list[tuple[str, dict[str, int]]]] = {
    "tensors": [(LARGE, {"n_routed_experts": n}) for n in (64, 128, 256, 512)],
    "ranks": [(f"megatron:d{d}t8p16e64+sglang:d{4 * d}t16", {}) for d in (8, 16, 32)],
    "patterns": [(f"megatron:d8t8p16e{e}+sglang:d32t16", {}) for e in (4, 16, 64)],
}
COUNT = """
import json, sys
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.weights.outline import outline
config, registry = json.load(open(sys.argv[2] + "/config.json")), Registry()
train, infer = parse_layout(sys.argv[1]).parts
source, sink = (registry.load_class(part.spec, "manifest")(config, part) for part in (train, infer))
short = outline(source, [sink] * infer.instances)
print(json.dumps({"tensors": len(source.tensors), "ranks": train.world + infer.world, "patterns": len(short.groups)}))
"""


def spent(command: list[str]) -> tuple[float, float]:
    """Return the CPU seconds and the peak MiB of a process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        message = f"{command} ended with {process.returncode}"
        raise RuntimeError(message)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(layout: str, changes: dict[str, int], repeats: int) -> dict[str, Any]:
    """Return what a layout with a changed model costs, least of the repeats, and all of them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | changes))
        told = subprocess.run([sys.executable, "-c", COUNT, layout, folder], capture_output=True, check=True).stdout
        command = [sys.executable, "-m", "powertrain.cli", "plan", layout, "--model", folder, "--json"]
        costs = [spent(command) for _ in range(repeats)]
    seconds, memory = [round(s, 3) for s, _ in costs], max(m for _, m in costs)
    row = {"layout": layout, "changes": changes, **json.loads(told)}
    return row | {"cpu_seconds": min(seconds), "repeats": seconds, "peak_mib": round(memory, 1)}


def main() -> int:
    """Measure, print and write; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "plan.json")
    args = parser.parse_args()
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for name, points in SWEEPS.items():
        sweeps[name] = []
        for layout, changes in points:
            row = measure(layout, changes, args.repeats)
            sweeps[name].append(row)
            sizes = " ".join(f"{key} {row[key]}" for key in ("tensors", "ranks", "patterns"))
            sys.stdout.write(f"{name}: {sizes}: {row['cpu_seconds']:.2f} s, {row['peak_mib']:.0f} MiB\n")
            sys.stdout.flush()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    document = {
        "benchmark": "plan",
        "commit": commit.strip(),
        "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "sweeps": sweeps,
    }
    args.output.write_text(json.dumps(document, indent=2) + "\n")
    large = next(row for row in sweeps["tensors"] if row["changes"]["n_routed_experts"] == MODEL["n_routed_experts"])
    return int(large["cpu_seconds"] > 20 or large["peak_mib"] > 2048)


if __name__ == "__main__":
    sys.exit(main())

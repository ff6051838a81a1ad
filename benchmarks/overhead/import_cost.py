"""CPU time of `import powertrain` and of plain listing, measured against `import pluggy` in fresh interpreters.

    python benchmarks/overhead/import_cost.py [--repeats 15] [--output FILE]

Times are user plus system CPU seconds of a whole child process (`wait4`), so a busy box disturbs them little. The
programs take turns, so that drift hits all alike. A net time has the bare interpreter's taken off. The exit status is
1 when a bound is passed: import at most 1.5, listing at most 4 times pluggy, on the least net times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

PROGRAMS = {
    "bare interpreter": "pass",
    "import pluggy": "import pluggy",
    "import powertrain": "import powertrain",
    "plain listing": "import powertrain; powertrain.Registry().list()",
    "powertrain engines --json": "from powertrain.cli import main; main(['engines', '--json'])",
    "import importlib.metadata": "import importlib.metadata",
}
BOUNDS = {"import powertrain": 1.5, "plain listing": 4.0}
RESULTS = Path(__file__).parents[1] / "results"


def cpu_seconds(code: str) -> float:
    """Return the CPU seconds of one fresh interpreter that runs `code`."""
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        message = f"{code!r} ended with {process.returncode}"
        raise RuntimeError(message)
    return usage.ru_utime + usage.ru_stime


def measure(repeats: int) -> dict[str, Any]:
    """Return least, median and net milliseconds of every program, and ratios to pluggy's net time."""
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for code in PROGRAMS.values():
        cpu_seconds(code)  # writes byte code, warms the disk cache
    for _ in range(repeats):
        for name, code in PROGRAMS.items():
            times[name].append(cpu_seconds(code) * 1e3)
    least = {name: min(values) for name, values in times.items()}
    middle = {name: median(values) for name, values in times.items()}
    bare, bare_middle = least["bare interpreter"], middle["bare interpreter"]
    pluggy, pluggy_middle = least["import pluggy"] - bare, middle["import pluggy"] - bare_middle
    return {
        name: {
            "min_ms": round(least[name], 2),
            "median_ms": round(middle[name], 2),
            "net_min_ms": round(least[name] - bare, 2),
            "ratio_to_pluggy_net_min": round((least[name] - bare) / pluggy, 3),
            "ratio_to_pluggy_net_median": round((middle[name] - bare_middle) / pluggy_middle, 3),
            "ratio_to_pluggy_whole_process_min": round(least[name] / least["import pluggy"], 3),
        }
        for name in PROGRAMS
    }


def main() -> int:
    """Measure, print and write; 1 when a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "import_cost.json")
    args = parser.parse_args()
    programs = measure(args.repeats)
    for name, row in programs.items():
        bound = f"  (bound {BOUNDS[name]:g})" if name in BOUNDS else ""
        ratio = f"{row['ratio_to_pluggy_net_min']:.2f} x pluggy"
        print(f"{name:28} min {row['min_ms']:7.1f} ms  median {row['median_ms']:7.1f} ms  net {ratio}{bound}")
    document = {
        "benchmark": "import_cost",
        "repeats": args.repeats,
        "unit": "CPU milliseconds (user + system) of a fresh interpreter",
        "python": platform.python_version(),
        "pluggy": metadata.version("pluggy"),
        "powertrain": metadata.version("powertrain"),
        "dists_on_path": sum(1 for _ in metadata.distributions()),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "bounds": BOUNDS,
        "programs": programs,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=2) + "\n")
    return int(any(programs[name]["ratio_to_pluggy_net_min"] > bound for name, bound in BOUNDS.items()))


if __name__ == "__main__":
    sys.exit(main())

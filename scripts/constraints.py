"""Write requirements/constraints-NAME.txt for environments of requirements/environments.txt: all, or those named.

Each is resolved anew by pip in a fresh virtual environment, as `make env` would install it on a machine without a
GPU; nothing but pip itself is installed. TORCH_INDEX: as for scripts/make_env.sh. Needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"


class Environment(NamedTuple):
    """One row of environments.txt."""

    name: str
    torch: str
    bare: list[str]
    dists: list[str]

    @property
    def pins(self) -> Path:
        """The file of its pins."""
        return REQUIREMENTS / f"constraints-{self.name}.txt"


def environments() -> dict[str, Environment]:
    """Return the rows of environments.txt by name."""
    found = {}
    for line in (REQUIREMENTS / "environments.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, torch, bare, dists = (cell.strip() for cell in line.split("|"))
            found[name] = Environment(name, torch.partition("+")[0], bare.split(), dists.split())
    return found


def resolve(python: str, *arguments: str) -> dict[str, str]:
    """Return the name and version of everything that pip would install, without installing it."""
    report = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
    command = [*report, "--ignore-installed", "--report", "-", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in found}


def pin(environment: Environment) -> str:
    """Return the text of an environment's constraints file."""
    local = "+cpu" if platform.system() == "Linux" and platform.machine() == "x86_64" else ""
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    with tempfile.TemporaryDirectory(prefix="powertrain-pins-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "--upgrade", "pip<27"], check=True)
        needed = ["-r", f"requirements/{environment.name}.txt", f"torch=={environment.torch}{local}"]
        pins = resolve(python, *index, *needed)
        if environment.bare:
            pins |= resolve(python, "--no-deps", *environment.bare)
    version = ".".join(map(str, sys.version_info[:2]))
    head = (
        f"# Environment {environment.name}: Python {version}, torch {environment.torch} (CPU build).\n"
        "# Made by `make constraints`, which resolves requirements/environments.txt anew; not by hand.\n"
    )
    rows = {re.sub(r"[-_.]+", "-", name).lower(): version.partition("+")[0] for name, version in pins.items()}
    return head + "".join(f"{name}=={rows[name]}\n" for name in sorted(rows))


def main(names: list[str]) -> int:
    """Write the files; returns the exit status."""
    known = environments()
    wrong = [name for name in names if name not in known]
    if wrong:
        print(f"error: no environment {', '.join(wrong)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    for environment in known.values():
        if not names or environment.name in names:
            print(f"== {environment.name}", flush=True)
            environment.pins.write_text(pin(environment))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

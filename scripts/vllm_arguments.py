"""Write the list of vLLM's engine arguments that powertrain-vllm ships, for drivers in whose environment it is not.

`python scripts/vllm_arguments.py FOLDER` reads the package `vllm` in FOLDER (a site-packages or an unpacked wheel) and
imports nothing of it; `--check` only says whether the list is that version's. Take the newest version that was tested.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from powertrain_vllm.arguments import SHIPPED, read


def text(folder: Path) -> str:
    """Return the list as JSON, an argument a line, with the version that it is of."""
    found = re.search(r"\bversion = ['\"]([^'\"+]+)", (folder / "_version.py").read_text(encoding="utf-8"))
    if found is None:
        sys.exit(f"{folder / '_version.py'} names no version")
    lines = [
        f"    {json.dumps(name)}: {json.dumps([kind, *([list(choices)] if choices else [])])}"
        for name, (kind, choices) in read(folder).items()
    ]
    return "\n".join(
        ["{", f'  "version": {json.dumps(found[1])},', '  "arguments": {', ",\n".join(lines), "  }", "}", ""]
    )


def main() -> int:
    """Write the list, or compare it; returns 1 for one that is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    made = text(given.folder / "vllm")
    if not given.check:
        SHIPPED.write_text(made, encoding="utf-8")
        return 0
    stale = made != SHIPPED.read_text(encoding="utf-8")
    sys.stdout.write(f"{SHIPPED.name} is {'stale' if stale else 'up to date'}\n")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())

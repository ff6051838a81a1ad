"""Write the list of vLLM's engine arguments that powertrain-vllm ships, for drivers in whose environment it is not.

`python scripts/vllm_arguments.py FOLDER ...` reads the package `vllm` in each folder (a site-packages or an unpacked
wheel) and imports nothing of it. The newest version that was tested comes first; of the others the list has what that
one has no more. `--check` only says whether the list is theirs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powertrain_vllm.arguments import SHIPPED, read


def version(folder: Path) -> str:
    """Return the version of a package, without what names its build."""
    found = re.search(r"\bversion = ['\"]([^'\"+]+)", (folder / "_version.py").read_text(encoding="utf-8"))
    if found is None:
        sys.exit(f"{folder / '_version.py'} names no version")
    return found[1]


def text(folders: Sequence[Path]) -> str:
    """Return the list as JSON, an argument a line, with the versions that it is of."""
    kinds: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for folder in folders:
        kinds = {**kinds, **{name: kind for name, kind in read(folder).items() if name not in kinds}}
    lines = [
        f"    {json.dumps(name)}: {json.dumps([kind, *([list(choices)] if choices else [])])}"
        for name, (kind, choices) in kinds.items()
    ]
    head = f'  "versions": {json.dumps([version(folder) for folder in folders])},'
    return "\n".join(["{", head, '  "arguments": {', ",\n".join(lines), "  }", "}", ""])


def main() -> int:
    """Write the list, or compare it; returns 1 for one that is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    made = text([folder / "vllm" for folder in given.folders])
    if not given.check:
        SHIPPED.write_text(made, encoding="utf-8")
        return 0
    stale = made != SHIPPED.read_text(encoding="utf-8")
    sys.stdout.write(f"{SHIPPED.name} is {'stale' if stale else 'up to date'}\n")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())

"""`powertrain plan` between engines that hold experts in ways of their own."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from expert_world import KINDS, write

from powertrain.cli import main


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Return kind -> (folder, elements of its checkpoint)."""
    made = {}
    for kind in KINDS:
        folder = write(tmp_path_factory.mktemp(kind), kind, dtype="bfloat16")
        header = (Path(folder) / "model.safetensors").read_bytes()
        table = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
        made[kind] = folder, len([name for name in table if name != "__metadata__"])
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp:d3+vllm:d1t2e2",
        "fsdp:d3+sglang:d1t4e2",
        "fsdp:d2?master_dtype=float32|vllm:d1t2",
        "megatron:d1t2e2+hf:d2",
        "fsdp:d3+hf:d1",
    ],
)
def test_experts_are_planned(kind, layout, sizes, capsys):
    folder, tensors = sizes[kind]
    assert main(["plan", layout, "--model", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [pair] = found["pairs"]
    assert found["model"]["tensors"] == tensors
    assert pair["bytes"] > 0

"""A manifest made from config and layout alone is the running engine's, name by name and box by box."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from powertrain.launch.ports import free_port
from powertrain.layout import parse_layout

HERE = Path(__file__).parent
_found = importlib.util.spec_from_file_location("vllm_models", HERE / "test_vllm_parity.py")
parity = importlib.util.module_from_spec(_found)
_found.loader.exec_module(parity)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [("vllm:d1", list(parity.MAKERS)), ("vllm:t2", ["llama-one-key-head", "qwen3-tied", "qwen3-moe", "deepseek-v3"])],
)
def test_static_manifest_is_the_running_engines(layout, kinds, tmp_path):
    for kind in kinds:
        parity.model(kind, 0, tmp_path / kind)
    meet = ",".join(f"127.0.0.1:{free_port()}" for _ in kinds)
    models = [f"{kind}={tmp_path / kind}" for kind in kinds]
    command = [sys.executable, str(HERE / "ranks_world.py"), layout, meet]
    world = parse_layout(layout).parts[0].cards_per_instance
    logs = [tmp_path / f"rank{rank}.log" for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *models],
            stdout=subprocess.PIPE,
            stderr=logs[rank].open("w"),
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in enumerate(told):
        lines = [line for line in text.splitlines() if line.startswith(("alike", "differs"))]
        assert lines == [f"alike {kind}" for kind in kinds], (rank, lines, logs[rank].read_text()[-2000:])

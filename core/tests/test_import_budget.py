"""What a light command may import, seen in a fresh interpreter."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = {
    *("torch", "numpy", "transformers", "peft", "ray", "vllm", "sglang", "megatron", "safetensors", "matplotlib"),
    *("zmq", "msgpack", "yaml", "psutil", "pydantic"),
}


def imported(code):
    """Run `code` in a fresh interpreter and return the names in its `sys.modules`."""
    script = f"{code}\nimport sys, json\nsys.stderr.write(json.dumps(sorted(sys.modules)))"
    env = {name: value for name, value in os.environ.items() if name != "POWERTRAIN_PLUGINS"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    return set(json.loads(done.stderr))


def plugin_modules(modules):
    return {name for name in modules if name.startswith("powertrain_")}


COMMANDS = {
    "core": "import powertrain",
    "listing": "import powertrain; assert powertrain.Registry().list()",
    "engines-json": "from powertrain.cli import main; assert main(['engines', '--json']) == 0",
    "engines": "from powertrain.cli import main; assert main(['engines']) == 0",
    "version": "from powertrain.cli import main; assert main(['--version']) == 0",
}


@pytest.mark.parametrize("code", COMMANDS.values(), ids=COMMANDS)
def test_light_commands_import_no_engine_and_no_plugin(code):
    modules = imported(code)
    assert modules & HEAVY == set()
    assert plugin_modules(modules) == set()
    assert "powertrain.launch.hooks" not in modules


def test_importing_the_core_imports_one_module_of_it():
    assert {name for name in imported("import powertrain") if name.startswith(("powertrain", "pluggy"))} == {
        "powertrain"
    }


@pytest.mark.parametrize(
    ("code", "wanted"), [(COMMANDS["engines"], True), (COMMANDS["engines-json"], False), (COMMANDS["listing"], False)]
)
def test_rich_is_for_human_output_alone(code, wanted):
    assert ("rich" in imported(code)) is wanted


def test_listing_needs_no_pluggy():
    assert "pluggy" not in imported(COMMANDS["listing"])

"""The plugin as core sees it."""

import subprocess
import sys

from powertrain import Registry


def test_registry_finds_the_backend():
    spec = Registry().backend("hf")
    assert (spec.role, list(spec.axis_table())) == ("infer", ["d"])
    assert {option.name for option in spec.options} == {"max_rows", "max_batch_tokens", "attention", "max_adapters"}


def test_hooks_import_nothing_heavy():
    heavy = "{'torch', 'numpy', 'transformers', 'peft'}"
    code = f"import sys, powertrain_hf.hooks as h; h.powertrain_backend(); print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

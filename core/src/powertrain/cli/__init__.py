"""The command line `powertrain`; see `powertrain.cli.main`."""

from __future__ import annotations

from powertrain.cli.main import main as main

__all__ = ["main"]

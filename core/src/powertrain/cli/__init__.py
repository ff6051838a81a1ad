"""The command line `powertrain`; see `powertrain.cli.main`."""

from powertrain.cli.main import main as main

"""Hooks of the built-in launcher `local`."""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import LauncherSpec

GRACE = OptionSpec(name="grace", type="float", default=10.0, minimum=0, help="seconds from asking to end to killing")


@hookimpl
def powertrain_launcher() -> LauncherSpec:
    """Describe the launcher that starts every process on the driver's own host."""
    return LauncherSpec(
        name="local",
        launcher="powertrain.launch.local:LocalLauncher",
        summary="processes on this host, each watched by a small parent of its own",
        options=(GRACE,),
    )

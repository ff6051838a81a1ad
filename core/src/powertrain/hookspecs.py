"""The hooks that a plugin may implement, in the module that its entry point names, free of heavy imports.

Each hook takes no argument and returns one spec (or a list of specs when one module serves several entry points).
They are called once for each process that selects the plugin; core collects and then decides by name, so the order
of plugins never matters. `None` means "nothing from me".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from powertrain.specs import BackendSpec, DeviceSpec, LauncherSpec, RecipeSpec, ServiceSpec, TransferSpec

hookspec = pluggy.HookspecMarker("powertrain")
hookimpl = pluggy.HookimplMarker("powertrain")


@hookspec
def powertrain_backend() -> BackendSpec | list[BackendSpec] | None:
    """Describe a training or inference backend (group `powertrain.backends`)."""


@hookspec
def powertrain_transfer() -> TransferSpec | list[TransferSpec] | None:
    """Describe a path that weights can take (group `powertrain.transfers`)."""


@hookspec
def powertrain_launcher() -> LauncherSpec | list[LauncherSpec] | None:
    """Describe what can start processes (group `powertrain.launchers`)."""


@hookspec
def powertrain_recipe() -> RecipeSpec | list[RecipeSpec] | None:
    """Describe a program that uses engines (group `powertrain.recipes`)."""


@hookspec
def powertrain_service() -> ServiceSpec | list[ServiceSpec] | None:
    """Describe a service that runs beside the engines (group `powertrain.services`)."""


@hookspec
def powertrain_device() -> DeviceSpec | list[DeviceSpec] | None:
    """Describe a kind of card (group `powertrain.devices`)."""

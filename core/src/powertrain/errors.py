"""Every error that powertrain raises on purpose.

`ConfigError` and its kin are for what a user can cause and are `ValueError`s; messages carry both numbers and the
way out. `assert` is kept for our own mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence


class PowertrainError(Exception):
    """Base of all errors raised by powertrain; catch it to catch them all.

    facts: values for the attributes that the error's class declares. during: the command of a series that it came
    from, where it came from a rank that ran one. engine: the name of the engine whose call raised it, if one did.
    beside: the other faults where several calls at once have failed.
    """

    during = ""
    engine = ""
    beside: tuple[BaseException, ...] = ()

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message)
        for name, value in facts.items():
            assert hasattr(type(self), name), name
            setattr(self, name, value)


class ConfigError(PowertrainError, ValueError):
    """Something in a recipe, an option or an argument cannot be used as given."""


class Violations(ConfigError):
    """Several configuration faults found in one pass, all told at once.

    `problems` holds one complete sentence for each fault.
    """

    def __init__(self, problems: Sequence[str], *, heading: str = "") -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(filter(None, (heading, *self.problems))))


class LayoutError(Violations):
    """A config string or its mapping form is not understood or does not fit; quotes the line with a caret."""


class EnvironmentConflictError(ConfigError):
    """A user's explicit variable contradicts a guarantee that the same user asked for."""


class DeviceError(ConfigError):
    """Fewer cards are visible than a layout needs, or a card is named that does not exist."""


class StateError(PowertrainError, RuntimeError):
    """A method was called in a state that does not allow it; the message names both states."""


class UnfitError(StateError):
    """The engine's weights are neither the old nor the new version; an update must heal it before it answers."""


class PluginError(PowertrainError):
    """One plugin cannot be used. The message is one line: plugin, dist, version, cause.

    Attributes: `plugin` (entry point name), `group`, `dist`, `version`, `kind` (one of the failure kinds listed in
    `powertrain.registry`).
    """

    plugin = ""
    group = ""
    dist = ""
    version = ""
    kind = ""


class UnknownPluginError(PluginError, ConfigError):
    """No installed plugin has the name; the message lists those that exist and the nearest one."""


class MissingDependencyError(PluginError):
    """The plugin is there, a package it needs is not; the message says what to install."""


class EngineNotReadyError(PluginError):
    """The plugin describes an engine that this release does not contain yet (its spec is `planned`)."""


class DeadlineError(PowertrainError, TimeoutError):
    """A wait ended at its deadline. The message names who was waited for, for what, and for how long."""

    who = ""
    what = ""
    seconds = 0.0


class WorkerError(PowertrainError, RuntimeError):
    """A worker answered with an error, or died. `rank`, `worker` and `remote_traceback` tell which and where."""

    worker = ""
    rank = -1
    remote_type = ""
    remote_traceback = ""
    log = ""


class HandshakeError(WorkerError):
    """A worker runs another core API, or gave a wrong token, or registered twice."""


class TransferError(PowertrainError, RuntimeError):
    """A weight update failed; `phase` says where, `unfit` names the sinks that must be healed.

    failed: the sinks whose own fault it was; empty where it was the trainer's, or nobody's.
    """

    phase = ""
    unfit: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class CheckpointError(PowertrainError, RuntimeError):
    """A checkpoint is incomplete, damaged or belongs to another run."""


class NumericsError(PowertrainError, ArithmeticError):
    """A loss or a gradient norm is not finite; the step was not taken and the weights are as they were."""

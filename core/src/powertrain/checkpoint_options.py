"""The options of every training engine's checkpoints, kept in core so that they mean the same everywhere."""

from __future__ import annotations

from typing import Final

from powertrain.options import OptionSpec

CHECKPOINT_OPTIONS: Final = (
    OptionSpec(
        name="no_save_optim",
        type="bool",
        default=False,
        help="leave the optimizer state out of checkpoints: they are smaller and quicker to write, "
        "but a resumed run starts with fresh Adam moments at full learning rate",
    ),
    OptionSpec(
        name="no_load_optim",
        type="bool",
        default=False,
        help="do not load the optimizer state of a checkpoint: one without it, or from another optimizer, can be used, "
        "but the resumed run starts with fresh Adam moments at full learning rate",
    ),
)
"""Off by default. They become `EngineSpec.no_save_optim` and `EngineSpec.no_load_optim`."""

"""The keys of a run's YAML file that belong to core; every other top-level key is a section of options.

A section is named after the recipe (its options), after a part of the layout, or after a backend in it (engine
options). For an engine option the config string's `?key=value` wins over the part's section, which wins over the
backend's section, which wins over the backend's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from powertrain.interfaces.build import HeadSpec, LoraSpec, OptimSpec, ScheduleSpec
from powertrain.options import OptionSpec, options_of

TIMEOUT_OPTIONS: Final = (
    OptionSpec(name="start", type="float", default=600.0, minimum=0.001, help="seconds for all engines to be built"),
    OptionSpec(name="step", type="float", default=1800.0, minimum=0.001, help="seconds for a step, save or export"),
    OptionSpec(name="generate", type="float", default=1800.0, minimum=0.001, help="seconds for one batch of requests"),
    OptionSpec(
        name="update", type="float", default=300.0, minimum=0.001, help="seconds for each step of a weight update"
    ),
    OptionSpec(name="engine", type="float", default=300.0, minimum=0.001, help="seconds for any wait inside an engine"),
)
GROUPS: Final[Mapping[str, tuple[OptionSpec, ...]]] = {
    "head": options_of(HeadSpec),
    "lora": options_of(LoraSpec),
    "optim": options_of(OptimSpec),
    "timeouts": TIMEOUT_OPTIONS,
}
SCHEDULE_OPTIONS: Final = options_of(ScheduleSpec)
"""Core keys that hold a mapping, with the options in it; `optim.schedule` holds `SCHEDULE_OPTIONS`."""

_SAVED: Final = "leave the optimizer state out of checkpoints: they are smaller and quicker to write, but a"
_LOADED: Final = (
    "do not load the optimizer state of a checkpoint: one without it, or from another optimizer, can be used, but the"
)
_FRESH: Final = "resumed run starts with fresh Adam moments at full learning rate"
CHECKPOINT_OPTIONS: Final = tuple(
    OptionSpec(name=name, type="bool", default=False, help=f"{what} {_FRESH}")
    for name, what in (("no_save_optim", _SAVED), ("no_load_optim", _LOADED))
)
"""The same for every training engine, off by default; they become fields of `EngineSpec` of the same names."""

CORE_OPTIONS: Final = (
    OptionSpec(name="recipe", help="the program to run, by its plugin's name"),
    OptionSpec(name="engines", help="the layout: a config string or its mapping form"),
    OptionSpec(name="model", help="a folder in HF format, a hub id, or package:DIST/FILE.gguf"),
    OptionSpec(name="device", default="auto", choices=("auto", "cpu", "cuda"), help="what the layout's cards are"),
    OptionSpec(name="dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the held weights"),
    OptionSpec(name="seed", type="int", default=0, minimum=0, maximum=2**63 - 1, help="of everything random"),
    OptionSpec(name="deterministic", type="bool", default=True, help="same seed and config give bitwise equal numbers"),
    OptionSpec(name="head", type="mapping", default={}, help="precision of the LM head, one setting for both sides"),
    OptionSpec(name="head_mismatch", default="refuse", choices=("refuse", "allow"), help="may one side alone differ"),
    OptionSpec(name="lora", type="mapping", help="train an adapter in place of all weights; null for full training"),
    OptionSpec(name="optim", type="mapping", default={}, help="AdamW and its learning rate"),
    OptionSpec(name="pause_mode", default="wait", choices=("abort", "wait", "keep"), help="requests during an update"),
    OptionSpec(name="on_sink_failure", default="fail", choices=("fail", "evict"), help="one engine fails in an update"),
    OptionSpec(name="inline", default="auto", choices=("auto", "never"), help="engines of one rank in this process"),
    OptionSpec(name="launcher", default="local", help="what starts the workers"),
    OptionSpec(name="launcher_options", type="mapping", default={}, help="the launcher's own options"),
    OptionSpec(name="transfer", help="path of the weights for pairs that name none with `via`; picked if not given"),
    OptionSpec(name="transfer_options", type="mapping", default={}, help="transfer's name -> its own options"),
    OptionSpec(name="env", type="mapping", default={}, help="variables of every process, as text; they always win"),
    OptionSpec(name="timeouts", type="mapping", default={}, help="deadlines in seconds"),
    OptionSpec(name="runs", default="runs", help="folder in which run folders are made, from the current folder"),
    OptionSpec(name="name", help="first part of the run folder's name; the recipe file's if not given"),
    OptionSpec(name="base", help="folder from which relative paths in the file are read; the file's own if not given"),
    OptionSpec(name="keep_last", type="int", default=3, minimum=1, help="checkpoints kept, the newest ones"),
    *CHECKPOINT_OPTIONS,
)
"""Every core key with its type, default and meaning."""

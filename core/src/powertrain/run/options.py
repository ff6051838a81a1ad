"""The keys of a run's YAML file that belong to core; every other top-level key is a section of options.

A section is named after the recipe (its options), after a part of the layout, or after a backend in it (engine
options). For an engine option the config string's `?key=value` wins over the part's section, which wins over the
backend's section, which wins over the backend's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from powertrain.checkpoint_options import CHECKPOINT_OPTIONS
from powertrain.options import OptionSpec

HEAD_OPTIONS: Final = (
    OptionSpec(name="fp32", type="bool", default=True, help="compute logits and log-probs in float32 on both sides"),
    OptionSpec(name="chunk", type="int", minimum=1, help="positions whose logits exist at once; all when not given"),
)
LORA_OPTIONS: Final = (
    OptionSpec(name="rank", type="int", default=8, minimum=1, help="rank of the adapter"),
    OptionSpec(name="alpha", type="float", default=16.0, help="scale of the adapter, times 1/rank"),
    OptionSpec(name="dropout", type="float", default=0.0, minimum=0, maximum=1, help="dropout on the adapter's input"),
    OptionSpec(
        name="targets",
        type="list",
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        help="suffixes of the modules that get an adapter",
    ),
    OptionSpec(name="name", default="policy", help="base of the versioned adapter names"),
)
SCHEDULE_OPTIONS: Final = (
    OptionSpec(name="kind", default="constant", choices=("constant", "linear", "cosine"), help="shape of the decay"),
    OptionSpec(
        name="total_steps", type="int", minimum=1, help="steps until the decay ends; the recipe's own if not given"
    ),
    OptionSpec(name="warmup_steps", type="int", minimum=0, help="fixed warmup; wins over warmup_ratio; 0 is none"),
    OptionSpec(
        name="warmup_ratio", type="float", default=0.0, minimum=0, maximum=1, help="warmup as share of total_steps"
    ),
    OptionSpec(name="min_ratio", type="float", default=0.0, minimum=0, maximum=1, help="floor as share of the peak"),
)
OPTIM_OPTIONS: Final = (
    OptionSpec(name="lr", type="float", default=1e-5, minimum=0, help="peak learning rate"),
    OptionSpec(name="beta1", type="float", default=0.9, minimum=0, maximum=1, help="decay of Adam's first moment"),
    OptionSpec(name="beta2", type="float", default=0.999, minimum=0, maximum=1, help="decay of Adam's second moment"),
    OptionSpec(name="eps", type="float", default=1e-8, minimum=0, help="Adam's epsilon"),
    OptionSpec(name="weight_decay", type="float", default=0.0, minimum=0, help="decoupled weight decay"),
    OptionSpec(
        name="clip", type="float", default=1.0, minimum=0, help="largest global gradient norm; 0 for no clipping"
    ),
    OptionSpec(name="schedule", type="mapping", default={}, help="learning-rate schedule"),
)
TIMEOUT_OPTIONS: Final = (
    OptionSpec(name="start", type="float", default=600.0, minimum=0, help="seconds for all engines to be built"),
    OptionSpec(
        name="step", type="float", default=1800.0, minimum=0, help="seconds for a training step, save or export"
    ),
    OptionSpec(name="generate", type="float", default=1800.0, minimum=0, help="seconds for one batch of requests"),
    OptionSpec(name="update", type="float", default=300.0, minimum=0, help="seconds for each step of a weight update"),
    OptionSpec(name="engine", type="float", default=300.0, minimum=0, help="seconds for any wait inside an engine"),
)
GROUPS: Final[Mapping[str, tuple[OptionSpec, ...]]] = {
    "head": HEAD_OPTIONS,
    "lora": LORA_OPTIONS,
    "optim": OPTIM_OPTIONS,
    "timeouts": TIMEOUT_OPTIONS,
}
"""Core keys that hold a mapping, with the options in it; `optim.schedule` holds `SCHEDULE_OPTIONS`."""

CORE_OPTIONS: Final = (
    OptionSpec(name="recipe", help="the program to run, by its plugin's name"),
    OptionSpec(name="engines", help="the layout: a config string or its mapping form"),
    OptionSpec(name="model", help="a folder in HF format, a hub id, or package:DIST/FILE.gguf"),
    OptionSpec(name="device", default="auto", choices=("auto", "cpu", "cuda"), help="what the layout's cards are"),
    OptionSpec(
        name="dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="dtype of the held weights"
    ),
    OptionSpec(name="seed", type="int", default=0, minimum=0, help="of everything random in the run"),
    OptionSpec(name="deterministic", type="bool", default=True, help="same seed and config give bitwise equal numbers"),
    OptionSpec(name="head", type="mapping", default={}, help="precision of the LM head, one setting for both sides"),
    OptionSpec(
        name="head_mismatch", default="refuse", choices=("refuse", "allow"), help="one side alone may differ if allowed"
    ),
    OptionSpec(name="lora", type="mapping", help="train an adapter in place of all weights; null for full training"),
    OptionSpec(name="optim", type="mapping", default={}, help="AdamW and its learning rate"),
    OptionSpec(name="pause_mode", default="wait", choices=("abort", "wait", "keep"), help="requests during an update"),
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

"""powertrain: pick the training engine, the inference engine and the weight transfer with one line of text.

Every public name is imported on first use, so that `import powertrain` costs less than importing pluggy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "hookimpl": "powertrain.hookspecs",
    "API_VERSION": "powertrain.specs",
    "AxisSpec": "powertrain.specs",
    "BackendSpec": "powertrain.specs",
    "DeviceSpec": "powertrain.specs",
    "LauncherSpec": "powertrain.specs",
    "RecipeSpec": "powertrain.specs",
    "ServiceSpec": "powertrain.specs",
    "Support": "powertrain.specs",
    "TransferSpec": "powertrain.specs",
    "OptionSpec": "powertrain.options",
    "Registry": "powertrain.registry",
    "parse_layout": "powertrain.layout",
    "Layout": "powertrain.layout",
    "GenerateRequest": "powertrain.interfaces.data",
    "GenerateResult": "powertrain.interfaces.data",
    "Completion": "powertrain.interfaces.data",
    "Segment": "powertrain.interfaces.data",
    "SamplingParams": "powertrain.interfaces.data",
    "TrainBatch": "powertrain.interfaces.data",
    "StepResult": "powertrain.interfaces.data",
    "LossSpec": "powertrain.interfaces.data",
    "EngineSpec": "powertrain.interfaces.build",
    "HeadSpec": "powertrain.interfaces.build",
    "LoraSpec": "powertrain.interfaces.build",
    "OptimSpec": "powertrain.interfaces.build",
    "TrainEngine": "powertrain.interfaces.train",
    "InferEngine": "powertrain.interfaces.infer",
    "Transfer": "powertrain.interfaces.transfer",
    "Launcher": "powertrain.interfaces.launcher",
    "Recipe": "powertrain.interfaces.recipe",
    "WeightVersion": "powertrain.weights",
    "open_engine": "powertrain.runtime.open",
    "Driver": "powertrain.runtime.driver",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from powertrain.hookspecs import hookimpl as hookimpl
    from powertrain.interfaces.build import EngineSpec as EngineSpec
    from powertrain.interfaces.build import HeadSpec as HeadSpec
    from powertrain.interfaces.build import LoraSpec as LoraSpec
    from powertrain.interfaces.build import OptimSpec as OptimSpec
    from powertrain.interfaces.data import Completion as Completion
    from powertrain.interfaces.data import GenerateRequest as GenerateRequest
    from powertrain.interfaces.data import GenerateResult as GenerateResult
    from powertrain.interfaces.data import LossSpec as LossSpec
    from powertrain.interfaces.data import SamplingParams as SamplingParams
    from powertrain.interfaces.data import Segment as Segment
    from powertrain.interfaces.data import StepResult as StepResult
    from powertrain.interfaces.data import TrainBatch as TrainBatch
    from powertrain.interfaces.infer import InferEngine as InferEngine
    from powertrain.interfaces.launcher import Launcher as Launcher
    from powertrain.interfaces.recipe import Recipe as Recipe
    from powertrain.interfaces.train import TrainEngine as TrainEngine
    from powertrain.interfaces.transfer import Transfer as Transfer
    from powertrain.layout import Layout as Layout
    from powertrain.layout import parse_layout as parse_layout
    from powertrain.options import OptionSpec as OptionSpec
    from powertrain.registry import Registry as Registry
    from powertrain.runtime.driver import Driver as Driver
    from powertrain.runtime.open import open_engine as open_engine
    from powertrain.specs import API_VERSION as API_VERSION
    from powertrain.specs import AxisSpec as AxisSpec
    from powertrain.specs import BackendSpec as BackendSpec
    from powertrain.specs import DeviceSpec as DeviceSpec
    from powertrain.specs import LauncherSpec as LauncherSpec
    from powertrain.specs import RecipeSpec as RecipeSpec
    from powertrain.specs import ServiceSpec as ServiceSpec
    from powertrain.specs import Support as Support
    from powertrain.specs import TransferSpec as TransferSpec
    from powertrain.weights import WeightVersion as WeightVersion


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        message = f"module 'powertrain' has no attribute {name!r}"
        raise AttributeError(message)
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

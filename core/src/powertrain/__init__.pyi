"""The public names and the module of each. Type checkers read this file, and `__init__.py` too."""

from typing import Final

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

__version__: Final[str]

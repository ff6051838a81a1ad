"""Weights as data: boxes, manifests, versions, plans, updates and the transaction that publishes them. No torch."""

from powertrain.weights.boxes import Box as Box
from powertrain.weights.boxes import Entry as Entry
from powertrain.weights.boxes import Manifest as Manifest
from powertrain.weights.patterns import EngineManifest as EngineManifest
from powertrain.weights.patterns import Pattern as Pattern
from powertrain.weights.patterns import Tensor as Tensor
from powertrain.weights.plan import TransferPlan as TransferPlan
from powertrain.weights.plan import plan_transfer as plan_transfer
from powertrain.weights.update import Meter as Meter
from powertrain.weights.update import TransferReport as TransferReport
from powertrain.weights.update import Update as Update
from powertrain.weights.version import VersionCounter as VersionCounter
from powertrain.weights.version import WeightVersion as WeightVersion

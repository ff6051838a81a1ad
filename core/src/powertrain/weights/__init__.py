"""Weights as data: boxes, manifests, versions, plans, updates and the transaction that publishes them. No torch."""

from __future__ import annotations

from powertrain.weights.boxes import Box, Entry, Manifest
from powertrain.weights.plan import TransferPlan, plan_transfer
from powertrain.weights.update import Meter, TransferReport, Update
from powertrain.weights.version import VersionCounter, WeightVersion

__all__ = [
    "Box",
    "Entry",
    "Manifest",
    "Meter",
    "TransferPlan",
    "TransferReport",
    "Update",
    "VersionCounter",
    "WeightVersion",
    "plan_transfer",
]

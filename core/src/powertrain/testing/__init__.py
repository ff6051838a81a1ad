"""Draft."""

from powertrain.testing.train import TrainEngineSuite as TrainEngineSuite

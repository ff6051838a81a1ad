"""A plugin with engines of pure Python whose every misdeed can be ordered by name."""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import BackendSpec, TransferSpec

REACH = ("process", "host")
STATUS = "ready"  # of the transfer


@hookimpl
def powertrain_backend() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="toytrain",
            role="train",
            engine="powertrain_toy.engines:ToyTrain",
            axes=("d", "t"),
            environment="powertrain_toy.environment:needs",
            options=(OptionSpec(name="fail", default="", help="where to fail: prepare, build"),),
        ),
        BackendSpec(
            name="toyinfer",
            role="infer",
            engine="powertrain_toy.engines:ToyInfer",
            axes=("d", "t"),
            options=(OptionSpec(name="fail", default="", help="where to fail: prepare, build"),),
        ),
    ]


@hookimpl
def powertrain_transfer() -> TransferSpec:
    return TransferSpec(
        name="toycopy",
        driver="powertrain_toy.transfer:ToyCopy",
        source="powertrain_toy.transfer:ToyCopySource",
        sink="powertrain_toy.transfer:ToyCopySink",
        reach=REACH,
        rank=1,
        status=STATUS,
        options=(OptionSpec(name="fail", default="", help="where to fail: move"),),
    )

"""Backends to lay out, described but never started: core's tests install no plugin."""

import functools

import pytest

from powertrain.errors import LayoutError, UnknownPluginError
from powertrain.layout import parse_layout
from powertrain.options import OptionSpec, nearest
from powertrain.specs import AxisSpec, BackendSpec


def _backend(name, role, axes, *options, status="ready"):
    engine = "nowhere:Engine"
    return BackendSpec(name=name, role=role, engine=engine, axes=axes, options=options, status=status)


class Catalogue:
    """Answers `parse_layout` as a `Registry` would in which the backends of `specs` are installed."""

    def __init__(self, specs, transfers=("local", "shm", "ipc", "p2p")):
        self.specs, self.transfers = {spec.name: spec for spec in specs}, transfers

    def backend(self, name):
        if name in self.specs:
            return self.specs[name]
        message = f"unknown backend {name!r}{nearest(name, self.specs)}; there are: {', '.join(sorted(self.specs))}"
        raise UnknownPluginError(message, plugin=name)

    def names(self, kind):
        return {"transfer": self.transfers}[kind]


@pytest.fixture(scope="session")
def catalogue():
    """Return the class of which `registry` is one, for tests that bring specs of their own."""
    return Catalogue


@pytest.fixture(scope="session")
def registry():
    made = [
        _backend(
            "fsdp",
            "train",
            ("d", "t", "c"),
            OptionSpec(name="lr", type="float", default=1e-3),
            OptionSpec(name="note"),
            OptionSpec(name="names", type="list"),
            OptionSpec(name="extra", type="mapping"),
            OptionSpec(name="dtype", default="bf16", choices=("bf16", "fp32")),
        ),
        _backend(
            "megatron",
            "train",
            ("p", "d", "c", "t", "e"),
            OptionSpec(name="etp", type="int", default=1, minimum=1),
            status="planned",
        ),
        _backend(
            "vllm",
            "infer",
            ("d", "p", "t", "e"),
            OptionSpec(name="gpu_memory_utilization", type="float", default=0.9, minimum=0, maximum=1),
            OptionSpec(name="seed", type="int"),
        ),
        _backend("sglang", "infer", ("d", "p", "t", "e"), status="planned"),
        _backend("hf", "infer", ("d",), OptionSpec(name="eager", type="bool", default=False)),
        _backend(
            "acme",
            "train",
            (
                AxisSpec("x", "crosswise"),
                "d",
                AxisSpec("ring", "ring attention", maximum=8),
                AxisSpec("s", "sequence", world=False),
                AxisSpec("pair", "pairs", minimum=2),
            ),
        ),
        _backend("nine", "infer", (AxisSpec("n", "copies", instances=True), AxisSpec("t", minimum=1, maximum=3))),
    ]
    return Catalogue(made)


@pytest.fixture(scope="session")
def parse(registry):
    return functools.partial(parse_layout, registry=registry)


@pytest.fixture(scope="session")
def faults(registry):
    """Return [(offset of the caret, message)] for a text that must be refused."""

    def find(text, registry=registry):
        with pytest.raises(LayoutError) as caught:
            parse_layout(text, registry=registry)
        found = []
        for problem in caught.value.problems:
            message, line, pointer = problem.rsplit("\n", 2)
            assert line == "    " + text
            assert pointer.strip(" \u3000") == "^"
            found.append((pointer.index("^") - 4, message))
        return found

    return find

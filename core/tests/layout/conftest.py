"""Backends to lay out, described but never started: core's tests install no plugin."""

import functools

import pytest

from powertrain.errors import LayoutError
from powertrain.layout import parse_layout
from powertrain.options import OptionSpec
from powertrain.specs import AxisSpec, BackendSpec


def _backend(name, role, axes, *options, status="ready"):
    engine = "nowhere:Engine"
    return BackendSpec(name=name, role=role, engine=engine, axes=axes, options=options, status=status)


@pytest.fixture(scope="session")
def specs():
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
    return {spec.name: spec for spec in made}


@pytest.fixture(scope="session")
def parse(specs):
    return functools.partial(parse_layout, specs=specs)


@pytest.fixture(scope="session")
def faults(specs):
    """Return [(offset of the caret, message)] for a text that must be refused."""

    def find(text, **sources):
        with pytest.raises(LayoutError) as caught:
            parse_layout(text, **(sources or {"specs": specs}))
        found = []
        for problem in caught.value.problems:
            message, line, pointer = problem.rsplit("\n", 2)
            assert line == "    " + text
            assert pointer.strip(" \u3000") == "^"
            found.append((pointer.index("^") - 4, message))
        return found

    return find

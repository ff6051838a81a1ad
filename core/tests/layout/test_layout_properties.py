"""Properties: printing and parsing are inverse, numbers are consistent, and damage gives our error and no other."""

import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.errors import LayoutError, UnknownPluginError
from powertrain.layout import Layout, parse_layout
from powertrain.options import OptionSpec
from powertrain.specs import AxisSpec, BackendSpec

_OPTIONS = (
    OptionSpec(name="i", type="int"),
    OptionSpec(name="f", type="float", default=0.0),
    OptionSpec(name="b", type="bool", default=True),
    OptionSpec(name="s"),
    OptionSpec(name="word", default="x"),
    OptionSpec(name="l", type="list", default=[]),
    OptionSpec(name="m", type="mapping", default={}),
)
_SPECS = {
    spec.name: spec
    for spec in (
        BackendSpec(name="tr", role="train", engine="n:E", axes=("p", "d", "c", "t", "e"), options=_OPTIONS),
        BackendSpec(name="in", role="infer", engine="n:E", axes=("d", "p", "t", "e"), options=_OPTIONS),
        BackendSpec(
            name="third-party.x",
            role="train",
            engine="n:E",
            axes=(AxisSpec("x", "crosswise"), "d", AxisSpec("ring"), AxisSpec("s", world=False)),
            options=_OPTIONS,
        ),
    )
}


class _Registry:
    """What `parse_layout` asks of a registry."""

    def backend(self, name):
        if name not in _SPECS:
            message = f"no backend {name!r}"
            raise UnknownPluginError(message, plugin=name)
        return _SPECS[name]

    def names(self, kind):
        return ("shm", "ipc")


_REGISTRY = _Registry()
_WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,6}", fullmatch=True)
# Text without halves of surrogate pairs, which is refused; YAML also has no form for some control characters.
_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["null", "None", "'", "a=b&c|d"]
)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _FLOATS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "f": _FLOATS,
        "b": st.booleans(),
        "s": st.none() | _TEXT,
        "word": _TEXT,
        "l": st.lists(_JSON, max_size=3),
        "m": st.dictionaries(_TEXT, _JSON, max_size=3),
        "python": st.none() | _TEXT,
        "frozen": st.just(False),
        "inline": st.none() | st.just(False),
    },
)


@st.composite
def _part(draw, name, world):
    """Draw the mapping of one part with `world` cards, a power of two."""
    backend = draw(st.sampled_from(sorted(_SPECS)))
    left, axes = world, {}
    names = [axis.name for axis in _SPECS[backend].axis_table().values() if axis.world]
    for axis in names[1:]:
        axes[axis] = 2 ** draw(st.integers(0, int(math.log2(left))))
        left //= axes[axis]
    axes[names[0]] = left
    part = {"backend": backend, "name": name, "axes": axes, "options": draw(_VALUES)}
    if backend == "tr" and draw(st.booleans()):
        part["expert_axes"] = {"p": axes["p"], "e": world // axes["p"]}
    elif backend == "tr":
        axes["e"] = world // axes["p"]
    elif backend == "in":
        axes["e"] = axes["t"]
    else:
        axes["s"] = world
    return part


@st.composite
def _mappings(draw):
    names = iter(draw(st.lists(_WORDS.filter(lambda w: w not in _SPECS), min_size=9, max_size=9, unique=True)))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        world = 2 ** draw(st.integers(0, 5))
        groups.append([draw(_part(next(names), world)) for _ in range(draw(st.integers(1, 3)))])
    # One transfer for all pairs, behind every part that has a partner.
    roles = {_SPECS[part["backend"]].role for group in groups for part in group}
    if roles == {"train", "infer"}:
        via = draw(st.sampled_from([None, "shm", "ipc"]))
        for group in groups:
            for part in group:
                part["via"] = draw(st.sampled_from([None, via]))
    return {"groups": groups}


@settings(max_examples=80, deadline=None)
@given(_mappings())
def test_text_and_mapping_round_trip(mapping):
    layout = parse_layout(mapping, registry=_REGISTRY)
    text, plain = str(layout), layout.to_mapping()
    assert parse_layout(text, registry=_REGISTRY) == layout
    assert str(parse_layout(text, registry=_REGISTRY)) == text
    assert Layout.from_mapping(plain, registry=_REGISTRY) == layout
    assert Layout.from_mapping(plain, registry=_REGISTRY).to_mapping() == plain
    assert Layout.from_mapping(json.loads(json.dumps(plain)), registry=_REGISTRY) == layout
    for part, given_part in zip(layout.parts, [p for g in mapping["groups"] for p in g], strict=True):
        assert part.options == given_part["options"]


@settings(max_examples=40, deadline=None)
@given(_mappings())
def test_yaml_round_trip(mapping):
    layout = parse_layout(mapping, registry=_REGISTRY)
    text = yaml.safe_dump(layout.to_mapping(), sort_keys=False)
    assert Layout.from_mapping(yaml.safe_load(text), registry=_REGISTRY) == layout


@settings(max_examples=40, deadline=None)
@given(_mappings())
def test_every_card_has_one_rank_of_each_part(mapping):
    layout = parse_layout(mapping, registry=_REGISTRY)
    covered = []
    for group in layout.groups:
        assert len({part.cards for part in group}) == 1
        covered += group[0].cards
        for part in group:
            places = [part.place(rank) for rank in range(part.world)]
            assert [place.card for place in places] == list(part.cards)
            assert len({tuple(place.coordinates.values()) for place in places}) == part.world
            assert all(
                (p.instance, p.rank_in_instance) == divmod(rank, part.cards_per_instance)
                for rank, p in enumerate(places)
            )
    assert covered == list(range(layout.cards))


def _parse_or_refuse(text):
    """Parse; whatever comes out is a layout that round-trips, or a LayoutError whose carets lie on the line."""
    try:
        layout = parse_layout(text, registry=_REGISTRY)
    except LayoutError as exc:
        for problem in exc.problems:
            assert problem.endswith("^") or not text.strip()  # a blank text is not quoted
        return None
    assert parse_layout(str(layout), registry=_REGISTRY) == layout
    return layout


@settings(max_examples=120, deadline=None)
@given(_mappings(), st.data())
def test_damage_gives_only_our_error(mapping, data):
    text = str(parse_layout(mapping, registry=_REGISTRY))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 3))
        piece = data.draw(
            st.sampled_from([*"|+:?&='()[]09tdex ", "via", "''", "(attn:", "|ffn:", ""]) | st.text(max_size=2)
        )
        text = text[:at] + piece + text[at + cut :]
    _parse_or_refuse(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="trin:dpe124|+()[]?&='sif via\u00b2\u0664\u5bb6", max_size=60))
def test_any_text_gives_only_our_error(text):
    _parse_or_refuse(text)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["backend", "name", "axes", "expert_axes", "options", "via", "other"]),
        _JSON
        | st.sampled_from(["tr", "in"])
        | st.dictionaries(st.sampled_from(["d", "t", "e", "s"]), st.integers(0, 4)),
    )
)
def test_any_mapping_gives_only_our_error(part):
    try:
        layout = parse_layout({"groups": [[part]]}, registry=_REGISTRY)
    except LayoutError:
        return
    assert Layout.from_mapping(layout.to_mapping(), registry=_REGISTRY) == layout


@pytest.mark.parametrize("depth", [10, 900, 4000])
def test_brackets_of_any_depth_give_only_our_error(depth):
    assert _parse_or_refuse("tr:" + "(" * depth) is None
    assert _parse_or_refuse("tr:d1?m=" + '{"a":' * depth) is None

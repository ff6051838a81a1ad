"""Refusals: every fault at once, each with the line, a caret under the character, and a way out."""

import subprocess
import sys

import pytest

from powertrain.errors import ConfigError, LayoutError, PluginError
from powertrain.layout import parse_layout

ONE_FAULT = [
    ("vlm:d2", 0, "unknown backend 'vlm' (did you mean 'vllm'?); there are: acme, fsdp,"),
    ("hf:d2|fsdp:d2q4", 13, "backend 'fsdp' has no axis 'q'; it has: d (data parallel), t (tensor"),
    ("fsdp:d2e4", 7, "backend 'fsdp' has no axis 'e'"),
    ("fsdp:D4", 5, "no axis 'D' (did you mean 'd'?)"),
    ("acme:rng2pair2", 5, "no axis 'rng' (did you mean 'ring'?)"),
    ("fsdp:d2t2d2", 9, "axis 'd' stands there twice"),
    ("fsdp:d0", 6, "axis 'd' has size 0; it takes 1 to 65536"),
    ("fsdp:d2t", 8, "axis 't' has no number; write 't1'"),
    ("fsdp:dt2", 6, "axis 'd' has no number; write 'd1'"),
    ("fsdp:d70000", 6, "axis 'd' has size 70000; it takes 1 to 65536"),
    ("fsdp:d" + "9" * 80, 6, "axis 'd' has size 999999999…; it takes 1 to 65536"),
    ("fsdp:d65536t2", 5, "part 'fsdp' has 131072 cards; the most allowed is 65536"),
    ("nine:n1t4", 8, "axis 't' has size 4; it takes 1 to 3"),
    ("acme:d2pair1", 11, "axis 'pair' has size 1; it takes 2 to 65536"),
    ("acme:d2", 5, "axis 'pair' is not given; it needs at least 2"),
    ("acme:d2pair2s3", 12, "axis 's' has size 3, which does not divide the world 4"),
    ("hf", 2, "sizes are missing; write for example 'hf:d1'"),
    ("hf:", 3, "sizes are missing; write for example 'hf:d1'"),
    ("hf: via shm|fsdp:d1", 4, "sizes are missing; write for example 'hf:d1'"),
    ("nine+fsdp:d1", 4, "sizes are missing; write for example 'nine:n1'"),
    ("fsdp:d2|", 7, "a part is missing beside '|'"),
    ("fsdp:d2||hf:d2", 8, "a part is missing beside '|'"),
    ("+hf:d2", 0, "a part is missing beside '+'"),
    (":d2", 0, "unknown backend ''; there are: acme,"),
    ("fsdp[a:d2", 4, "bracket '[' is not closed"),
    ("fsdp[]:d2", 5, "'' cannot be a name"),
    ("fsdp[1a]:d2", 5, "'1a' cannot be a name"),
    ("megatron:(attn:d2|ffn:e2", 9, "bracket '(' is not closed"),
    ("megatron:(attn:d2|ffn:e2+hf:d1", 9, "bracket '(' is not closed"),
    ("megatron:(attn:d2|fnn:e2)", 18, "unknown section 'fnn' (did you mean 'ffn'?); there are attn and ffn"),
    ("megatron:(attn:d2|attn:d2)", 18, "section 'attn' stands there twice"),
    ("megatron:(attn:d2)", 9, "section 'ffn' is missing"),
    ("megatron:(attn:d2|ffn)", 21, "sizes are missing"),
    (
        "megatron:(attn:d2e2|ffn:d2)",
        17,
        "section 'attn' has no axis 'e'; it has: p (pipeline parallel), d (data parallel), c (",
    ),
    (
        "megatron:(attn:d2|ffn:c2)",
        22,
        "section 'ffn' has no axis 'c'; it has: p (pipeline parallel), d (data parallel), t (",
    ),
    ("megatron:(attn:d4|ffn:d1e2)", 18, "attn has 4 ranks and ffn has 2"),
    ("megatron:(attn:d2|ffn:d2)?etp=2", 30, "option 'etp' is 2 and ffn has t1; drop the option"),
    ("fsdp:(attn:d2|ffn:d2)", 5, "backend 'fsdp' has no sections"),
    ("sglang:(attn:d2|ffn:d2)", 7, "backend 'sglang' has no sections"),
    ("fsdp:d2)", 7, "unexpected ')'"),
    ("fsdp:d2 d4", 8, "unexpected 'd4'"),
    ("fsdp:d2,hf:d2", 7, "unexpected ',hf:d2'; '|' joins parts on the same cards, '+' parts on cards of their own"),
    ("FSDP:d2", 0, "unknown backend 'FSDP' (did you mean 'fsdp'?)"),
    ("fsdp:d2-x", 7, "unexpected '-x'"),
    ("fsdp:d2'a", 7, 'unexpected "\'a"'),
    ("fsdp:d2?note='a|hf:d0", 13, "quote ' is not closed"),
    ("fsdp:d2?note=a'b", 14, 'unexpected "\'b"'),
    ("fsdp:d2?note=", 13, "option 'note' has no value; write 'note=value', an empty one as ''"),
    ("fsdp:d2?note", 12, "option 'note' has no value; write 'note=value'"),
    ("fsdp:d2?", 8, "an option is missing behind '?'; write '?name=value'"),
    ("fsdp:d2?=3", 8, "an option is missing behind '?'; write '?name=value'"),
    ("fsdp:d2?lr=1&", 13, "an option is missing behind '&'; write '&name=value'"),
    ("fsdp:d2?lr=1& & note=a", 14, "an option is missing behind '&'"),
    ("fsdp:d2?lr=1?note=a", 11, "option 'lr' needs a value of type float, got '1?note=a'; '&' joins options, as in"),
    ("fsdp:d2?lr=1 note=a", 13, "unexpected 'note=a'; '&' joins options, as in '?a=1&b=2'"),
    ("fsdp:d2?lr=1,note=a", 11, "option 'lr' needs a value of type float, got '1,note=a'; '&' joins options, as in"),
    ("fsdp:d2?lr=1;note=a", 11, "option 'lr' needs a value of type float, got '1;note=a'; '&' joins options, as in"),
    ("fsdp:d2?lr:1", 10, "option 'lr' has no value; write 'lr=value'"),
    ("fsdp:d2?lr 1", 11, "option 'lr' has no value; write 'lr=value'"),
    ("fsdp:d-1", 6, "axis 'd' has no number; write 'd1'"),
    ("fsdp:d=1", 6, "axis 'd' has no number; write 'd1'"),
    ("fsdp:data-1", 5, "backend 'fsdp' has no axis 'data'"),
    ("fsdp:1d", 5, "sizes are missing; write for example 'fsdp:d1'"),
    ("fsdp=d1", 4, "sizes are missing; write for example 'fsdp:d1'"),
    ("megatron:(attn:2d|ffn:d2)", 15, "sizes are missing; write for example 'attn:p1'"),
    ("fsdp:d1|hf:d1 vai shm", 14, "unexpected 'vai shm' (did you mean 'via'?)"),
    ("fsdp:d1|hf:d1?eager=on vai shm", 23, "unexpected 'vai shm' (did you mean 'via'?)"),
    ("fsdp:d1|hf:d2", 8, "'fsdp' has 1 card, 'hf' has 2; make them equal"),
    ("fsdp:d2?nte=1", 8, "backend 'fsdp' has no option 'nte' (did you mean 'note'?); it has: dtype,"),
    ("fsdp:d2?lr=1&lr=2", 13, "option 'lr' stands there twice"),
    ("fsdp:d2?lr=fast", 11, "option 'lr' needs a value of type float, got 'fast'"),
    ("fsdp:d2?lr=nan", 11, "option 'lr' needs a value of type float, got 'nan'"),
    ("fsdp:d2?extra='{\"a\": 1e999}'", 14, "option 'extra' takes finite numbers"),
    ("fsdp:d2?dtype=fp16", 14, "option 'dtype' is 'fp16'; it takes bf16, fp32"),
    ("vllm:d1?gpu_memory_utilization=1.5", 31, "the most allowed is 1"),
    ("fsdp:d2?inline=true", 15, "inline engines have 1 rank; part 'fsdp' has 2"),
    ("hf:d1?inline=true&python=/x", 13, "is inline and has an interpreter of its own; drop one"),
    ("fsdp:d2 via", 11, "a transfer is missing behind 'via'; there are: local, shm,"),
    ("fsdp:d2|hf:d2 via shn", 18, "unknown transfer 'shn' (did you mean 'shm'?); there are: local, shm,"),
    ("fsdp:d2 via shm", 12, "part 'fsdp' has no partner to exchange weights with"),
    ("fsdp:d1|vllm[a]:d1+hf[b]:d1?frozen=on via shm", 42, "part 'b' is frozen and gets no weights"),
    ("fsdp:d2 via ipc|vllm:d2 via shm", 28, "the pair 'fsdp', 'vllm' has two transfers, ipc and shm"),
    ("fsdp[a]:d2+fsdp:d2", 11, "2 parts have the role train, so each needs a name: 'fsdp[actor]:…'"),
    ("vllm:d1+hf[b]:d1", 0, "2 parts have the role infer, so each needs a name: 'vllm[rollout]:…'"),
    ("fsdp[a]:d2|fsdp[a]:d2", 16, "two parts have the name 'a'; names are unique"),
    ("fsdp:d2|vllm[fsdp]:d2", 13, "two parts have the name 'fsdp'"),
    ("fsdp:d2\u00b2", 7, "backend 'fsdp' has no axis '\u00b2'"),
]


@pytest.mark.parametrize(("text", "at", "message"), ONE_FAULT, ids=[text[:40] or "empty" for text, *_ in ONE_FAULT])
def test_fault_is_pointed_at(faults, text, at, message):
    if "\t" in text:
        text = text.replace("\t", " ")
    found = faults(text)
    assert [place for place, _ in found] == [at], found
    assert message in found[0][1]


@pytest.mark.parametrize("text", ["", "  \t "])
def test_empty_layout_quotes_no_line(parse, text):
    with pytest.raises(LayoutError) as caught:
        parse(text)
    assert str(caught.value) == "layout has 1 fault:\nthe layout is empty; write for example 'BACKEND:d1'"


@pytest.mark.parametrize("text", ["fsdp=d1|hf=d1", "fsdp:1d|hf:1d", "fsdp d1|hf d1", "fsdp:d-1|hf:d-1"])
def test_each_parts_sizes_are_one_fault(faults, text):
    assert len(faults(text)) == 2


def test_all_faults_are_told_at_once(faults):
    found = faults("vlm[x]:d2d3|fsdp:t0q2?lr=abc&nte=4+hf+megatron[x]:d4p2e8 via shn")
    assert [at for at, _ in found] == [0, 9, 12, 18, 19, 25, 29, 37, 47, 54, 61]


def test_unequal_sections_are_told_together(faults):
    messages = [message for _, message in faults("megatron:(attn:d2p2|ffn:d1)")]
    assert messages == [
        "attn has p2 and ffn has p1; pipeline sizes are equal",
        "attn has 4 ranks and ffn has 1; on the same cards these are equal",
    ]


def test_nameless_parts_are_all_told(faults):
    assert [at for at, _ in faults("fsdp:d1+fsdp:d1+hf:d1")] == [0, 8]


def test_message_holds_the_quoted_line(parse):
    with pytest.raises(LayoutError) as caught:
        parse("fsdp:d0|hf:d2x1")
    assert str(caught.value).splitlines() == [
        "layout has 2 faults:",
        "axis 'd' has size 0; it takes 1 to 65536",
        "    fsdp:d0|hf:d2x1",
        "          ^",
        "backend 'hf' has no axis 'x'; it has: d (data parallel (instances))",
        "    fsdp:d0|hf:d2x1",
        "                 ^",
    ]


def test_caret_stands_under_wide_characters(parse):
    with pytest.raises(LayoutError) as caught:
        parse("fsdp[\u5bb6]:d0")
    assert caught.value.problems[1].splitlines()[1:] == ["    fsdp[\u5bb6]:d0", "         \u3000   ^"]


def test_long_line_is_cut_around_the_caret(parse):
    with pytest.raises(LayoutError) as caught:
        parse("fsdp:d1?note=" + "a" * 500 + "&nte=1&note2=" + "b" * 500)
    _, line, pointer = caught.value.problems[0].splitlines()
    assert len(line) < 130
    assert line[pointer.index("^") :].startswith("nte=1")


def test_unprintable_characters_are_quoted_as_blanks(parse):
    with pytest.raises(LayoutError) as caught:
        parse("fsdp:d2\x00\n\x1b")
    assert caught.value.problems[0].endswith("    fsdp:d2   \n           ^")


@pytest.mark.parametrize("text", ["fsdp:d1?note='" + "a" * 20_000 + "'", "+" * 20_000])
def test_overlong_text_is_refused(parse, text):
    with pytest.raises(LayoutError, match=r"characters; the most allowed is 10000"):
        parse(text)


def test_half_a_surrogate_pair_is_refused(parse):
    with pytest.raises(LayoutError, match="half of a surrogate pair"):
        parse("fsdp:d1?note='\ud800'")


def test_deep_value_is_refused(parse):
    with pytest.raises(LayoutError, match=r"option 'names'"):
        parse("fsdp:d1?names=" + "[" * 9000)


@pytest.mark.parametrize("value", [None, 3, b"fsdp:d1", ["fsdp:d1"]])
def test_other_types_are_refused(parse, value):
    with pytest.raises(ConfigError, match="a config string or a mapping, not"):
        parse(value)


def test_broken_plugin_is_told_beside_other_faults(faults, registry, monkeypatch):
    cause = "plugin 'bent' (dist bent-dist 2.0) cannot be imported: No module named 'fancy'"
    whole = registry.backend

    def backend(name):
        if name == "bent":
            raise PluginError(cause, plugin=name)
        return whole(name)

    monkeypatch.setattr(registry, "backend", backend)
    found = faults("bent:d2d2|fsdp:d0")
    assert [at for at, _ in found] == [0, 7, 16]
    assert found[0][1] == cause


def test_installed_transfers_are_known(catalogue, registry):
    with_pigeon = catalogue(registry.specs.values(), transfers=("pigeon",))
    assert parse_layout("fsdp:d1|hf:d1 via pigeon", registry=with_pigeon).pairs[0].via == "pigeon"
    with pytest.raises(LayoutError, match="unknown transfer 'shm'; there are: pigeon"):
        parse_layout("fsdp:d1|hf:d1 via shm", registry=with_pigeon)


def test_installed_backends_are_looked_up_by_default(monkeypatch):
    monkeypatch.setenv("POWERTRAIN_PLUGINS", "")
    with pytest.raises(LayoutError, match="nosuch"):
        parse_layout("nosuch:d1")


BAD_MAPPINGS = [
    ({}, "groups is null, not a list of lists of parts"),
    ({"groups": [], "group": 1}, r"a layout has no key 'group' \(did you mean 'groups'\?\)"),
    ({"groups": ["fsdp:d1"]}, r"groups is \[\'fsdp:d1\'\], not a list of lists of parts"),
    ({"groups": [["fsdp:d1"]]}, r"groups\[0\]\[0\] is 'fsdp:d1', not a mapping"),
    ({"groups": [[{"axes": {"d": 1}}]]}, r"groups\[0\]\[0\]\.backend is null, not the name of a backend"),
    (
        {"groups": [[{"backend": "fsdp:d1|hf", "axes": {"d": 1}}]]},
        r"\.backend is 'fsdp:d1\|hf', not the name of a backend",
    ),
    (
        {"groups": [[{"backend": "fsdp", "nam": "a", "axes": {}}]]},
        r"groups\[0\]\[0\] has no key 'nam' \(did you mean 'name'\?\)",
    ),
    ({"groups": [[{"backend": "fsdp", "name": "a]:d1", "axes": {}}]]}, r"\.name is 'a\]:d1', not a name"),
    ({"groups": [[{"backend": "fsdp", "axes": 3}]]}, r"\.axes is 3, not a mapping of axes to whole numbers"),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": True}}]]},
        r"\.axes is {'d': True}, not a mapping of axes to whole numbers",
    ),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": -1}}]]},
        r"\.axes is {'d': -1}, not a mapping of axes to whole numbers",
    ),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": 10**5000}}]]},
        r"\.axes is a dict, not a mapping of axes to whole numbers",
    ),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": 1}, "options": 5}]]},
        r"\.options is 5, not a mapping of names to values",
    ),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": 1}, "options": {"note": {1}.__iter__}}]]},
        r"\.options is {'note': <.*, not a mapping of",
    ),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": 1}, "options": {"note": 10**5000}}]]},
        r"\.options is a dict, not a mapping of names",
    ),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": 1}, "options": {"a&b": 1}}]]},
        r"\.options is {'a&b': 1}, not a mapping of names",
    ),
    ({"groups": [[{"backend": "fsdp", "axes": {"d": 0}}]]}, "axis 'd' has size 0"),
    ({"groups": [[{"backend": "fsdp"}]]}, "sizes are missing"),
    ({"groups": [[{"backend": "fsdp", "axes": None}]]}, "sizes are missing"),
    (
        {"groups": [[{"backend": "fsdp", "axes": {"d": 1}, "options": False}]]},
        r"\.options is False, not a mapping of names",
    ),
    ({"groups": []}, "the layout is empty"),
    ({"groups": [[], [{"backend": "fsdp", "axes": {"d": 1}}]]}, "a part is missing"),
]


@pytest.mark.parametrize(("mapping", "message"), BAD_MAPPINGS, ids=range(len(BAD_MAPPINGS)))
def test_bad_mapping_is_refused(parse, mapping, message):
    with pytest.raises(LayoutError, match=message):
        parse(mapping)


def test_key_that_stands_for_the_groups_is_one_fault(parse):
    with pytest.raises(LayoutError) as caught:
        parse({"group": [["fsdp:d1"]]})
    assert len(caught.value.problems) == 1


def test_bad_mapping_tells_all(parse):
    with pytest.raises(LayoutError) as caught:
        parse({"groups": [[{"backend": 1, "via": 2}, {"backend": "hf", "axes": []}, 3]], "x": 1})
    assert len(caught.value.problems) == 5


def test_parsing_imports_nothing_heavy():
    code = (
        "import sys, powertrain as p\n"
        "class Registry:\n"
        "    def backend(self, name): return p.BackendSpec(name=name, role='train', engine='x:y')\n"
        "p.parse_layout('b:d2', registry=Registry())\n"
        "print(sorted({'torch', 'numpy', 'rich', 'yaml', 'pluggy', 'powertrain.registry'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

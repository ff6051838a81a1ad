"""Every way in which a plugin can fail: one line, the right kind, the cause chained, the good plugin unaffected."""

import re
import sys
import warnings
from typing import NamedTuple

import pytest

import powertrain.registry
from powertrain import hookspecs
from powertrain.errors import ConfigError, MissingDependencyError, PluginError, UnknownPluginError, Violations
from powertrain.registry import KIND_OF_GROUP, PluginWarning, Registry

GOOD = """
from powertrain import BackendSpec, hookimpl

@hookimpl
def powertrain_backend({arguments}):
    {body}
"""
SPEC = 'BackendSpec(name="bad", role="train", engine="zz_bad.engine:Engine", {more})'


def hook(body="", arguments=""):
    return GOOD.format(body=body or f"return {SPEC.format(more='')}", arguments=arguments)


def returning(more):
    return hook("return " + SPEC.format(more=more))


class Case(NamedTuple):
    kind: str
    hooks: str
    cause: str
    chained: type[BaseException] | None = None
    value: str = ""


CASES = {
    "bug-at-import": Case(
        "broken-import", "1 / 0", "importing zz_bad.hooks raised ZeroDivisionError", ZeroDivisionError
    ),
    "import-error-without-name": Case(
        "broken-import", 'raise ImportError("no module named fancy_gpu_lib")', "fancy_gpu_lib", ImportError
    ),
    "exit-at-import": Case("broken-import", "raise SystemExit(3)", "raised SystemExit: 3", SystemExit),
    "syntax-error": Case("broken-import", "def (:", "SyntaxError", SyntaxError),
    "own-helper-missing": Case("broken-import", "import zz_bad.helper", "zz_bad.helper", ModuleNotFoundError),
    "missing-dependency": Case(
        "missing-dependency", "import fancy_gpu_lib", "needs 'fancy_gpu_lib', not installed here", ModuleNotFoundError
    ),
    "several-lines": Case("broken-import", 'raise ValueError("one\\n two")', "ValueError: one two", ValueError),
    "module-gone": Case("removed", "", "its own module zz_bad.gone is not there", ModuleNotFoundError, "zz_bad.gone"),
    "package-gone": Case("removed", "", "its own module zz_none.hooks is", ModuleNotFoundError, "zz_none.hooks"),
    "attribute-gone": Case("removed", "", "zz_bad.hooks has no 'plugin'", AttributeError, "zz_bad.hooks:plugin"),
    "class-not-module": Case("not-a-module", "class P: pass", "is a type; plugins are modules", None, "zz_bad.hooks:P"),
    "hook-typo": Case(
        "hook-typo", hook().replace("powertrain_backend(", "powertrain_backends("), "powertrain_backends", Exception
    ),
    "forgotten-marker": Case("no-hook", hook().replace("@hookimpl", ""), "`@powertrain.hookimpl` missing"),
    "other-project's-marker": Case(
        "no-hook",
        hook().replace(
            "from powertrain import BackendSpec, hookimpl",
            "from powertrain import BackendSpec\nimport pluggy\nhookimpl = pluggy.HookimplMarker('pytest')",
        ),
        "`@powertrain.hookimpl` missing",
    ),
    "hook-of-another-group": Case(
        "no-hook", hook().replace("powertrain_backend(", "powertrain_recipe("), "has no hook powertrain_backend"
    ),
    "unknown-argument": Case("bad-signature", hook(arguments="config"), "config", Exception),
    "raising-hook": Case("raising-hook", hook('raise RuntimeError("boom")'), "raised RuntimeError: boom", RuntimeError),
    "exiting-hook": Case("raising-hook", hook("raise SystemExit"), "raised SystemExit", SystemExit),
    "unknown-field": Case("raising-hook", returning("color=1"), "color", TypeError),
    "returns-a-dict": Case("wrong-return", hook('return {"name": "bad"}'), "returned a dict, not a BackendSpec"),
    "returns-nothing": Case("wrong-return", hook("return None"), "must return one spec named 'bad', it returned none"),
    "async-hook": Case(
        "wrong-return", hook().replace("def power", "async def power"), "returned a coroutine, not a BackendSpec"
    ),
    "another-name": Case(
        "wrong-return", hook().replace('name="bad"', 'name="worse"'), "one spec named 'bad', it returned 'worse'"
    ),
    "name-twice": Case(
        "wrong-return", hook(f"return [{SPEC.format(more='')}, {SPEC.format(more='')}]"), "it returned 'bad', 'bad'"
    ),
    "unknown-axis": Case("wrong-return", returning('axes=("z",)'), "names axis 'z'", ConfigError),
    "api-not-a-pair": Case("wrong-return", returning("api='1'"), "api is '1', not a pair of numbers"),
    "api-minor-too-new": Case(
        "api-too-new", returning("api=(1, 99)"), "API 1.99, which is too new for this powertrain's"
    ),
    "api-major-too-new": Case("api-too-new", returning("api=(2, 0)"), "API 2.0, which is too new"),
    "api-too-old": Case("api-too-old", returning("api=(0, 9)"), "API 0.9, which is too old for this powertrain's"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_failure_is_one_line_with_plugin_dist_version_and_cause(dists, case):
    dists.add("good")
    dists.add("bad", hooks=case.hooks, value=case.value or None, version="2.5")
    registry = Registry()

    with pytest.raises(PluginError) as caught:
        registry.backend("bad")

    error = caught.value
    assert error.kind == case.kind
    assert str(error).startswith("backend 'bad' of zz-bad 2.5 cannot be used: ")
    assert case.cause in str(error)
    assert "\n" not in str(error)
    assert (error.plugin, error.group, error.dist, error.version) == ("bad", "powertrain.backends", "zz-bad", "2.5")
    assert isinstance(error.__cause__, case.chained) if case.chained else error.__cause__ is None
    with pytest.raises(PluginError, match=f"^{re.escape(str(error))}$"):
        registry.backend("bad")
    assert registry.backend("good").name == "good"
    status = {info.name: (info.status, info.detail) for info in registry.list()}
    assert status["bad"] == ("failed", str(error))
    assert status["good"] == ("loaded", "")


def test_every_kind_has_a_meaning_and_a_case_here_or_below():
    elsewhere = {"unknown", "allow-list", "blocked", "duplicate", "not-ready", "unfinished", "crash", "deadline"}
    told = re.findall(r"^    ([a-z-]+): ", powertrain.registry.__doc__, re.MULTILINE)
    assert sorted({case.kind for case in CASES.values()} | elsewhere) == sorted(told)


def test_hook_of_every_group_is_named_after_its_kind():
    hooks = {name.removeprefix("powertrain_") for name in vars(hookspecs) if name.startswith("powertrain_")}
    assert dict(KIND_OF_GROUP) == {f"powertrain.{kind}s": kind for kind in hooks}


def test_half_registered_plugin_leaves_no_hook_behind(dists):  # B29
    other = "\n@hookimpl\ndef powertrain_launcher():\n    raise RuntimeError('not asked for')\n"
    site = dists.add("bad", hooks=hook('raise RuntimeError("half way")') + other)
    registry = Registry()
    with pytest.raises(PluginError, match="half way"):
        registry.backend("bad")
    assert registry.launcher("local").name == "local"
    (site / "zz_bad" / "hooks.py").write_text(hook())
    del sys.modules["zz_bad.hooks"]
    assert registry.backend("bad").name == "bad"


def test_failure_is_tried_again_so_that_a_repair_counts(dists):
    site = dists.add("mended", hooks="import fancy_gpu_lib")
    registry = Registry()
    with pytest.raises(MissingDependencyError):
        registry.backend("mended")
    (site / "fancy_gpu_lib.py").write_text("")
    dists.monkeypatch.syspath_prepend(site)
    (site / "zz_mended" / "hooks.py").write_text(hook().replace("bad", "mended"))
    assert registry.backend("mended").name == "mended"


def test_missing_dependency_says_which_extra_brings_it(dists):
    dists.add("needy", hooks="import fancy_gpu_lib", metadata="Provides-Extra: engine\n")
    with pytest.raises(
        MissingDependencyError, match=r"way out: pip install 'zz-needy\[engine\]', or .*'fancy_gpu_lib'$"
    ):
        Registry().backend("needy")


def test_unknown_name_lists_all_and_the_nearest(dists):  # B29
    dists.add("good")
    dists.add("bad", hooks="1 / 0")
    dists.add("half", hooks=hook('raise RuntimeError("x")'))
    with pytest.raises(UnknownPluginError) as caught:
        Registry(allow=("good", "bad", "half")).backend("godo")
    assert str(caught.value) == "no backend 'godo' is installed (did you mean 'good'?); there are: bad, good, half"
    assert caught.value.kind == "unknown"
    assert isinstance(caught.value, ConfigError)


def test_unknown_name_where_nothing_is_installed(dists):
    with pytest.raises(UnknownPluginError, match=r"^no recipe 'x' is installed; there are: none$"):
        Registry(allow=()).recipe("x")


def test_unknown_kind_points_at_the_nearest():
    with pytest.raises(ConfigError, match=r"no kind of plugin 'backends'.*did you mean 'backend'.*recipe"):
        Registry().get("backends", "fsdp")


def test_each_failed_plugin_warns_once_and_the_good_ones_come(dists):  # B29
    dists.add("good")
    dists.add("bad", hooks='raise ImportError("no module named fancy_gpu_lib")')
    dists.add("half", hooks=hook('raise RuntimeError("x")'))
    registry = Registry(allow=("good", "bad", "half"))
    with warnings.catch_warnings(record=True, action="always", category=PluginWarning) as caught:
        assert list(registry.specs("backend")) == ["good"]
        assert list(registry.specs("backend")) == ["good"]
    told = [str(warning.message) for warning in caught]
    assert [re.search("'(.*?)'", line)[1] for line in told] == ["bad", "half"]
    assert "fancy_gpu_lib" in told[0]


@pytest.mark.parametrize(
    ("engine", "files", "kind", "cause"),
    [
        ("zz_e.engine:Engine", {}, "removed", "its own module zz_e.engine is not there"),
        ("zz_e.engine:Engine", {"engine.py": ""}, "removed", "zz_e.engine has no 'Engine'"),
        ("zz_e.engine:Engine", {"engine.py": "1 / 0"}, "broken-import", "ZeroDivisionError"),
        ("zz_e.engine:Engine", {"engine.py": "import zz_e.part"}, "broken-import", "zz_e.part"),
        ("zz_e.engine:Engine", {"engine.py": "import fancy_gpu_lib.cuda"}, "missing-dependency", "pip install fancy"),
        ("zz_e.engine", {"engine.py": ""}, "wrong-return", "not of the form 'module:Attribute'"),
    ],
)
def test_engine_that_cannot_be_loaded_tells_plugin_from_dependency(dists, engine, files, kind, cause):
    more = 'requires=("fancy_gpu_lib", "zz_other_lib", "sys"), install="pip install fancy"'
    hooks = returning(more).replace("zz_bad.engine:Engine", engine).replace('"bad"', '"e"')
    dists.add("e", hooks=hooks, files=files)
    registry = Registry()
    spec = registry.backend("e")
    with pytest.raises(PluginError) as caught:
        registry.load_class(spec)
    assert caught.value.kind == kind
    assert cause in str(caught.value)
    assert str(caught.value).startswith("backend 'e' of zz-e 1.0 cannot be used: ")
    assert isinstance(caught.value, MissingDependencyError) is (kind == "missing-dependency")
    if kind == "missing-dependency":
        assert "'fancy_gpu_lib', 'zz_other_lib', not installed" in str(caught.value)


def test_engine_class_is_imported_when_asked_for_and_not_before(dists):
    dists.add("e", files={"engine.py": "class Engine: pass"})
    registry = Registry()
    spec = registry.backend("e")
    assert "zz_e.engine" not in sys.modules
    assert registry.load_class(spec) is sys.modules["zz_e.engine"].Engine


def test_class_of_unknown_field_is_refused(dists):
    dists.add("e")
    registry = Registry()
    with pytest.raises(ConfigError, match=r"a backend has no class 'engin'.*did you mean 'engine'"):
        registry.load_class(registry.backend("e"), "engin")


def test_everything_that_is_missing_is_told_at_once(dists):
    dists.add("one", more='requires=("fancy_gpu_lib",), install="pip install fancy"')
    dists.add("two", more='requires=("sys", "zz_other_lib")')
    dists.add("whole", more='requires=("sys",)')
    dists.add("plan", more='requires=("zz_x",), status="planned"')
    registry = Registry()
    specs = [registry.backend(name) for name in ("one", "two", "whole", "plan", "one")]
    with pytest.raises(Violations) as caught:
        registry.require(*specs)
    one, two = caught.value.problems
    cause = "cannot be used: it needs fancy_gpu_lib, not installed here; pip install fancy"
    assert one == f"backend 'one' of zz-one 1.0 {cause}"
    assert two.endswith(
        "zz-two 1.0 cannot be used: it needs zz_other_lib, not installed here; install what provides it"
    )
    registry.require(registry.backend("whole"))

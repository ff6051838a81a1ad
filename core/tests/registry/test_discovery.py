"""What the metadata tells: duplicates, copies of one dist, the allow-list; never an import."""

import pickle
import shutil
import subprocess
import sys
import threading

import pytest

from powertrain.errors import PluginError, UnknownPluginError
from powertrain.registry import PluginWarning, Registry, discovery, scan


def mine(registry, kind=None):
    return [info for info in registry.list(kind) if info.dist.startswith("zz")]


def test_listing_tells_all_and_imports_nothing(dists):
    site = dists.add("bb", hooks="1 / 0")
    dists.add("aa", group="powertrain.recipes", hooks="1 / 0", version="3.1")
    aa, bb = mine(Registry())
    assert (aa.name, aa.kind, aa.dist, aa.version, aa.module, aa.status) == (
        "aa",
        "recipe",
        "zz-aa",
        "3.1",
        "zz_aa.hooks",
        "found",
    )
    assert (bb.name, bb.path) == ("bb", str(site))
    assert not {"zz_aa", "zz_bb"} & set(sys.modules)


def test_getting_one_imports_only_that_one(dists):
    dists.add("one")
    dists.add("two", hooks="1 / 0")
    assert Registry().get("powertrain.backends", "one").name == "one"
    assert "zz_two" not in sys.modules


def test_listing_one_kind_leaves_the_others_out(dists):
    dists.add("one")
    dists.add("two", group="powertrain.recipes")
    registry = Registry()
    assert [info.name for info in mine(registry, "recipe")] == ["two"]
    assert [info.name for info in mine(registry, "powertrain.backends")] == ["one"]


def test_two_dists_with_one_name_are_told_on_selection(dists):
    dists.add("dup", dist="zz-first", folder="a")
    dists.add("dup", dist="zz-second", folder="b", version="2.0")
    dists.add("good")
    registry = Registry()
    assert [info.status for info in mine(registry)] == ["duplicate", "duplicate", "found"]
    with pytest.raises(PluginError) as caught:
        registry.backend("dup")
    assert caught.value.kind == "duplicate"
    assert "zz-first 1.0" in str(caught.value)
    assert "zz-second 2.0" in str(caught.value)
    assert "zz_dup" not in sys.modules
    assert registry.backend("good").name == "good"


def test_one_dist_naming_a_plugin_twice_is_a_duplicate(dists):
    site = dists.add("dup")
    with (site / "zz_dup-1.0.dist-info" / "entry_points.txt").open("a") as stream:
        stream.write("dup = zz_dup.other\n")
    with pytest.raises(PluginError, match=r"zz_dup\.hooks.* and .*zz_dup\.other"):
        Registry().backend("dup")


def test_one_name_in_two_groups_is_no_duplicate(dists):
    dists.add("same", dist="zz-first", folder="a")
    dists.add("same", dist="zz-second", folder="b", group="powertrain.recipes")
    assert [info.status for info in mine(Registry())] == ["found", "found"]


def test_allow_list_of_a_dist_settles_a_clash(dists):
    dists.add("dup", dist="zz-second", folder="b", hooks="1 / 0")
    dists.add("dup", dist="zz-first", folder="a")
    registry = Registry(allow=("zz_First",))
    assert registry.backend("dup").name == "dup"
    assert [(info.dist, info.status) for info in mine(registry)] == [("zz-first", "loaded"), ("zz-second", "blocked")]


def same_path_twice(dists, site):
    dists.monkeypatch.syspath_prepend(site)


def other_spelling(dists, site):
    dists.monkeypatch.syspath_prepend(f"{site.parent}/./{site.name}/")


def symbolic_link(dists, site):
    (site.parent / "link").symlink_to(site)
    dists.monkeypatch.syspath_prepend(site.parent / "link")


def stale_egg_info(dists, site):
    entries = {"powertrain.backends": {"one": "zz_one.old_hooks", "removed": "zz_one.removed"}}
    dists.metadata(site, "zz.one", "0.9", entries, "egg-info")


def stale_older_dist_info(dists, site):
    entries = {"powertrain.backends": {"one": "zz_one.old_hooks", "removed": "zz_one.removed"}}
    dists.metadata(site, "ZZ_One", "0.10", entries)


def editable_over_wheel(dists, site):
    copy = site.parent / "wheel"
    shutil.copytree(site, copy)
    dists.monkeypatch.setattr(sys, "path", [*sys.path, str(copy)])


@pytest.mark.parametrize(
    "again",
    [same_path_twice, other_spelling, symbolic_link, stale_egg_info, stale_older_dist_info, editable_over_wheel],
)
def test_one_dist_seen_twice_is_one(dists, again):
    site = dists.add("one")
    again(dists, site)
    registry = Registry()
    assert [(info.name, info.version, info.status) for info in mine(registry)] == [("one", "1.0", "found")]
    assert registry.backend("one").name == "one"


def test_old_copy_in_front_is_told_when_it_hides_a_plugin(dists):
    dists.add("new", dist="zz-dist", version="2.0")
    old = dists.add("old", dist="zz-dist", version="1.0")
    registry = Registry()
    assert {info.name: info.status for info in mine(registry)} == {"new": "hidden", "old": "found"}
    with pytest.raises(UnknownPluginError, match=f"backend 'new' of zz-dist 2.0 is hidden: zz-dist 1.0 at {old} comes"):
        registry.backend("new")


def test_old_copy_without_any_plugin_hides_as_well(dists):
    dists.add("new", dist="zz-dist", version="2.0")
    dists.add("x", dist="zz-dist", version="1.0", entries={"console_scripts": {"x": "zz_x:main"}})
    assert [(info.name, info.status) for info in mine(Registry())] == [("new", "hidden")]


def test_blocked_plugin_is_not_imported_and_says_so(dists):
    dists.add("one")
    dists.add("two", hooks="1 / 0")
    dists.monkeypatch.setenv("POWERTRAIN_PLUGINS", " one ,")
    registry = Registry()
    assert [info.status for info in mine(registry)] == ["found", "blocked"]
    with pytest.raises(PluginError, match="POWERTRAIN_PLUGINS=one names neither it nor its dist") as caught:
        registry.backend("two")
    assert caught.value.kind == "blocked"
    assert "zz_two" not in sys.modules
    assert "two" not in registry.names("backend")


def test_empty_allow_list_leaves_core_alone(dists):
    dists.add("one")
    dists.monkeypatch.setenv("POWERTRAIN_PLUGINS", "")
    assert {info.dist for info in Registry().list() if info.status == "found"} == {"powertrain"}


def test_allow_list_word_that_is_nothing_is_an_error(dists):
    dists.add("one")
    dists.monkeypatch.setenv("POWERTRAIN_PLUGINS", "one,zz-oen")
    with pytest.raises(
        UnknownPluginError, match=r"POWERTRAIN_PLUGINS names 'zz-oen' \(did you mean 'zz-one'\?\)"
    ) as caught:
        Registry().list()
    assert caught.value.kind == "allow-list"


def test_unreadable_dist_warns_and_is_looked_at_again(dists):
    dists.add("good")
    broken = dists.add("broken")
    entries = broken / "zz_broken-1.0.dist-info" / "entry_points.txt"
    right = entries.read_text()
    entries.write_text("[powertrain.backends]\nno equals sign\n")
    with pytest.warns(PluginWarning, match=f"cannot be read: {broken}") as caught:
        assert [info.name for info in mine(Registry())] == ["good"]
    assert len(caught) == 1
    entries.write_text(right)
    assert [info.name for info in mine(Registry())] == ["broken", "good"]


@pytest.mark.parametrize("text", [None, "Metadata-Version: 2.1\n", "Name: zz-broken\n"])
def test_dist_without_name_or_version_spoils_nothing(dists, text):
    dists.add("good")
    file = dists.add("broken") / "zz_broken-1.0.dist-info" / "METADATA"
    file.unlink() if text is None else file.write_text(text)
    with pytest.warns(PluginWarning, match="metadata cannot be read"):
        assert [info.name for info in mine(Registry())] == ["good"]


def test_folder_that_is_not_called_after_its_project_counts(dists):
    site = dists.add("good")
    (site / "zz_good-1.0.dist-info").rename(site / "unlike-1.0.dist-info")
    assert Registry().backend("good").name == "good"


def test_other_projects_broken_metadata_is_none_of_ours(dists):
    dists.add("good")
    site = dists.add("other", entries={"console_scripts": {"x": "y"}})
    (site / "zz_other-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    assert [info.name for info in mine(Registry())] == ["good"]


def test_scan_is_done_once_for_a_path(dists):
    dists.add("one")
    first = scan()
    dists.monkeypatch.setattr(discovery.metadata, "distributions", lambda: pytest.fail("scanned again"))
    assert scan() is first


def test_failed_scan_is_not_kept(dists):
    dists.add("one")

    def denied():
        raise PermissionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery.metadata, "distributions", denied)
        with pytest.raises(PermissionError):
            scan()
    assert [info.name for info in mine(Registry())] == ["one"]


def test_refreshed_scan_sees_what_was_installed_meanwhile(dists):
    site = dists.add("one")
    assert [info.name for info in mine(Registry())] == ["one"]
    dists.metadata(site, "zz-late", "1.0", {"powertrain.backends": {"late": "zz_one.hooks"}})
    scan(refresh=True)
    assert [info.name for info in mine(Registry())] == ["late", "one"]


def test_one_module_may_serve_several_entry_points(dists):
    hooks = """
from powertrain import BackendSpec, hookimpl
@hookimpl
def powertrain_backend():
    return [BackendSpec(name=name, role="infer", engine="m:C") for name in ("left", "right")]
"""
    both = {"left": "zz_pair.hooks", "right": "zz_pair.hooks"}
    dists.add("pair", hooks=hooks, entries={"powertrain.backends": both})
    registry = Registry(allow=("zz-pair",))
    assert list(registry.specs("backend")) == ["left", "right"]
    assert registry.backend("left") is registry.backend("left")


def test_registries_do_not_share_state(dists):
    dists.add("one")
    first, second = Registry(), Registry()
    first.backend("one")
    assert [info.status for info in mine(first)] == ["loaded"]
    assert [info.status for info in mine(second)] == ["found"]


def test_many_threads_get_one_spec(dists):
    dists.add("one")
    registry, specs = Registry(), []
    threads = [threading.Thread(target=lambda: specs.append(registry.backend("one"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(specs) == 8
    assert len({id(spec) for spec in specs}) == 1


@pytest.mark.parametrize("allow", [None, (), ("one",)])
def test_pickled_registry_keeps_its_limits(dists, allow):
    dists.add("one")
    registry = Registry(allow=allow)
    dists.monkeypatch.setenv("POWERTRAIN_PLUGINS", "nonsense")
    assert repr(pickle.loads(pickle.dumps(registry))) == repr(registry)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded-before", "not-loaded-before"])
def test_child_process_gets_the_same_spec(dists, method, loaded):
    site = dists.add("one")
    script = site / "zz_script.py"
    script.write_text(f"""
import multiprocessing, threading
from powertrain.registry import Registry

def child(registry, queue):
    queue.put((registry.backend("one").name, registry.backend("one") == Registry().backend("one")))

def hold(registry, held, free):
    with registry._locked():
        held.set()
        free.wait(60)

if __name__ == "__main__":
    registry = Registry()
    if {loaded}:
        registry.backend("one")
    held, free = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold, args=(registry, held, free))
    holder.start()  # another thread is inside the registry at the time of the fork
    held.wait(60)
    context = multiprocessing.get_context({method!r})
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(registry, queue))
    process.start()
    process.join(60)
    process.kill()
    free.set()
    holder.join()
    print(None if queue.empty() else queue.get(), process.exitcode, registry.backend("one").name)
""")
    env = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, env=env)
    assert done.stdout.strip() == "('one', True) 0 one", done.stderr

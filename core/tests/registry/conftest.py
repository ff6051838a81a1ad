"""Throw-away dists: a folder with modules and a dist-info, put on `sys.path`, so that real metadata is read."""

import sys
from pathlib import Path

import pytest

HOOKS = """
from powertrain import BackendSpec, hookimpl

@hookimpl
def powertrain_backend():
    return BackendSpec(name={name!r}, role="train", engine="{package}.engine:Engine", {more})
"""


class Dists:
    """Makes dists below `root`; each call of `add` is one installed dist in a folder of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch

    def add(
        self,
        name,
        *,
        hooks=None,
        dist=None,
        version="1.0",
        group="powertrain.backends",
        value=None,
        folder=None,
        entries=None,
        info="dist-info",
        front=True,
        more="",
        files=(),
        metadata="",
    ):
        dist = dist or f"zz-{name}"
        package = f"zz_{name}"
        site = self.root / (folder or f"{dist}-{version}")
        (site / package).mkdir(parents=True, exist_ok=True)
        (site / package / "__init__.py").touch()
        text = HOOKS.format(name=name, package=package, more=more) if hooks is None else hooks
        (site / package / "hooks.py").write_text(text)
        for file, content in dict(files).items():
            (site / package / file).write_text(content)
        self.metadata(site, dist, version, entries or {group: {name: value or f"{package}.hooks"}}, info, metadata)
        if front:
            self.monkeypatch.syspath_prepend(site)
        return site

    @staticmethod
    def metadata(site, dist, version, entries, info="dist-info", more=""):
        folder = site / (f"{dist.replace('-', '_')}-{version}.dist-info" if info == "dist-info" else f"{dist}.egg-info")
        folder.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n{more}"
        (folder / ("METADATA" if info == "dist-info" else "PKG-INFO")).write_text(head)
        lines = []
        for group, values in entries.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in values.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def dists(tmp_path, monkeypatch):
    monkeypatch.delenv("POWERTRAIN_PLUGINS", raising=False)
    before = set(sys.modules)
    yield Dists(tmp_path, monkeypatch)
    for name in set(sys.modules) - before:
        if name.startswith("zz_"):
            del sys.modules[name]

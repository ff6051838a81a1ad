"""The folder of one pair of the transfer `disk`: versions come by rename, old ones go, and the dead leave nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from powertrain.errors import TransferError

PREFIX: Final = "powertrain-weights-"
MANIFEST: Final = "manifest.json"
_PARTIAL: Final = "partial-"
_VERSION: Final = "version-"
_OWNER: Final = "owner"
_BASE: Final = "base"
"""File of a version that tells changes alone: the version that they are changes of."""


def write_all(file: Any, data: bytes | memoryview) -> None:
    """Write all of it to an unbuffered file, which may take less at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def sync_folder(path: Path) -> None:
    """Return once names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Folder:
    """One pair's folder, held by the trainer's rank 0, which has a file in it locked for as long as it lives."""

    def __init__(self, path: Path, lock: int, keep: int, *, leave: bool) -> None:
        self._path, self._lock, self._keep, self._leave = path, lock, keep, leave

    @classmethod
    def make(cls, session: str, folder: str | None, keep: int) -> Self:
        """Make it in `folder`, by default the temporary one, and remove those whose owner is gone."""
        parent = Path(folder) if folder else Path(tempfile.gettempdir())
        path = parent / f"{PREFIX}{session}"
        hidden = parent / f".{path.name}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent)
            hidden.mkdir(mode=0o700)
            lock = os.open(hidden / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(path)  # only now may a sweep see it
        except OSError as exc:
            message = f"trainer rank 0 cannot make a folder for weights in {parent}: {exc.strerror or exc}"
            raise TransferError(message, phase="gather") from exc
        return cls(path, lock, keep, leave=folder is not None)

    def begin(self, version: str, base: str = "") -> Path:
        """Return an empty folder for a version that is about to be written; all but the last `keep` others go.

        What a version builds on stays with it: one that is kept, and the one to come, which may build on `base`.
        """
        self.discard()
        self._prune(self._keep, base)
        partial = self._path / f"{_PARTIAL}{version}"
        try:
            partial.mkdir(mode=0o700)
        except OSError as exc:
            message = f"trainer rank 0 cannot make {partial}: {exc.strerror or exc}"
            raise TransferError(message, phase="gather") from exc
        return partial

    def builds_on(self, version: str, base: str) -> None:
        """Note that a version, not yet named, is changes of another."""
        (self._path / f"{_PARTIAL}{version}" / _BASE).write_text(base)

    def seal(self, version: str, manifest: bytes) -> Path:
        """Write the manifest, then give the version its name; returns its folder.

        A version written before under that name goes, with those that build on it.
        """
        partial, final = self._path / f"{_PARTIAL}{version}", self._path / f"{_VERSION}{version}"
        with (partial / MANIFEST).open("xb", buffering=0) as file:
            write_all(file, manifest)
            os.fsync(file.fileno())
        sync_folder(partial)
        for path in [path for path in self._path.glob(f"{_VERSION}*") if final in chain(path)]:
            shutil.rmtree(path)
        partial.rename(final)
        sync_folder(self._path)
        return final

    def discard(self) -> None:
        """Remove what is not finished."""
        for path in self._path.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Leave the last `keep` versions where a folder was asked for, else nothing; may be called twice."""
        if self._lock < 0:
            return
        self.discard()
        if self._leave and self._keep:
            self._prune(self._keep)
        else:
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _prune(self, keep: int, base: str = "") -> None:
        found = sorted(self._path.glob(f"{_VERSION}*"), key=lambda path: path.stat().st_mtime_ns)
        last = found[max(0, len(found) - keep) :] + ([self._path / f"{_VERSION}{base}"] if base else [])
        needed = {path for one in last for path in chain(one)}
        for path in found:
            if path not in needed:
                shutil.rmtree(path, ignore_errors=True)


def chain(path: Path) -> list[Path]:
    """Return a version's folder and those that it builds on, down to one that holds all values."""
    found = [path]
    while (file := found[-1] / _BASE).is_file():
        found.append(path.with_name(f"{_VERSION}{file.read_text()}"))
    return found


def sweep(parent: Path) -> None:
    """Remove the folders of pairs that are gone: nobody holds their lock."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / _OWNER, os.O_RDWR)
        except OSError:  # another user's, or removed by somebody else meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(lock)

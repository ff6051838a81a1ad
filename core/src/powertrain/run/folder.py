"""One run's folder: configuration, metrics, logs, weight versions and checkpoints, held by one driver at a time.

runs/sums-20260131-120000/
    config.yaml  metrics.jsonl  versions  lock  logs/
    checkpoints/step-000010/   complete ones only; each appears by a rename
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, Self

from powertrain.errors import CheckpointError, ConfigError, PowertrainError, WorkerError
from powertrain.run.metrics import append_metrics, cut_metrics, unused

_STEP: Final = re.compile(r"step-(\d{6,})")
_CAUSES: Final = {
    errno.ENOSPC: "the disk is full; make room, or choose another folder with runs=FOLDER",
    errno.EDQUOT: "the disk quota is used up; make room, or choose another folder with runs=FOLDER",
    errno.EFBIG: "a file would be larger than this user may write (ulimit -f); raise the limit",
    errno.EROFS: "the file system is read-only; choose another folder with runs=FOLDER",
    errno.EACCES: "this user may not write there; choose another folder with runs=FOLDER",
    errno.EPERM: "this user may not write there; choose another folder with runs=FOLDER",
}


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of the file system into ours, with the cause in words and the way out."""
    try:
        yield
    except (WorkerError, CheckpointError) as exc:  # a library in an engine may have wrapped what the system said
        for code in map(int, re.findall(r"(?:\[Errno|os error) (\d+)[\])]", str(exc))):
            if code in _CAUSES:
                message = f"{what} failed: {_CAUSES[code]}"
                raise CheckpointError(message) from exc
        raise
    except (PowertrainError, FileExistsError):  # a DeadlineError is an OSError too and says more than we could
        raise
    except OSError as exc:
        message = f"{what} failed: {_CAUSES.get(exc.errno or 0, exc)}"
        raise CheckpointError(message) from exc


class RunFolder:
    """A run's folder, locked until `close`. Made by `create`, `make` or `open`; a context manager for the driver.

    config_file: the resolved configuration, which `powertrain run` takes as it is. metrics_file: one line of JSON for
    each step. versions_file: the reserved weight versions, see `powertrain.weights.version.VersionCounter`.
    checkpoints: where complete ones lie. logs: of the workers. begun: this process has written the configuration, so
    nothing was left to refuse.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.versions_file = path / "versions"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.begun = False
        self._lock = self._locked()

    @classmethod
    def create(cls, runs: str | Path, name: str) -> RunFolder:
        """Make `<runs>/<name>-<date>-<time>` (with `-2`, `-3` ... where that is taken) and lock it."""
        stem = cls.place(runs, name) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in itertools.count(1):
            with suppress(FileExistsError):
                return cls.make(f"{stem}-{number}" if number > 1 else stem)
        raise AssertionError(runs)

    @staticmethod
    def place(runs: str | Path, name: str = "run") -> Path:
        """Return `runs` as a whole path, made or not; ConfigError when no folder called `name` can be made there."""
        if not name or "/" in name or name.startswith("."):
            message = f"a run cannot be named {name!r}; it is one folder's name"
            raise ConfigError(message)
        folder = Path(runs).absolute()
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not there.is_dir():
            message = f"runs: {str(there)!r} is a file or a link to nothing, not a folder; no run can be kept in it"
            raise ConfigError(message)
        return folder

    @classmethod
    def make(cls, place: str | Path) -> RunFolder:
        """Make and lock the folder `place`; FileExistsError when it is there already, ConfigError as for `place`."""
        folder = Path(place).absolute()
        cls.place(folder.parent)
        with explained(f"making the run folder {str(folder)!r}"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            for path in (folder, folder / "logs", folder / "checkpoints"):
                path.mkdir()
        return cls(folder)

    @classmethod
    def check(cls, path: str | Path) -> Path:
        """Return the folder of an earlier run, unlocked; ConfigError when it is none."""
        folder = Path(path).absolute()
        if not (folder / "config.yaml").is_file():
            message = f"{str(path)!r} is not a run folder: there is no config.yaml in it"
            raise ConfigError(message)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Lock a folder that an earlier run made, and clear what that run left half-written."""
        run = cls(cls.check(path))
        with explained(f"clearing {str(path)!r}"):
            run.logs.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
            for left in run.checkpoints.glob(".*"):
                shutil.rmtree(left)
        return run

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Append one step's line to the metrics."""
        with explained(f"writing {self.metrics_file}"):
            append_metrics(self.metrics_file, step, values)

    def write(self, name: str, text: str) -> Path:
        """Write a small text file into the folder, complete or not at all, and return its path."""
        path = self.path / name
        part = path.with_name(path.name + ".part")
        with explained(f"writing {path}"):
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        return path

    def write_config(self, text: str) -> None:
        """Write config.yaml; another one from before stays beside it as `config.N.yaml`."""
        old = self.config_file.read_text(encoding="utf-8") if self.config_file.is_file() else text
        if old != text:
            self.write(unused(self.config_file, "config.{}.yaml").name, old)
        self.write("config.yaml", text)
        self.begun = True

    @contextmanager
    def checkpoint(self, step: int, *, keep_last: int) -> Iterator[Path]:
        """Give an empty folder to fill; at the end of the block it becomes `checkpoints/step-NNNNNN` by a rename.

        A block that raises leaves no trace. Of the complete checkpoints the newest `keep_last` stay.
        """
        with self.publishing(self.checkpoints / f"step-{step:06d}") as part:
            yield part
        with explained(f"removing old checkpoints of {self.path}"):
            for _, old in self.complete()[:-keep_last]:
                self._drop(old)

    @contextmanager
    def publishing(self, final: Path) -> Iterator[Path]:
        """Give an empty folder to fill; at the end of the block it becomes `final` by a rename, replacing it."""
        part = final.with_name(f".{final.name}.part")
        with explained(f"writing {final}"):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                yield part
                _sync([*part.rglob("*"), part])
                if final.exists():
                    self._drop(final)
                part.rename(final)
                _sync([final.parent])
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise

    def complete(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of every complete checkpoint, oldest first."""
        found = ((_STEP.fullmatch(path.name), path) for path in self.checkpoints.iterdir() if path.is_dir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def latest(self) -> tuple[int, Path] | None:
        """Return (step, folder) of the newest complete checkpoint, or None."""
        return max(self.complete(), default=None)

    def rewind(self, step: int) -> None:
        """Take back the metrics after `step`, since those steps are taken again."""
        with explained(f"cutting {self.metrics_file}"):
            cut_metrics(self.metrics_file, step)

    def close(self) -> None:
        """Give the folder free; may be called twice."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drop(self, path: Path) -> None:
        """Delete a checkpoint so that it never stands there half-deleted under its own name."""
        trash = path.with_name(f".{path.name}.trash")
        path.rename(trash)
        shutil.rmtree(trash)

    def _locked(self) -> IO[str]:
        """Take the folder's lock, which ends with this process; ConfigError naming who holds it."""
        import fcntl

        with explained(f"locking {str(self.path)!r}"):
            stream = (self.path / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            stream.seek(0)
            holder = stream.read().strip() or "unknown"
            stream.close()
            message = f"another driver (process {holder}) works in {str(self.path)!r}; wait for it or end it"
            raise ConfigError(message) from exc
        with explained(f"locking {str(self.path)!r}"):
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            stream.flush()
        return stream


def _sync(paths: Iterable[Path]) -> None:
    """Bring files and folders to the disk, so that a rename never outruns the contents."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

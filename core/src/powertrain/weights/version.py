"""Weight versions: which weights an engine carries, never used twice, also not after a resume."""

from __future__ import annotations

import os
from pathlib import Path

from powertrain.errors import CheckpointError, ConfigError
from powertrain.interfaces.wire import record


@record(kw_only=False, order=True)
class WeightVersion:
    """The run's incarnation (how often it was started) and a counter that rises through the whole run.

    Its text form `2.17` stands in segments, metrics and adapter names.
    """

    incarnation: int
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.counter}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Read the text form; ConfigError when it is not one."""
        first, dot, second = text.partition(".")
        if not dot or not first.isdigit() or not second.isdigit():
            message = f"{text!r} is not a weight version; one looks like 2.17"
            raise ConfigError(message)
        return cls(int(first), int(second))

    def adapter_name(self, base: str) -> str:
        """Return the versioned name under which this version's adapter is registered (`policy-v2.17`)."""
        return f"{base}-v{self}"


class VersionCounter:
    """Hands out versions. Numbers are reserved in the file before use, so a killed run never repeats one.

    Opening the file begins a new incarnation. Used by the driver alone.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._file = Path(file)
        text = self._file.read_text().strip() if self._file.exists() else "0.0"
        try:
            last = WeightVersion.parse(text)
        except ConfigError as exc:
            way_out = "write the highest one of metrics.jsonl into it"
            message = f"{self._file} holds {text!r} in place of a weight version such as 2.17; {way_out}"
            raise CheckpointError(message) from exc
        self._last = self._reserved(WeightVersion(last.incarnation + 1, last.counter))

    def next(self) -> WeightVersion:
        """Reserve and return a version that was never handed out before."""
        self._last = self._reserved(WeightVersion(self._last.incarnation, self._last.counter + 1))
        return self._last

    def _reserved(self, version: WeightVersion) -> WeightVersion:
        part = self._file.with_name(self._file.name + ".part")
        with part.open("w") as stream:
            stream.write(f"{version}\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(self._file)
        return version

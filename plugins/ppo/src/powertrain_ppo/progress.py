"""Live progress: a table in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

COLUMNS: Final = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("loss", "loss", "{:+.4f}"),
    ("tok/s", "time/tokens_per_s", "{:.0f}"),
    ("version", "weight_version", "{}"),
    ("|Δlogp|", "mismatch/mean", "{:.1e}"),
    ("gen", "time/generate", "{:.1f}s"),
    ("train", "time/train", "{:.1f}s"),
    ("sync", "time/sync", "{:.2f}s"),
)
"""Title, metric and format of each column."""


class Progress:
    """Shows each step's metrics as they come. A context manager; used by the recipe alone."""

    def __init__(self, steps: int, *, rows: int = 12) -> None:
        from rich.console import Console

        self.steps = steps
        self.console = Console(highlight=False)
        self._rows: deque[list[str]] = deque(maxlen=rows)
        self._live: Any = None
        self._doing = ""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            from rich.live import Live

            self._live = Live(self._table(), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.doing("")
        if self._live is not None:
            self._live.stop()
            self._live = None

    def doing(self, what: str) -> None:
        """Say what is under way; shown in a terminal only."""
        self._doing = what
        self._refresh()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one step's metrics; what a step does not have stays blank."""
        cells = [form.format(metrics[key]) if metrics.get(key) is not None else "" for _, key, form in COLUMNS]
        self._rows.append([f"{step}/{self.steps}", *cells])
        if self._live is None:
            shown = (f"{title} {cell}" for (title, _, _), cell in zip(COLUMNS, cells, strict=True) if cell)
            self.console.print(f"step {step}/{self.steps}  " + "  ".join(shown), soft_wrap=True, markup=False)
        self._refresh()

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self.console.print(text, soft_wrap=True, markup=False)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, caption=self._doing, caption_justify="left")
        for title in ("step", *(title for title, _, _ in COLUMNS)):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table

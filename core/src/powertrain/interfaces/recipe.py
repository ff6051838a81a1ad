"""The recipe's interface: a program that uses engines, run by the driver process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.run.context import RunContext


class Recipe(ABC):
    """One program over engines. Constructed with its resolved options; `run` is awaited once in the driver.

    synchronous: no request is ever in flight while a trainer steps; read after `check`. Transfers that have an
    option of this name get it, and may then let both engines use the same memory.
    """

    synchronous: bool = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    @abstractmethod
    def check(self, context: RunContext) -> None:
        """Refuse before anything starts what cannot work: wrong roles in the layout, missing data, a missing reward."""

    @abstractmethod
    async def run(self, context: RunContext) -> None:
        """Run to the end, or on from the last checkpoint when the run folder has one."""

"""What engine and vLLM say to each other: rows that are being answered, and the calls that a form of vLLM serves.

`VllmEngine` turns requests into rows (one for each sample), holds what arrives while it is paused, cuts segments and
puts completions together. A form (`InProcess`) runs rows on vLLM and says which tokens it drew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.weights import WeightSink
    from powertrain_vllm.ranks import Alone

Drawn = tuple[int, float, float]
"""A token, its log-prob under the distribution it was drawn from, and under temperature 1 with nothing cut off."""


@dataclass(frozen=True, slots=True)
class Call:
    """One row as it goes to vLLM.

    name: unique among all calls ever made, begins with `PREFIX`. tokens: the prompt, and what of the completion is
    there already. most: tokens still to draw. key: of the row's draws; with a token's position in the sequence it fixes
    the draw (`powertrain.tensors.sampling`). adapter: the adapter's name and its number in vLLM.
    """

    name: str
    tokens: Sequence[int]
    most: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[int, ...]
    key: int
    adapter: str | None = None


PREFIX = "powertrain-"
"""By this the sampler in vLLM's workers knows rows of ours (`powertrain_vllm.sampler`)."""

HOTTEST = 2.0
"""vLLM takes no temperature above it; the sampler, which does, reads it in the name that a call has there."""


def name_there(call: Call) -> str:
    """Return a call's name in vLLM, with what the sampler needs: its key and temperature; `name_here` undoes it.

    A seed would do for the key, but with one vLLM on a CPU breaks off where a prompt is cut in two.
    """
    return f"{call.name}~{call.key % 2**63}~{call.temperature!r}~"


def name_here(name: str) -> str:
    """Return the name of the call that has this one in vLLM."""
    return name.partition("~")[0]


def drawn_by(name: str) -> tuple[int, float] | None:
    """Return key and temperature of a row of ours, by its name in vLLM, which puts its own things around it."""
    parts = name.split("~")
    return (int(parts[1]), float(parts[2])) if PREFIX in name and len(parts) >= 4 else None


def other(token: Any, vocabulary: int) -> Any:
    """Return the id under which the second log-prob of a token (a number or a tensor of them) stands."""
    return (token + 1) % vocabulary


Heard = Callable[[str, Sequence[Drawn], "str | Exception | None"], None]
"""Called with a call's name, the tokens drawn since, and how it ended ("stop", "length"), what broke it, or None."""


class Form(Protocol):
    """One running vLLM. Coroutines run on the engine's event loop; `heard` may be called from any thread.

    max_model_len: most tokens of a sequence. vocabulary: number of token ids that the model knows. ranks: this rank
    among those of its engine, once it has started. gone: called with an adapter that rank 0 has dropped; set before
    `start`.
    """

    max_model_len: int
    vocabulary: int
    ranks: Alone
    gone: Callable[[str], None]

    async def start(self, spec: EngineSpec, options: Mapping[str, Any], heard: Heard) -> None:
        """Start vLLM, weights loaded; bounded by the start-up deadline. options: those that go to vLLM are given."""

    def submit(self, calls: Sequence[Call]) -> None:
        """Hand over calls together; each ends with exactly one ending in `heard`, unless `drop` was called for it."""

    async def drop(self, names: Sequence[str]) -> None:
        """End calls; when it returns none of them is running in vLLM, and `heard` will not be called for them."""

    def sink(self) -> WeightSink:
        """Return the place where new weights go, the same each time."""

    def load(self, name: str, folder: str) -> None:
        """Load a PEFT adapter of a folder that stays as it is until `unload`; from any thread but the loop's."""

    def unload(self, name: str) -> None:
        """Forget an adapter that no call uses; one that is not there is passed over."""

    async def sleep(self) -> None:
        """Give the device's memory back; nothing is running."""

    async def wake(self) -> None:
        """Take it again, with the weights as they were."""

    async def close(self) -> None:
        """End vLLM, all its processes included; may be called at any time, more than once."""

    def health(self) -> Mapping[str, Any]:
        """Return plain facts; from any thread, does not block."""

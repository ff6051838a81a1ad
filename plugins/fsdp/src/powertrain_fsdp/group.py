"""The engine's process group: joining it, agreeing on errors, and gathering small facts."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from powertrain.errors import ConfigError, PowertrainError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from powertrain.interfaces.build import RankSpec


class Group:
    """All ranks of one engine. A world of 1 has no process group unless `join` is told to make one."""

    def __init__(self, place: RankSpec, timeout: float) -> None:
        self.rank, self.world = place.rank, place.world
        self._place, self._timeout = place, timeout
        self._own = False
        self.mesh: DeviceMesh | None = None

    def join(self, *, always: bool) -> None:
        """Meet the other ranks at `place.rendezvous` (host:port, or a URL that torch.distributed takes).

        ConfigError when this process already belongs to another group of another size.
        """
        if self.world == 1 and not always:
            return
        from torch.distributed.device_mesh import init_device_mesh

        if dist.is_initialized():
            if self.world > 1 or dist.get_world_size() != 1:
                message = (
                    f"this process already belongs to a group of {dist.get_world_size()} ranks; an engine of "
                    f"{self.world} ranks needs a process of its own"
                )
                raise ConfigError(message)
        else:
            backend = "gloo" if self._place.device == "cpu" else "cpu:gloo,cuda:nccl"
            timeout = timedelta(seconds=self._timeout)
            if self.world == 1:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            else:
                address = self._place.rendezvous
                if not address:
                    message = f"rank {self.rank} of {self.world} has no rendezvous; give place.rendezvous as host:port"
                    raise ConfigError(message)
                url = address if "://" in address else f"tcp://{address}"
                dist.init_process_group(
                    backend, init_method=url, rank=self.rank, world_size=self.world, timeout=timeout
                )
            self._own = True
        self.mesh = init_device_mesh(self._place.device, (self.world,), mesh_dim_names=("d",))

    def gather(self, fact: Any) -> list[Any]:
        """Return every rank's small picklable fact in rank order, on every rank. Collective."""
        if self.world == 1:
            return [fact]
        facts: list[Any] = [None] * self.world
        dist.all_gather_object(facts, fact)
        return facts

    def agree(self, error: BaseException | None, kind: type[PowertrainError]) -> None:
        """Raise `kind` on all ranks when one of them has an error; all ranks call it at the same place."""
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if wrong:
            raise kind("; ".join(wrong)) from error

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a host tensor over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def leave(self) -> None:
        """Leave the group if this engine made it; may be called twice."""
        self.mesh = None
        if self._own and dist.is_initialized():
            dist.destroy_process_group()
        self._own = False

"""Groups of a transfer over the network: one for weights, and a Gloo sidecar for set-up, liveness and completion.

They are made of process group objects over a store of the transfer's own, so a rank's default group, if it has one, is
neither used nor noticed. The store is the driver's: it outlives every rank, so the ranks that are left can look up how
far each one came, and name the one that did not come along.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from powertrain.errors import PowertrainError, TransferError
from powertrain.launch.ports import free_port

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_GRACE: Final = 0.5
"""Most seconds that other ranks have, after a wait has failed here, to tell whom they waited for."""
_LOOK: Final = 0.02
_POLL: Final = 5e-5
_STORE_SECONDS: Final = 10.0


class Store:
    """The driver's end of the store: a server on a port that core reserved, bound to one address."""

    def __init__(self, host: str) -> None:
        self.host, self.port = host, free_port()
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, self.port))
            listener.listen(1024)
            self._server: dist.TCPStore | None = dist.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE_SECONDS),
                master_listen_fd=listener.detach(),
            )

    def close(self) -> None:
        """End the server; may be called twice."""
        self._server = None


class Progress:
    """How far every rank has come and what it waits for, in the store. names: of all ranks, for messages."""

    def __init__(self, store: dist.Store, rank: int, names: Sequence[str]) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._stage = 0

    def reach(self, stage: int) -> None:
        """Say that this rank has begun a stage; stages are numbered on through all updates."""
        self._stage = stage
        self._store.set(f"at/{self._rank}", str(stage))

    def tell(self, peer: int | None, cause: str, *, own: bool = False) -> None:
        """Tell the others that this rank has given up: it waited for a peer, or has failed by itself (own)."""
        self._store.set(f"fault/{self._rank}", json.dumps({"peer": peer, "cause": cause, "own": own}))

    def blame(self, peer: int | None, cause: str, seconds: float) -> tuple[int | None, str]:
        """Return the rank that did not come along, and its own fault if it has told one; this one waited for `peer`.

        Every rank that waits in vain tells so. Who neither tells nor has come further is stopped or dead; `seconds` is
        what the others have to tell. None where it cannot be known.
        """
        self.tell(peer, cause)
        end = time.monotonic() + seconds
        while True:
            stages, faults = self._look()
            for rank, fault in faults.items():
                if fault["own"]:
                    return rank, str(fault["cause"])
            silent = [r for r in range(len(self._names)) if r not in faults and stages.get(r, -1) <= self._stage]
            if len(silent) == 1 or time.monotonic() > end:
                break
            time.sleep(_LOOK)
        at, seen = peer, {self._rank}
        while at is not None and at in faults and at not in seen:  # whom they waited for waited for somebody else
            seen.add(at)
            at = faults[at]["peer"]
        behind = sorted(silent, key=lambda rank: stages.get(rank, -1))
        return (at if at in silent else next(iter(behind), peer)), ""

    def _look(self) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
        ranks = range(len(self._names))
        stages = {r: int(self._store.get(f"at/{r}")) for r in ranks if self._store.check([f"at/{r}"])}
        faults = {r: json.loads(self._store.get(f"fault/{r}")) for r in ranks if self._store.check([f"fault/{r}"])}
        return stages, faults


class Groups:
    """One rank's two groups. names: of all ranks, trainer's first; rank: this one's place among them.

    Every wait ends at the time that `limit` has set, with an error that names the rank, the phase and the tensor.
    failed: a wait has ended so; the groups are closed and the others know.
    """

    def __init__(self, address: tuple[str, int], prefix: str, rank: int, names: Sequence[str], backend: str) -> None:
        self.rank, self.names, self.backend = rank, names, backend
        self.failed = False
        self._address, self._prefix = address, prefix
        self._payload: Any = None
        self._sidecar: Any = None
        self._progress: Progress | None = None
        self._stage = 0
        self._end = 0.0
        self._grace = _GRACE

    def limit(self, seconds: float) -> None:
        """Set when waits end from now on."""
        self._grace = min(_GRACE, seconds / 10)
        self._end = time.monotonic() + seconds

    def left(self) -> timedelta:
        """Return the time that is left, never nothing."""
        return timedelta(seconds=max(0.01, self._end - time.monotonic()))

    def open(self) -> None:
        """Meet the other ranks and make both groups; done once all have."""
        world = len(self.names)
        with self.waiting("setup", None, ""):
            store = dist.TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=self.left())
            mine = dist.PrefixStore(self._prefix, store)
            self._progress = Progress(mine, self.rank, self.names)
            self._progress.reach(self._stage)
            self._sidecar = self._gloo(dist.PrefixStore("sidecar", mine), world)
            self._payload = self._weights(dist.PrefixStore("weights", mine), world)
        self.barrier("setup")

    def barrier(self, phase: str) -> None:
        """Return once every rank has come here; runs on the sidecar."""
        assert self._progress is not None
        self._stage += 2
        with self.waiting(phase, None, ""):
            self._progress.reach(self._stage)
            options = dist.BarrierOptions()
            options.timeout = self.left()
            self._sidecar.barrier(options).wait(self.left())
            self._progress.reach(self._stage + 1)

    def send(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Begin to send flat bytes to a rank; returns the work, to be ended by `finish`."""
        with self.waiting("wire", peer, ""):
            return self._payload.send([data], peer, tag)

    def receive(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Begin to receive flat bytes from a rank."""
        with self.waiting("wire", peer, ""):
            return self._payload.recv([data], peer, tag)

    def tell(self, number: int, peer: int, tag: int) -> Any:
        """Begin to send a whole number to a rank, on the sidecar; returns the work, to be ended by `finish`."""
        with self.waiting("wire", peer, ""):
            return self._sidecar.send([torch.tensor([number])], peer, tag)

    def told(self, peer: int, tag: int, tensor: str) -> int:
        """Wait for the number that a rank tells; tensor: the first one of what it is about."""
        number = torch.empty(1, dtype=torch.int64)
        with self.waiting("wire", peer, tensor):
            self._sidecar.recv([number], peer, tag).wait(self.left())
        return int(number)

    def finish(self, work: Any, peer: int, tensor: str, *, sidecar: bool = False) -> None:
        """Wait until a message is there, or gone; tensor: the first one in it. sidecar: it is one of `tell`'s."""
        with self.waiting("wire", peer, tensor):
            if sidecar or self.backend == "gloo":
                work.wait(self.left())
                return
            while not work.is_completed():  # waiting for a card's work would only make its stream wait
                if time.monotonic() > self._end:
                    message = "timed out"
                    raise RuntimeError(message)
                time.sleep(_POLL)
            work.wait()

    @contextmanager
    def waiting(self, phase: str, peer: int | None, tensor: str) -> Iterator[None]:
        """Turn an error of torch's into one that names who did not come along."""
        begun = time.monotonic()
        try:
            yield
            return
        except RuntimeError as exc:
            if isinstance(exc, PowertrainError):
                raise
            cause = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        # Here, and not above, so that no frame of torch's error keeps a group alive.
        self._fail(phase, peer, tensor, cause, time.monotonic() - begun)

    def _fail(self, phase: str, peer: int | None, tensor: str, cause: str, waited: float) -> NoReturn:
        self.failed = True
        self._destroy()  # first, so that nobody waits for this rank
        found, told = peer, ""
        try:
            if self._progress is not None:
                found, told = self._progress.blame(peer, cause, self._grace)
        except RuntimeError as exc:
            told = f"the driver's store does not answer ({exc})"
        who = "another rank" if found is None else self.names[found]
        what = f" for {tensor!r}" if tensor else ""
        why = f"it failed: {told}" if told else f"it is stopped, dead or cut off ({cause})"
        me = self.names[self.rank]
        message = f"{me} waited {waited:.1f} s{what} in phase {phase!r}, and {who} did not come along: {why}"
        raise TransferError(message, phase=phase)

    def give_up(self, error: BaseException) -> None:
        """Tell the others of a fault of this rank's own, and destroy the groups so that nobody waits for it."""
        if not self.failed and self._progress is not None:
            self.failed = True
            with suppress(RuntimeError):  # the driver is gone, which they will notice by themselves
                self._progress.tell(None, str(error), own=True)
        self._destroy()

    def close(self) -> None:
        """Destroy both groups and leave the store; may be called twice."""
        self._destroy()
        self._progress = None

    def _destroy(self) -> None:
        for group in (self._payload, self._sidecar):
            if group is not None:
                with suppress(RuntimeError):  # what is broken already is closed when it is collected
                    group.abort()
        self._payload = self._sidecar = None

    def _gloo(self, store: dist.Store, world: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self.left()
        host, interface = self._address[0], os.environ.get("GLOO_SOCKET_IFNAME", "")
        if host in _LOOPBACK:
            device = dist.ProcessGroupGloo.create_device(hostname=host)
        elif interface:
            device = dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        else:
            device = dist.ProcessGroupGloo.create_default_device()
        options._devices = [device]
        return dist.ProcessGroupGloo(store, self.rank, world, options)

    def _weights(self, store: dist.Store, world: int) -> Any:
        """Make the group for weights; HCCL is one that a plugin of torch's brings."""
        if self.backend == "gloo":
            return self._gloo(store, world)
        if self.backend == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.left()
            return dist.ProcessGroupNCCL(store, self.rank, world, options)
        plugin = dist.Backend._plugins.get(self.backend.upper())
        if plugin is None:
            message = f"torch has no backend {self.backend!r} on {self.names[self.rank]}; use backend=gloo"
            raise TransferError(message, phase="gather")
        return plugin.creator_fn(store, self.rank, world, self.left())

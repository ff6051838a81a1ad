"""The suite of `Transfer` with its endpoints: plans, what arrives, when it is published, what a fault leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from powertrain.errors import PowertrainError, TransferError
from powertrain.registry import Registry
from powertrain.specs import Support
from powertrain.testing.calls import Bounded
from powertrain.testing.sink import update
from powertrain.testing.suite import Suite, needs
from powertrain.weights.update import PHASES

if TYPE_CHECKING:
    from powertrain.interfaces.transfer import Transfer
    from powertrain.testing.tensors.world import World
    from powertrain.weights import TransferReport

DEADLINE: Final = 30.0


class TransferSuite(Suite):
    """Tests of a transfer. transfer: the plugin's name. options: for every test.

    Every rank is a thread of this process. Engines of several ranks are left out (capability "sharded") for a transfer
    that reaches no further than its process.
    """

    KIND = "transfer"
    NAMED_BY = "transfer"
    OPEN = Suite.OPEN | {"transfer", "options", "make", "endpoint"}
    transfer: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def support(cls, capability: str) -> Support:
        """Return what the spec says; a transfer is for engines of several ranks ("sharded") by its reach."""
        if capability == "sharded":
            return Support.NONE if set(cls.spec().reach) <= {"process"} else Support.FULL
        return super().support(capability)

    def make(self) -> Transfer:
        """Return a new driver's half; override it for one that needs more than name and options."""
        from powertrain.options import resolve

        options = resolve(self.spec().options, self.options, where=f"transfer {self.transfer}")
        transfer: Transfer = Registry().load_class(self.spec())(self.transfer, options)
        return transfer

    def endpoint(self, side: str) -> type:
        """Return the class of an endpoint, "source" or "sink"; override it with `make` if need be."""
        found: type = Registry().load_class(self.spec(), side)
        return found

    @pytest.fixture
    def join(self) -> Iterator[Callable[..., tuple[Bounded, World]]]:
        """A function (trainer=ranks, engines=(ranks, ...)) -> transfer and world; both closed at the end."""
        from powertrain.testing.tensors.world import World

        made: list[tuple[Bounded, World]] = []

        def join(**sizes: Any) -> tuple[Bounded, World]:
            world = World({side: self.endpoint(side) for side in ("source", "sink")}, **sizes)
            transfer = Bounded(self.make(), self.patience)
            transfer.target.source, transfer.target.sinks = world.source, world.sinks
            made.append((transfer, world))
            return made[-1]

        yield join
        for transfer, world in made:
            for sink in world.weights:
                sink.go.set()
            transfer.release()
            world.close()

    def test_plan_moves_nothing(self, join: Callable[..., Any]) -> None:
        """A plan is made of manifests alone: bytes and faults are known before any weight is touched."""
        transfer, world = join()
        self._plan(transfer, world)
        assert {method for _, method, _ in world.events} == {"weights.manifest", "ended weights.manifest"}
        assert world.versions == ["1.0"]

    def test_plan_reads_each_element_once(self, join: Callable[..., Any]) -> None:
        """Every rank of every engine reads as many elements as its boxes hold."""
        transfer, world = join(engines=(1, 1))
        held = [sum(box.elements for entry in sink.manifest() for box in entry.boxes) for sink in world.weights]
        assert world.elements(self._plan(transfer, world)) == held

    def test_equal_manifests_give_equal_plans(self, join: Callable[..., Any]) -> None:
        """A plan is a pure function of manifests; ranks that make their own must come to the same."""
        plans = [self._plan(*join(engines=(1, 1))) for _ in range(2)]
        assert plans[0] == plans[1]

    def test_every_element_arrives(self, join: Callable[..., Any]) -> None:
        """Numbers that are all different are read back: a slice, an offset or a stride is wrong."""
        transfer, world = join()
        self._push(transfer, 1)
        assert [sink.wrong(0) for sink in world.weights] == [[]]

    def test_every_engine_gets_all(self, join: Callable[..., Any]) -> None:
        """The second engine of a set got nothing, or the first one's slices."""
        transfer, world = join(engines=(1, 1, 1))
        self._push(transfer, 1)
        assert [sink.wrong(0) for sink in world.weights] == [[], [], []]

    @needs("sharded")
    @pytest.mark.parametrize("sizes", [(2, (1,)), (1, (2,)), (3, (2, 1))], ids=["2to1", "1to2", "3to21"])
    def test_sharded_engines_get_their_slices(self, join: Callable[..., Any], sizes: Any) -> None:
        """Trainers hold rows, engines columns, unevenly; each rank must get the crossing of both and no more."""
        transfer, world = join(trainer=sizes[0], engines=sizes[1])
        self._push(transfer, 1)
        assert [sink.wrong(0) for sink in world.weights] == [[] for _ in world.weights]

    def test_later_push_carries_the_later_weights(self, join: Callable[..., Any]) -> None:
        """A staging area or a list of tensors kept from the push before was sent again."""
        transfer, world = join()
        for step in range(3):
            self._push(transfer, step + 1)
            assert [sink.wrong(step) for sink in world.weights] == [[]], step
            world.train()
        assert world.versions == ["1.3"]

    def test_engines_keep_what_they_got(self, join: Callable[..., Any]) -> None:
        """The trainer steps on while engines answer: a sink that aliases its memory answers with half a step."""
        transfer, world = join()
        self._push(transfer, 1)
        world.train()
        assert [sink.wrong(0) for sink in world.weights] == [[]]

    def test_version_is_published_once_all_have_finished(self, join: Callable[..., Any]) -> None:
        """An engine was resumed with the new version while another could still fail: mixed and published."""
        transfer, world = join(engines=(1, 1))
        world.weights[1].slow = 0.2
        self._push(transfer, 1)
        calls = [(method, *args) for _, method, args in world.events]
        finished = [i for i, call in enumerate(calls) if call == ("ended weights.finish",)]
        assert len(finished) == 2
        assert calls.index(("resume", "1.1")) > finished[-1]
        assert world.versions == ["1.1", "1.1"]

    def test_engines_are_paused_before_they_are_written(self, join: Callable[..., Any]) -> None:
        """An engine took steps while its weights changed; the mode of pausing is the caller's."""
        transfer, world = join(engines=(1, 1))
        transfer.push(update(1), deadline=DEADLINE, pause_mode="keep")
        for handle in world.sinks:
            calls = [(method, *args) for name, method, args in world.events if name == handle.name]
            assert calls.index(("ended pause", "keep")) < calls.index(("weights.begin", update(1)))

    def test_report_times_every_phase(self, join: Callable[..., Any]) -> None:
        """Reports of all transfers name the same phases, so that they can be compared."""
        report = self._push(join()[0], 1)
        assert tuple(report.seconds) == PHASES
        assert min(report.seconds.values()) >= 0
        assert report.total_seconds >= max(report.seconds.values())

    def test_report_counts_bytes(self, join: Callable[..., Any]) -> None:
        """The bytes of one update to one engine are those of its plan."""
        transfer, world = join()
        assert self._push(transfer, 1).bytes == self._plan(transfer, world).bytes

    def test_report_says_what_was_done(self, join: Callable[..., Any]) -> None:
        """Transfer, version and number of engines go into the run's metrics."""
        report = self._push(join(engines=(1, 1))[0], 4)
        assert (report.transfer, str(report.version), report.sinks) == (self.transfer, "1.4", 2)

    def test_smaller_dtype_is_cast_where_the_engine_accepts_it(self, join: Callable[..., Any]) -> None:
        """Bytes of bfloat16 were copied as if they were float32, or a promised cast was refused."""
        from powertrain.testing.tensors.weights import same
        from powertrain.testing.tensors.world import values

        transfer, world = join()
        world.send_bfloat16()
        self._push(transfer, 1)
        assert same(values(world.weights[0]), values(world.source.ranks[0].weights)) == []

    def test_weights_that_do_not_fit_are_refused_before_anything_moves(self, join: Callable[..., Any]) -> None:
        """Another shape or a missing name must end the update while every engine is as it was."""
        import dataclasses

        transfer, world = join(engines=(1, 1))
        entries = world.weights[1]._manifest.entries
        odd = dataclasses.replace(entries[0], shape=(12, 6))
        world.weights[1]._manifest = dataclasses.replace(world.weights[1]._manifest, entries=(odd, *entries[1:]))
        with pytest.raises(TransferError, match="embed"):
            self._push(transfer, 1)
        assert [(sink.state, sink.version) for sink in world.weights] == [("steady", "1.0")] * 2

    def test_failed_engine_is_named_and_nothing_is_published(self, join: Callable[..., Any]) -> None:
        """One engine failed in the midst of its write: no engine may carry the new version."""
        transfer, world = join(engines=(1, 1))
        world.weights[1].broken = True
        with pytest.raises(TransferError, match="this rank broke") as caught:
            self._push(transfer, 1)
        assert "rollout/1" in caught.value.unfit
        assert world.versions == ["1.0", "1.0"]
        assert world.weights[1].state == "unfit"

    def test_next_update_heals(self, join: Callable[..., Any]) -> None:
        """After a failure the next push starts at once and ends with every engine right."""
        transfer, world = join(engines=(1, 1))
        self._push(transfer, 1)
        world.weights[0].broken = True
        world.train()
        with pytest.raises(TransferError):
            self._push(transfer, 2)
        self._push(transfer, 3)
        assert [(sink.wrong(1), sink.version) for sink in world.weights] == [([], "1.3")] * 2

    def test_failed_trainer_is_told(self, join: Callable[..., Any]) -> None:
        """The trainer could not be read: engines keep their version, or say that they must be healed."""
        transfer, world = join(engines=(1, 1))
        world.source.ranks[0].weights.broken = True
        with pytest.raises(TransferError, match="this trainer broke"):
            self._push(transfer, 1)
        assert world.versions == ["1.0", "1.0"]
        world.source.ranks[0].weights.broken = False
        self._push(transfer, 2)
        assert [sink.wrong(0) for sink in world.weights] == [[], []]

    def test_hanging_engine_ends_at_the_deadline(self, join: Callable[..., Any]) -> None:
        """An engine that does not answer was waited for without end; the error names it."""
        transfer, world = join()
        world.weights[0].stuck = True
        with pytest.raises(TransferError, match="rollout/0"):
            transfer.push(update(1), deadline=0.2)
        assert world.versions == ["1.0"]

    def test_restarted_engine_is_reached_again(self, join: Callable[..., Any]) -> None:
        """A new process stands in an engine's place; at most one update fails before it is served."""
        from powertrain.testing.tensors.world import Sink

        transfer, world = join()
        self._push(transfer, 1)
        world.sinks[0].ranks[:] = world.ranks(Sink, 1)
        try:
            self._push(transfer, 2)
        except TransferError:
            self._push(transfer, 3)
        assert [sink.wrong(0) for sink in world.weights] == [[]]

    def test_adapter_arrives_whole_under_its_name(self, join: Callable[..., Any]) -> None:
        """An adapter goes the way of full weights; the base's weights and version stay."""
        transfer, world = join()
        self._become_adapter(world)
        transfer.push(update(2, kind="adapter", adapter="policy-v1.2"), deadline=DEADLINE)
        sink = world.weights[0]
        assert {name: tuple(tensor.shape) for name, tensor in sink.adapters["policy-v1.2"].items()} == self._shapes()
        assert (sink.version, sink.base_version) == ("1.2", "1.0")

    def test_adapter_keeps_its_numbers(self, join: Callable[..., Any]) -> None:
        """The adapter aliases the trainer's memory, or its pieces were put together wrongly."""
        from powertrain.testing.tensors.weights import same
        from powertrain.testing.tensors.world import SHAPES, value

        transfer, world = join()
        self._become_adapter(world)
        transfer.push(update(2, kind="adapter", adapter="policy-v1.2"), deadline=DEADLINE)
        world.train()
        arrived = world.weights[0].adapters["policy-v1.2"]
        assert same(arrived, {name: value(name, 0) for name in SHAPES}) == []

    def test_update_of_another_kind_than_the_trainers_is_refused(self, join: Callable[..., Any]) -> None:
        """Full weights sent as an adapter, or the reverse, fit nowhere; every engine keeps its version."""
        transfer, world = join()
        with pytest.raises(PowertrainError, match="adapter"):
            transfer.push(update(2, kind="adapter", adapter="policy-v1.2"), deadline=DEADLINE)
        assert world.versions == ["1.0"]

    @pytest.mark.parametrize("when", ["before", "after", "failed"])
    def test_close_may_be_called_twice(self, join: Callable[..., Any], when: str) -> None:
        """A driver that tidies up closes whatever it finds: never used, used, or broken."""
        transfer, world = join()
        world.weights[0].broken = when == "failed"
        try:
            if when != "before":
                self._push(transfer, 1)
        except TransferError:
            assert when == "failed"
        transfer.close()
        transfer.close()

    def test_close_leaves_no_shared_memory(self, join: Callable[..., Any]) -> None:
        """A file below /dev/shm outlived the transfer; after some runs the host is full."""
        transfer, _ = join()
        before = _shared()
        self._push(transfer, 1)
        transfer.close()
        assert _shared() <= before

    # ---- what the tests are written in
    @staticmethod
    def _push(transfer: Bounded, counter: int) -> TransferReport:
        report: TransferReport = transfer.push(update(counter), deadline=DEADLINE)
        return report

    @staticmethod
    def _plan(transfer: Bounded, world: World) -> Any:
        return transfer.plan(world.source, world.sinks, deadline=DEADLINE)

    @staticmethod
    def _become_adapter(world: World) -> None:
        from powertrain.testing.tensors.world import Source

        world.source.ranks[:] = world.ranks(Source, 1, "adapter")

    @staticmethod
    def _shapes() -> dict[str, tuple[int, ...]]:
        from powertrain.testing.tensors.world import SHAPES

        return dict(SHAPES)


def _shared() -> set[str]:
    """Return the names below /dev/shm that this process's transfers may have made: those that name its id."""
    import os

    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if str(os.getpid()) in path.name} if folder.is_dir() else set()

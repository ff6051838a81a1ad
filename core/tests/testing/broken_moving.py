"""Transfers and launchers that are each broken in one method, and the tests that must tell. Not collected by itself."""

import dataclasses
import os

from powertrain.errors import DeadlineError, WorkerError
from powertrain.testing import LauncherSuite, TransferSuite


class BrokenTransfer(TransferSuite):
    transfer = "shm"

    def make(self):
        from powertrain.tensors.shm import ShmTransfer

        return self.broken(ShmTransfer)("shm", {})


class BrokenEndpoint(TransferSuite):
    """The driver's half is whole; one endpoint is not."""

    transfer = "shm"

    def endpoint(self, side):
        found = super().endpoint(side)
        return self.broken(found) if side == self.side else found


class TestSliceOfTheWrongRows(BrokenEndpoint):
    side = "source"
    fails = ("test_sharded_engines_get_their_slices",)

    def broken(self, whole):
        class Broken(whole):
            def open(self, session, path, how, blocks):
                super().open(session, path, how, blocks)
                for work in self._session(session).work.values():
                    for at, (place, block) in enumerate(work):
                        if block.start and block.start[0] > 0:
                            work[at] = (place, dataclasses.replace(block, place=block.place - 1))

        return Broken


class TestReadsOfAnotherRank(BrokenEndpoint):
    side = "sink"
    fails = ("test_sharded_engines_get_their_slices",)

    def broken(self, whole):
        class Broken(whole):
            def open(self, session, path, how, reads, first_rank):
                super().open(session, path, how, list(reads)[:1] * len(reads), first_rank)

        return Broken


class TestVersionPublishedBeforeAllHaveFinished(BrokenTransfer):
    fails = ("test_version_is_published_once_all_have_finished",)

    def broken(self, whole):
        class Broken(whole):
            async def push(self, update, *, deadline, pause_mode="wait"):
                plain, self.sinks = self.sinks, [Eager(sink, update) for sink in self.sinks]
                try:
                    return await super().push(update, deadline=deadline, pause_mode=pause_mode)
                finally:
                    self.sinks = plain

        return Broken


class Eager:
    """An engine that is resumed as soon as it has finished, whatever the others do."""

    def __init__(self, sink, update):
        self.sink, self.name, self.update = sink, sink.name, update

    @property
    def version(self):
        return self.sink.version

    async def call(self, method, *args, deadline):
        answer = await self.sink.call(method, *args, deadline=deadline)
        if method == "weights.finish":
            await self.sink.call("resume", str(self.update.version), deadline=deadline)
        return answer


class TestDeadlineIsNotPassedOn(BrokenTransfer):
    patience = 4.0
    fails = ("test_hanging_engine_ends_at_the_deadline",)

    def broken(self, whole):
        class Broken(whole):
            async def _call(self, handle, op, *, deadline, **payload):
                return await super()._call(handle, op, deadline=3600.0, **payload)

        return Broken


class TestBytesAreNotCounted(BrokenTransfer):
    fails = ("test_report_counts_bytes",)

    def broken(self, whole):
        class Broken(whole):
            async def move(self, plan, update, meter, *, deadline):
                await super().move(plan, update, meter, deadline=deadline)
                meter.bytes = 0

        return Broken


class TestSecondCloseFails(BrokenTransfer):
    fails = ("test_close_may_be_called_twice",)

    def broken(self, whole):
        class Broken(whole):
            async def close(self):
                await super().close()
                del self.session

        return Broken


class TestFileIsLeftBehind(BrokenEndpoint):
    side = "source"
    fails = ("test_close_leaves_no_shared_memory",)

    def broken(self, whole):
        class Broken(whole):
            def create(self, session, how, folder):
                path = super().create(session, how, folder)
                if path:
                    os.link(path, f"{path}-kept")
                return path

        return Broken


class BrokenLauncher(LauncherSuite):
    launcher = "local"
    slowness = 3.0

    def make(self, logs):
        from powertrain.launch.local import LocalLauncher

        return self.broken(LocalLauncher)({"grace": 0.5}, logs=str(logs))


class TestEnvironmentLeaks(BrokenLauncher):
    fails = ("test_environment_is_exactly_what_was_given",)

    def broken(self, whole):
        class Broken(whole):
            def start(self, processes):
                super().start([dataclasses.replace(one, env={**os.environ, **one.env}) for one in processes])

        return Broken


class TestArgumentsGoThroughAShell(BrokenLauncher):
    fails = ("test_arguments_arrive_unchanged",)

    def broken(self, whole):
        class Broken(whole):
            def start(self, processes):
                super().start(
                    [dataclasses.replace(one, argv=(*one.argv[:3], *filter(None, one.argv[3:]))) for one in processes]
                )

        return Broken


class TestDeathIsWaitedFor(BrokenLauncher):
    fails = ("test_early_death_is_told_with_the_end_of_the_log",)

    def broken(self, whole):
        class Broken(whole):
            def wait_ready(self, names, *, deadline):
                try:
                    super().wait_ready(names, deadline=deadline)
                except WorkerError as exc:
                    raise DeadlineError(str(exc)) from exc

        return Broken


class TestPidOfTheWatcher(BrokenLauncher):
    fails = ("test_pid_is_the_targets_own",)

    def broken(self, whole):
        class Broken(whole):
            def status(self):
                return [dataclasses.replace(one, pid=self._table[one.name].watcher.pid) for one in super().status()]

        return Broken


class TestStartsWhenClosed(BrokenLauncher):
    fails = ("test_closed_launcher_starts_nothing",)

    def broken(self, whole):
        class Broken(whole):
            def close(self):
                super().close()
                self._closed = False

        return Broken

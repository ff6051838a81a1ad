"""Ranks of one engine hear from each other, without vLLM: order, ends of calls, ranks that are gone."""

import asyncio
import os
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import msgpack
import pytest
from torch.distributed import TCPStore

from powertrain.errors import ConfigError, DeadlineError, StateError, WorkerError
from powertrain.interfaces.build import RankSpec
from powertrain.launch.ports import free_port
from powertrain.runtime.wire import RankFault
from powertrain_vllm.ranks import KEY, Following, Leading

WAIT = 10.0


class Pair:
    """Rank 0 and rank 1 in this process. heard: what rank 1 was told. lost: what each was told of the other's end."""

    def __init__(self, seconds=WAIT):
        self.port = free_port()
        self.store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self.heard, self.lost = [], {0: [], 1: []}
        self.lead = Leading(self.place(0), seconds, self.lost[0].append)
        self.follow = Following(self.place(1), seconds, self.lost[1].append)

    def place(self, rank):
        return RankSpec(rank=rank, world=2, local_rank=rank, rendezvous=f"127.0.0.1:{self.port}")

    async def meet(self):
        await asyncio.gather(asyncio.to_thread(self.lead.meet), asyncio.to_thread(self.follow.meet))
        self.follow.listen(self.obey)

    def obey(self, message):
        if message[0] in {"open", "closed"}:
            self.follow.reached(message[0])
        else:
            self.heard.append(message)

    async def both(self, what, key, work):
        """Make the same call on both ranks; returns what each answered or raised."""
        calls = (rank.call(what, key, work) for rank in (self.lead, self.follow))
        async with asyncio.timeout(WAIT):
            return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
async def pair():
    made = Pair()
    await made.meet()
    yield made
    made.follow.close()
    made.lead.close()


async def until(condition):
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.01)


def cut(connection):
    """Do what the system does for a process that has ended."""
    with socket.socket(fileno=os.dup(connection.fileno())) as both:
        both.shutdown(socket.SHUT_RDWR)


async def answering():
    return "done"


async def refusing():
    message = "no such thing"
    raise ConfigError(message)


async def test_what_rank_0_tells_comes_in_its_order(pair):
    for i in range(1000):
        pair.lead.send("add", i)
    await until(lambda: len(pair.heard) == 1000)
    assert pair.heard == [["add", i] for i in range(1000)]


async def test_a_call_ends_alike_on_all_ranks(pair):
    assert await pair.both("generate", "a", answering) == ["done", None]
    told = await pair.both("generate", "b", refusing)
    assert isinstance(told[0], ConfigError)
    assert isinstance(told[1], RankFault)
    assert (told[1].fault["type"], told[1].fault["message"]) == ("ConfigError", "no such thing")


async def test_the_rank_that_is_called_later_hears_the_end_too(pair):
    with pytest.raises(ConfigError):
        await pair.lead.call("load", "x", refusing)
    assert await pair.lead.call("load", "y", answering) == "done"
    await asyncio.sleep(0.1)
    async with asyncio.timeout(WAIT):
        assert await pair.follow.call("load", "y", refusing) is None
        with pytest.raises(RankFault, match="no such thing"):
            await pair.follow.call("load", "x", answering)


async def test_cancelled_calls_leave_nothing_behind_on_whichever_rank_they_began(pair):
    forever = asyncio.Event().wait
    for ranks in ([pair.lead], [pair.follow], [pair.lead, pair.follow]):
        calls = [asyncio.create_task(rank.call("generate", "a", forever)) for rank in ranks]
        await asyncio.sleep(0.1)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await asyncio.sleep(0.1)
        assert await pair.both("generate", "a", answering) == ["done", None]
    assert not any((pair.follow._mine, pair.follow._theirs, pair.follow._paired, pair.follow._ended))


async def test_pause_is_over_once_all_before_it_is_done(pair):
    begun = asyncio.create_task(pair.follow.closed())
    await asyncio.sleep(0.1)
    assert not begun.done()
    pair.lead.send("drop", [])
    pair.lead.send("closed")
    await asyncio.wait_for(begun, WAIT)
    assert pair.heard == [["drop", []]]
    begun = asyncio.create_task(pair.follow.opened())
    await asyncio.sleep(0.1)
    assert not begun.done()
    pair.lead.send("open")
    await asyncio.wait_for(begun, WAIT)


async def test_resume_that_rank_0_does_not_tell_is_late():
    pair = Pair(seconds=1.0)
    await pair.meet()
    pair.lead.send("closed")
    await pair.follow.closed()
    with pytest.raises(DeadlineError, match="rank 1 waited 1 s for rank 0 to resume"):
        await pair.follow.opened()
    pair.lead.close()


@pytest.mark.parametrize("end", ["ends", "breaks off", "closes"])
async def test_rank_1_that_is_gone_is_named_by_rank_0(pair, end):
    if end == "ends":
        cut(pair.follow._lead)
    elif end == "breaks off":
        pair.follow.broke("a step failed")
    else:
        pair.follow.close()
    await until(lambda: pair.lost[0])
    [fault] = pair.lost[0]
    assert isinstance(fault, StateError if end == "closes" else WorkerError)
    says = {"ends": r"\(process \d+\) ended", "breaks off": "broke off: a step failed", "closes": "was closed"}[end]
    with pytest.raises(type(fault), match=f"rank 1 of this engine {says}"):
        raise fault


async def test_rank_0_that_is_gone_ends_every_wait_of_rank_1(pair):
    calls = [asyncio.create_task(call) for call in (pair.follow.call("generate", "a", answering), pair.follow.closed())]
    await asyncio.sleep(0.1)
    cut(pair.lead._peers[1][0])
    for call in calls:
        with pytest.raises(WorkerError, match="rank 0 of this engine ended"):
            await asyncio.wait_for(call, WAIT)
    with pytest.raises(WorkerError, match="rank 0"):
        await pair.follow.call("generate", "b", answering)
    assert len(pair.lost[1]) == 1


async def test_a_rank_that_does_not_come_is_named():
    pair = Pair(seconds=0.5)
    with pytest.raises(DeadlineError, match=r"rank 1 did not meet rank 0 within 0\.5 s"):
        await asyncio.to_thread(pair.lead.meet)


async def test_strangers_are_not_let_in():
    pair = Pair()
    meeting = asyncio.create_task(asyncio.to_thread(pair.lead.meet))
    host, port, _ = msgpack.unpackb(await asyncio.to_thread(pair.store.get, KEY))
    with pytest.raises(AuthenticationError):
        await asyncio.to_thread(Client, (host, port), authkey=b"guessed")
    assert host == "127.0.0.1"
    await asyncio.to_thread(pair.follow.meet)
    await asyncio.wait_for(meeting, WAIT)
    pair.lead.close()

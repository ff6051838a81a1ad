"""The `vllm` inference engine: requests become rows on vLLM."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, StateError
from powertrain.interfaces.data import GenerateResult
from powertrain.interfaces.infer import PAUSE_MODES, InferEngine
from powertrain.tensors.early import set_early
from powertrain.tensors.rows import Row, check_prompt
from powertrain_vllm.adapters import Held, Shelf, check_folder, check_targets, modules_of
from powertrain_vllm.backend import PREFIX, Call, Drawn, Form
from powertrain_vllm.ranks import ALONE
from powertrain_vllm.streams import Fresh, Streams

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.data import GenerateRequest
    from powertrain.interfaces.weights import WeightSink

EARLY = ("VLLM_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
"""Beginnings of names of variables that vLLM or torch read once."""


@dataclass(eq=False, slots=True)
class Item:
    """A request in flight. adapter: the one that answers it. calls: name of the running call -> row."""

    request: GenerateRequest
    rows: list[Row]
    adapter: str | None
    answer: asyncio.Future[GenerateResult]
    calls: dict[str, Row]


class VllmEngine(InferEngine):
    """One vLLM engine. Requests that are held or frozen lie here, not in vLLM: while the engine is paused nothing runs.

    A frozen row is taken out of vLLM and handed over again after `resume`, with what it has so far as part of its
    prompt: its caches are made anew, and where it was cut its next segment begins.
    """

    _form: Form

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._calls: dict[str, Item] = {}
        self._waiting: list[Item] = []
        self._count = itertools.count()
        self._open = self._built = False
        self._idle = asyncio.Event()
        self._shelf = Shelf(1, "refuse")
        self._ranks = ALONE
        self._loading = threading.Lock()
        self._streams = Streams()

    def prepare(self, env: Mapping[str, str]) -> None:
        """Set the variables that differ; those that vLLM has read already are warned about."""
        set_early(env, EARLY, "vllm")

    async def build(self, spec: EngineSpec) -> None:
        """Start vLLM; ConfigError for options, versions and layouts that do not fit."""
        from powertrain.options import resolve
        from powertrain_vllm.hooks import OPTIONS

        # Which arguments there are is this vLLM's to say; the driver may have known another version's.
        given = {name: value for name, value in spec.options.items() if value is not None}
        self._options = resolve(OPTIONS, given, where="backend vllm")
        self._loop = asyncio.get_running_loop()
        self._shelf = Shelf(self._options["max_adapters"], self._options["stale_adapter"])
        self._form = _form(self._options)
        self._form.gone = self._shelf.forget
        self._built = True
        await self._form.start(spec, self._options, self._heard)
        self._ranks = self._form.ranks
        self._sink: Any = self._form.sink()
        self._sink.attach(lambda: self.state == "paused", self._arrived, self._withdrawn)
        self._modules = modules_of(self._sink)
        if spec.lora is not None:
            check_targets(spec.lora.targets, self._modules)
        self._open = True

    # ---- requests
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request. ConfigError for an unknown adapter or a bad prompt, UnfitError while unfit."""
        return (await self.generate_batch([request]))[0]

    def stream(self, request: GenerateRequest) -> AsyncIterator[Fresh]:
        """Answer one request token by token, on this engine's event loop and rank 0; errors are `generate`'s.

        Tokens of one sample come in order, those of several mixed. Whoever leaves the iterator closes it
        (`contextlib.aclosing`), which aborts the request.
        """
        return self._streams.run(request, self.generate)

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer several requests that go to vLLM together. Ranks above 0 answer without completions."""
        ids = [request.request_id for request in requests]
        found = await self._ranks.call("generate", "\n".join(ids), partial(self._generate, requests))
        return found or [GenerateResult(request_id=name, completions=()) for name in ids]

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        ids = [request.request_id for request in requests]
        twice = next((name for i, name in enumerate(ids) if name in self._items or name in ids[:i]), None)
        if twice is not None:
            message = f"request id {twice!r} is in flight already"
            raise StateError(message)
        with self._shelf.lock:
            items = [self._item(request) for request in requests]
            for item in items:
                self._items[item.request.request_id] = item
                if item.adapter is not None:
                    self._shelf.use(item.adapter, 1)
        if self._open:
            self._submit(items)
        else:
            self._waiting.extend(items)
        try:
            return list(await asyncio.gather(*(item.answer for item in items)))
        except BaseException:
            await asyncio.shield(self._end(items))
            raise

    def _item(self, request: GenerateRequest) -> Item:
        self._sink.check_fit()
        adapter = None
        if request.adapter is not None:
            adapter = self._shelf.find(request.adapter)
            self._sink.check_published(adapter)
        check_prompt(request, self._form.vocabulary)
        rows = Row.of(request)
        room = rows[0].room
        if room > self._form.max_model_len:
            message = (
                f"request {request.request_id!r} may need {room} tokens ({len(request.prompt)} of prompt and "
                f"{request.sampling.max_tokens} new); the engine was built for {self._form.max_model_len}: raise "
                "max_model_len or lower max_tokens"
            )
            raise ConfigError(message)
        return Item(request, rows, adapter, asyncio.get_running_loop().create_future(), {})

    def _submit(self, items: Iterable[Item]) -> None:
        """Hand over all rows that have not ended; from here on their tokens are of the version published now."""
        calls = []
        for item in items:
            version = self._sink.answering(item.adapter)
            sampling = item.request.sampling
            for row in item.rows:
                if row.finish:
                    continue
                row.label(version)
                call = Call(
                    name=f"{PREFIX}{next(self._count)}",
                    tokens=[*row.prompt, *row.tokens],
                    most=sampling.max_tokens - len(row.tokens),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    stop=sampling.stop_token_ids,
                    key=row.key,
                    adapter=item.adapter,
                )
                item.calls[call.name] = row
                self._calls[call.name] = item
                calls.append(call)
        if calls:
            self._form.submit(calls)

    def _heard(self, name: str, drawn: Sequence[Drawn], ending: str | Exception | None) -> None:
        self._loop.call_soon_threadsafe(self._take, name, drawn, ending)

    def _take(self, name: str, drawn: Sequence[Drawn], ending: str | Exception | None) -> None:
        item = self._calls.get(name)
        if item is None:
            return
        row = item.calls[name]
        greedy = item.request.sampling.temperature == 0
        for token, logprob, plain in drawn:
            row.take(token, 0.0 if greedy else logprob, plain)
            self._streams.tell(row)
        if ending is not None or row.finish:
            del item.calls[name], self._calls[name]
        if isinstance(ending, Exception):
            self._forget(item)
            others = list(item.calls)
            for other in others:
                del item.calls[other], self._calls[other]
            if others:  # samples of one request end together
                self._dropping = self._loop.create_task(self._form.drop(others))
            if not item.answer.done():
                item.answer.set_exception(ending)
        elif ending is not None or row.finish:
            row.finish = row.finish or str(ending)
            self._settle(item)
        if not self._calls:
            self._idle.set()

    def _settle(self, item: Item) -> None:
        if all(row.finish for row in item.rows):
            self._forget(item)
            if not item.answer.done():
                completions = tuple(row.completion() for row in item.rows)
                item.answer.set_result(GenerateResult(request_id=item.request.request_id, completions=completions))

    def _forget(self, item: Item) -> None:
        if self._items.pop(item.request.request_id, None) is not None and item.adapter is not None:
            self._shelf.use(item.adapter, -1)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End the named requests between two steps with what they have."""
        await self._end([self._items[name] for name in request_ids if name in self._items])

    async def _end(self, items: Sequence[Item]) -> None:
        await self._take_out(items)
        for item in items:
            for row in item.rows:
                row.finish = row.finish or "abort"
            self._settle(item)
        self._waiting = [item for item in self._waiting if item not in items]

    async def _take_out(self, items: Iterable[Item]) -> None:
        """Let no row of these run in vLLM any more; what it drew until then is taken."""
        items = list(items)
        names = [name for item in items for name in item.calls]
        if names:
            await self._form.drop(names)
            await asyncio.sleep(0)  # what was heard before the drop lies ready on the loop
        for item in items:
            for name in [name for name in names if name in item.calls]:
                del item.calls[name], self._calls[name]
        if not self._calls:
            self._idle.set()

    # ---- pause and weights
    async def pause(self, mode: str = "wait") -> None:
        """Take rows out of vLLM (keep, abort) or let them end (wait); wakes a sleeper."""
        if mode not in PAUSE_MODES:
            message = f"pause mode is {mode!r}; it is one of {', '.join(PAUSE_MODES)}"
            raise ConfigError(message)
        if self._ranks.follows:
            await self._ranks.closed()
            if self.state == "asleep":
                await self._form.wake()
            return
        was, arrived = self.state, list(self._waiting)
        self._open = False
        try:
            if mode == "wait":
                while self._calls:
                    self._idle.clear()
                    await self._idle.wait()
            running = [item for item in self._items.values() if item not in arrived]
            if mode == "abort":
                await self._end([item for item in self._items.values() if item not in arrived or item.rows[0].cuts])
            elif mode == "keep":
                await self._take_out(running)
                self._waiting = [*(item for item in running if item.request.request_id in self._items), *self._waiting]
            if was == "asleep":
                await self._form.wake()
            self._ranks.send("closed")
        except BaseException:
            if was == "ready":
                self._go_on()
            raise

    def _go_on(self) -> None:
        """Hand over what was held or frozen, in the order in which it came."""
        self._open = True
        self._ranks.send("open")
        waiting = {id(item): item for item in self._waiting}
        self._waiting = []
        self._submit(item for item in waiting.values() if item.request.request_id in self._items and not item.calls)

    async def resume(self, version: str | None = None) -> None:
        """Publish the finished update's version, or go on with the present one; UnfitError while unfit."""
        if self._sink.remote:
            await asyncio.to_thread(self._sink.publish, version)
        else:  # a thread would cost as much as all else that ends an update
            self._sink.publish(version)
        if self._ranks.follows:
            await self._ranks.opened()
        else:
            self._go_on()

    def weights(self) -> WeightSink:
        """Return the engine's sink, the same object each time."""
        found: WeightSink = self._sink
        return found

    # ---- adapters
    async def load_adapter(self, name: str, folder: str) -> None:
        """Register a PEFT adapter from a folder; a request in flight under an older name goes on with its own."""
        check_folder(name, folder, self._modules)
        register = partial(asyncio.to_thread, self._register, name, folder, False)
        await self._ranks.call("load", name, register)
        if self._ranks.follows:
            await register()

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter; StateError while a request in flight uses it."""

        async def unload() -> None:
            with self._shelf.lock:
                self._shelf.check_drop(name)
                self._shelf.take(name)
            await asyncio.to_thread(self._form.unload, name)

        await self._ranks.call("unload", name, unload)

    def _arrived(self, name: str, folder: str) -> None:
        check_folder(name, folder, self._modules)
        self._register(name, folder, True)

    def _register(self, name: str, folder: str, owned: bool) -> None:
        """Load an adapter and then drop what is too many, so that one that cannot be loaded costs no other.

        One at a time: vLLM has room for one more than are kept, and would push out what requests use. Ranks above 0
        drop what rank 0 has dropped.
        """
        leads = not self._ranks.follows
        with self._loading:
            with self._shelf.lock:
                self._shelf.check_new(name)
                if leads:
                    self._shelf.check_room()
            self._form.load(name, folder)
            with self._shelf.lock:
                self._shelf.put(Held(name, folder, owned))
                dropped = self._shelf.surplus() if leads else []
                for old in dropped:
                    self._shelf.take(old)
            for old in dropped:
                self._form.unload(old)

    def _withdrawn(self, name: str) -> None:
        if name in self._shelf.names():
            self._form.unload(name)
            self._shelf.take(name)

    # ---- memory and end
    async def release_memory(self) -> None:
        """Give the memory of weights and caches back. StateError while requests are running."""
        await self._ranks.call("release", "", self._release)
        if self._ranks.follows:
            await self._form.sleep()

    async def _release(self) -> None:
        if self.state == "ready" and self._items:
            message = "memory cannot be released while requests run; pause the engine first"
            raise StateError(message)
        was, self._open = self.state, False
        try:
            await self._form.sleep()
        except BaseException:
            if was == "ready":
                self._go_on()
            raise

    async def resume_memory(self) -> None:
        """Take the memory again; the engine stays paused."""
        await self._form.wake()

    async def close(self) -> None:
        """Abort what is in flight and end vLLM."""
        if not self._built:
            return
        self._built = self._open = False
        try:
            if hasattr(self, "_sink"):
                await self._end(list(self._items.values()))
        finally:
            await self._form.close()
            self._shelf.clear()

    def health(self) -> Mapping[str, Any]:
        """Return state, versions, adapters and what is in flight."""
        if not self._built or not hasattr(self, "_sink"):
            return {"state": self.state}
        return {
            "state": self.state,
            "weights": self._sink.state,
            "version": self._sink.version,
            "base_version": self._sink.base_version,
            "adapters": self._shelf.names(),
            "requests": len(self._items),
            **self._form.health(),
        }


def _form(options: Mapping[str, Any]) -> Form:
    """Return the form of vLLM that the options ask for."""
    if options["form"] == "server":
        from powertrain_vllm.server import Server

        return Server()
    given = [name for name in ("url", "api_key_env") if options.get(name)]
    if given:
        message = f"vllm?{given[0]}=... says where a server is, and the form is {options['form']!r}; add form=server"
        raise ConfigError(message)
    from powertrain_vllm.inprocess import InProcess

    return InProcess()

"""vLLM in this process: its engine's steps run on a thread of ours, so that every wish is met between two of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, DeadlineError, StateError, WorkerError
from powertrain_vllm import ranks
from powertrain_vllm.adapters import check_room_made
from powertrain_vllm.backend import HOTTEST, Call, name_here, name_there, other
from powertrain_vllm.configs import unpacked
from powertrain_vllm.settings import engine_arguments, in_a_line, typed
from powertrain_vllm.versions import generation, imported

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain_vllm.backend import Heard
    from powertrain_vllm.worker import VllmSink

logger = logging.getLogger(__name__)
CLOSE_SECONDS = 15.0
CALL_SECONDS = 300.0
_living: set[int] = set()
"""Engines of this process that have not been closed."""
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


class InProcess:
    """One rank's vLLM engine. See `Form`.

    ranks: this rank among those of its engine. gone: called with an adapter that rank 0 has dropped.
    """

    max_model_len: int
    vocabulary: int
    ranks: ranks.Alone = ranks.ALONE
    gone: Callable[[str], None]

    def __init__(self) -> None:
        self._engine: Any = None
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._running: dict[str, str] = {}
        self._fault: Exception | None = None
        self._closing = False
        self._salt = self._cached = 0
        self._thread: threading.Thread | None = None
        self._numbers: dict[str, Any] = {}
        self._count = 0

    async def start(self, spec: EngineSpec, options: Mapping[str, Any], heard: Heard) -> None:
        """Load the model here, meet the other ranks, and start the thread."""
        self._heard = heard
        if spec.place.world > 1:
            os.environ.update(ranks.variables(spec.place))
            kind = ranks.Following if spec.place.rank else ranks.Leading
            self.ranks = kind(spec.place, spec.timeout, self._lost)
        await asyncio.to_thread(self._build, spec, options)
        self._thread = threading.Thread(target=self._run, name="powertrain-vllm", daemon=True)
        self._thread.start()
        if isinstance(self.ranks, ranks.Following):
            self.ranks.listen(lambda message: self._post(lambda: self._obey(*message)) and None)

    def _build(self, spec: EngineSpec, options: Mapping[str, Any]) -> None:
        vllm = imported()
        about = generation(vllm.__version__, allow=options.get("untested_version") == "allow")
        os.environ[MULTIPROCESSING] = "0"
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from powertrain_vllm.hooks import lora_ranks
        from powertrain_vllm.worker import Seat, before_load

        before_load(spec.place.world)
        arguments = typed(engine_arguments(spec, options, native_head=about.head_dtype, ranks=lora_ranks()))
        arguments = unpacked(spec) | arguments | ranks.arguments(spec)
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)
        except (TypeError, ValueError) as exc:
            message = f"vLLM {vllm.__version__} does not start with these arguments: {in_a_line(exc)}"
            raise ConfigError(message) from exc
        _living.add(id(self))
        worker = self._engine.model_executor.driver_worker.worker
        self._seat = Seat(worker, self._forget, fp32_head=spec.head.fp32, native_head=about.head_dtype)
        self.vocabulary = self._seat.vocabulary
        self.max_model_len = int(self._engine.model_config.max_model_len)
        self._lora = bool(arguments.get("enable_lora"))
        if isinstance(self.ranks, ranks.Leading | ranks.Following):
            self.ranks.meet()

    # ---- rows
    def submit(self, calls: Sequence[Call]) -> None:
        """Hand over calls; those that come after a fault hear of it at once."""
        self._post(lambda: [self._admit(call) for call in calls])

    async def drop(self, names: Sequence[str]) -> None:
        """End calls between two steps."""
        await asyncio.wrap_future(self._post(lambda: self._drop(set(names))))

    def _drop(self, names: set[str]) -> None:
        running = [self._running.pop(name) for name in names if name in self._running]
        if running:
            self._engine.abort_request(running)
            self.ranks.send("drop", running)

    def _post(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the thread do something between two steps, in the order of these calls."""
        done: Future[Any] = Future()
        self._work.put((work, done))
        if self._thread is None or not self._thread.is_alive():
            self._serve_queue(block=False)  # nobody steps any more, so this thread may
        return done

    def _do(self, work: Callable[[], Any], seconds: float = CALL_SECONDS) -> Any:
        """As `_post`, and wait for its answer; DeadlineError when it does not come."""
        try:
            return self._post(work).result(seconds)
        except FutureTimeout as exc:
            message = f"vLLM's step did not end within {seconds:g} s"
            raise DeadlineError(message, who="powertrain-vllm", what="a step", seconds=seconds) from exc

    def _serve_queue(self, *, block: bool) -> None:
        while True:
            try:
                work, done = self._work.get(block)
            except queue.Empty:
                return
            block = False
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work())
            except BaseException as exc:  # noqa: BLE001 - whoever asked gets it
                done.set_exception(exc)

    def _run(self) -> None:
        while not self._closing:
            self._serve_queue(block=not self._running)
            if not self._running or self._closing:
                continue
            self.ranks.send("step")
            try:
                outputs = self._engine.step()
            except Exception as exc:  # noqa: BLE001 - every call gets it
                self._broken(exc)
                continue
            try:
                for output in outputs:
                    self._tell(output)
            except Exception as exc:  # noqa: BLE001 - as above: a thread that ends in silence would leave them waiting
                self._broken(exc)

    def _admit(self, call: Call) -> None:
        if self._fault is not None or self._closing:
            self._heard(call.name, (), self._fault or StateError("the engine is closed"))
            return
        try:
            self._enter(call, self._salt)
        except Exception as exc:  # noqa: BLE001 - the call gets it, and no other is lost
            message = f"vLLM refuses a request of {len(call.tokens)} tokens: {type(exc).__name__}: {exc}"
            self._heard(call.name, (), ConfigError(message))
            return
        self._running[call.name] = name_there(call)
        self.ranks.send("add", asdict(call), self._salt)

    def _enter(self, call: Call, salt: int) -> None:
        """Give a call to vLLM. salt: rank 0's, so that all ranks find the same prefixes and schedule alike."""
        self._engine.add_request(
            name_there(call),
            {"prompt_token_ids": list(call.tokens), "cache_salt": str(salt)},
            sampling(call),
            lora_request=self._numbers[call.adapter] if call.adapter is not None else None,
        )

    def _obey(self, kind: str, *args: Any) -> None:
        """Do on a rank above 0 what rank 0 does; its outputs are the same and are told by rank 0."""
        if kind in {"open", "closed"} and isinstance(self.ranks, ranks.Following):
            self.ranks.reached(kind)
        if self._fault is not None or self._closing:
            return
        try:
            if kind == "step":
                self._engine.step()
            elif kind == "add":
                self._enter(Call(**args[0]), args[1])
            elif kind == "drop":
                self._engine.abort_request(args[0])
            elif kind == "unload":
                self._remove(args[0])
                self.gone(args[0])
        except Exception as exc:  # noqa: BLE001 - rank 0 hears of it
            self._broken(exc)

    def _tell(self, output: Any) -> None:
        name = name_here(output.request_id)
        if name not in self._running:
            return
        if output.finished:
            del self._running[name]
            self._cached += output.num_cached_tokens or 0
        found = output.outputs[0]
        drawn = []
        for token, told in zip(found.token_ids, found.logprobs or (), strict=True):
            plain, own = told[token].logprob, told[other(token, self.vocabulary)].logprob
            drawn.append((token, own, plain))
        self._heard(name, drawn, found.finish_reason if output.finished else None)

    def _broken(self, exc: Exception) -> None:
        logger.exception("vLLM's step failed")
        message = f"vLLM broke off in a step and answers no more: {type(exc).__name__}: {exc}"
        self._fault = self._fault or StateError(message)
        self.ranks.broke(message)
        self._fail(self._fault)

    def _lost(self, fault: Exception) -> None:
        """Fail all calls, since another rank is gone; from any thread, for this engine's may wait in a collective."""
        logger.log(logging.ERROR if isinstance(fault, WorkerError) else logging.INFO, "%s", fault)
        self._fault = fault
        for name in list(self._running):
            self._heard(name, (), fault)

    def _fail(self, fault: Exception) -> None:
        running, self._running = self._running, {}
        for name in running:
            self._heard(name, (), fault)

    # ---- weights, adapters, memory
    def sink(self) -> VllmSink:
        """Return the sink, which writes into the model's parameters."""
        return self._seat.sink

    def _forget(self) -> None:
        """Let no request find what was computed before now; called by the sink while nothing runs.

        Every request carries the number of these calls as the salt of its prefixes' hashes. vLLM's own way looks at
        each block of the cache, which takes up to tens of milliseconds, and does nothing while a block is in use.
        """
        self._salt += 1

    def load(self, name: str, folder: str) -> None:
        """Load an adapter, so that what is wrong with it shows now."""
        from vllm.lora.request import LoRARequest

        check_room_made(name, self._lora)
        self._count += 1
        # Of each load its own: prefix caches know an adapter by name and path, not by what a folder holds now.
        request = LoRARequest(f"{name}#{self._count}", self._count, folder)
        try:
            loaded = self._do(lambda: self._add(request))
        except DeadlineError:
            raise
        except Exception as exc:
            message = f"vLLM does not take adapter {name!r}: {exc}"
            raise ConfigError(message) from exc
        if not loaded:
            message = f"vLLM did not load adapter {name!r}"
            raise ConfigError(message)
        self._numbers[name] = request

    def _add(self, request: Any) -> bool:
        """Let vLLM load an adapter; one that fails half way would keep its place, and another would lose its own."""
        try:
            return bool(self._engine.add_lora(request))
        except BaseException:
            self._engine.remove_lora(request.lora_int_id)
            raise

    def unload(self, name: str) -> None:
        """Forget an adapter."""
        self._do(lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        request = self._numbers.pop(name, None)
        if request is not None:
            self.ranks.send("unload", name)
            self._engine.remove_lora(request.lora_int_id)

    async def sleep(self) -> None:
        """Move the weights to the host and give up the KV cache; on a CPU only the caches are forgotten."""
        await asyncio.to_thread(self._sleep, True)

    async def wake(self) -> None:
        """Undo `sleep`."""
        await asyncio.to_thread(self._sleep, False)

    def _sleep(self, asleep: bool) -> None:
        self._forget()
        if self._engine.vllm_config.model_config.enable_sleep_mode:
            self._do(lambda: self._engine.sleep(level=1) if asleep else self._engine.wake_up())

    async def close(self) -> None:
        """End the thread and free the engine."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.ranks.close()
        if self._thread is not None:
            self._post(self._end)
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                message = f"vLLM's step did not end within {CLOSE_SECONDS:g} s"
                raise DeadlineError(message, who="powertrain-vllm", what="its end", seconds=CLOSE_SECONDS)
            self._thread = None
        engine, self._engine = self._engine, None
        if engine is not None:
            if hasattr(self, "_seat"):
                self._seat.close()
                del self._seat
            _living.discard(id(self))
            _shut_down(engine, last=not _living)
            del engine
            gc.collect()

    def _end(self) -> None:
        self._closing = True
        self._fail(StateError("the engine was closed"))

    def health(self) -> Mapping[str, Any]:
        """Return how many rows are running, how many prompt tokens prefix caches spared so far, and what broke."""
        return {
            "rows": len(self._running),
            "cached_tokens": self._cached,
            **({"fault": str(self._fault)} if self._fault else {}),
        }


def _shut_down(engine: Any, *, last: bool) -> None:
    """End an engine. vLLM would end the process groups with it, which all engines of this process share."""
    client = engine.engine_core
    if last:
        client.shutdown()
        return
    if hasattr(client, "_finalizer"):
        client._finalizer.detach()
    core = client.engine_core
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()


def sampling(call: Call) -> Any:
    """Return vLLM's parameters of a call: tokens as they come, every one with its log-probs, no text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=call.most,
        temperature=min(call.temperature, HOTTEST),
        top_p=call.top_p,
        top_k=call.top_k,
        stop_token_ids=list(call.stop),
        logprobs=1,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

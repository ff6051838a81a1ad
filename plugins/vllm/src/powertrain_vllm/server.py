"""vLLM behind its OpenAI server: started here on a Unix socket, or one that already runs (option `url`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, DeadlineError, StateError, WorkerError
from powertrain_vllm.http import EXTENSION, Process, environment, flags
from powertrain_vllm.relay import SOCKETS, RemoteSink, Wire, check_private
from powertrain_vllm.settings import OWN, engine_arguments
from powertrain_vllm.versions import generation

if TYPE_CHECKING:
    import aiohttp

    from powertrain.interfaces.build import EngineSpec
    from powertrain_vllm.backend import Call, Drawn, Heard

logger = logging.getLogger(__name__)
START_SECONDS = 600.0
CALL_SECONDS = 120.0
DROP_SECONDS = 60.0
WATCH_SECONDS = 1.0
NAME = "powertrain"
"""The model's name in a server that is started here."""
_LINE = 1 << 24


class Server:
    """One vLLM server and its worker. See `Form`."""

    max_model_len: int
    vocabulary: int

    def __init__(self) -> None:
        self._process: Process | None = None
        self._folder: Path | None = None
        self._session: aiohttp.ClientSession | None = None
        self._wire: Wire | None = None
        self._watch: asyncio.Task[None] | None = None
        self._rows: dict[str, asyncio.Task[None]] = {}
        self._fault: Exception | None = None
        self._closing = self._sleeps = self._lora = False
        self._model, self._base, self._key = NAME, "http://localhost", ""

    # ---- start and end
    async def start(self, spec: EngineSpec, options: Mapping[str, Any], heard: Heard) -> None:
        """Start a server, or attach to one; ConfigError for what does not fit, WorkerError when it dies."""
        self._loop, self._heard = asyncio.get_running_loop(), heard
        if spec.place.world != 1:
            message = f"a vLLM server is driven by one rank, and this engine has {spec.place.world}; t and p of 1 only"
            raise ConfigError(message)
        if options.get("url"):
            native, sockets = await self._attach(spec, options), None
        else:
            native, sockets = await self._launch(spec, options), self._folder
        facts = await self._open(spec, native)
        self._check(facts, spec)
        self.max_model_len, self.vocabulary = int(facts["max_model_len"]), int(facts["vocabulary"])
        folder = sockets or Path(facts["sockets"])
        check_private(folder)
        self._wire = await asyncio.to_thread(Wire, folder, 0, spec.timeout)
        self._sink = await asyncio.to_thread(RemoteSink, self._wire, self._halt, self._go_on, self._forget)
        if self._process is not None:
            self._process.note()
        self._watch = asyncio.create_task(self._watching())

    async def _launch(self, spec: EngineSpec, options: Mapping[str, Any]) -> bool:
        from vllm.version import __version__

        about = generation(__version__, allow=options.get("untested_version") == "allow")
        arguments = engine_arguments(spec, options, native_head=about.head_dtype)
        self._sleeps, self._lora = bool(arguments.get("enable_sleep_mode")), bool(arguments.get("enable_lora"))
        self._folder = Path(tempfile.mkdtemp(prefix="ptv-"))  # mode 0700; short, as paths of sockets have to be
        self._key = os.environ.get(str(options.get("api_key_env")), "") or secrets.token_urlsafe(32)
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags(arguments)]
        argv += [f"--served-model-name={NAME}", f"--worker-extension-cls={EXTENSION}"]
        uds = None
        if options.get("host") or options.get("port"):
            host, port = options.get("host") or "127.0.0.1", int(options.get("port") or 8000)
            argv += [f"--host={host}", f"--port={port}"]
            self._base = f"http://{host}:{port}"
        else:
            uds = str(self._folder / "api.sock")
            argv += [f"--uds={uds}"]
        env = environment(self._folder, self._key, lora=self._lora)
        self._process = await asyncio.to_thread(Process, argv, env, self._folder / "server.log")
        self._connect(uds)
        end = time.monotonic() + START_SECONDS
        while not await self._healthy():
            if self._process.ended() is not None:
                message = f"vLLM's server ended while it started; its last lines:\n{self._process.tail()}"
                raise WorkerError(message, worker="vLLM's server")
            if time.monotonic() > end:
                message = f"vLLM's server did not start within {START_SECONDS:g} s; last lines:\n{self._process.tail()}"
                raise DeadlineError(message, who="vLLM's server", what="its start", seconds=START_SECONDS)
            await asyncio.sleep(0.2)
        return about.head_dtype

    async def _attach(self, spec: EngineSpec, options: Mapping[str, Any]) -> bool:
        url = str(options["url"])
        given = sorted(name for name, value in options.items() if value is not None and name not in OWN)
        if given:
            message = (
                f"the server at {url} runs already, so {', '.join(given)} cannot be set; give it when you start it"
            )
            raise ConfigError(message)
        self._key = os.environ.get(str(options.get("api_key_env")), "")
        self._base = "http://localhost" if url.startswith("unix:") else url.rstrip("/")
        self._connect(url.removeprefix("unix:") if url.startswith("unix:") else None)
        try:
            about = generation(
                str((await self._ask("GET", "/version"))["version"]), allow=options.get("untested_version") == "allow"
            )
            self._model = str((await self._ask("GET", "/v1/models"))["data"][0]["id"])
        except StateError as exc:
            message = f"no vLLM server answers at {url}: {exc}"
            raise ConfigError(message) from exc
        self._sleeps, self._lora = False, True
        return about.head_dtype

    async def _open(self, spec: EngineSpec, native_head: bool) -> Mapping[str, Any]:
        body = {"method": "powertrain_open", "kwargs": {"fp32_head": spec.head.fp32, "native_head": native_head}}
        try:
            results = (await self._ask("POST", "/collective_rpc", body, seconds=spec.timeout))["results"]
        except StateError as exc:
            if self._process is not None:
                message = f"vLLM's worker did not take powertrain in: {exc}\n{self._process.tail(30)}"
                raise WorkerError(message, worker="vLLM's server") from exc
            head = """ --hf-overrides '{"head_dtype": "float32"}'""" if spec.head.fp32 and native_head else ""
            message = (
                f"the server lacks powertrain's extension, by which draws are keyed and weights are updated ({exc}). "
                f"Start it on this host with: {SOCKETS}=FOLDER VLLM_SERVER_DEV_MODE=1 "
                f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {spec.model} --dtype {spec.dtype} "
                f"--seed {spec.seed % 2**31} --worker-extension-cls {EXTENSION}{head} (FOLDER: yours, of mode 0700)"
            )
            raise ConfigError(message) from exc
        if len(results) != 1:
            message = f"the server spreads its model over {len(results)} workers; the layout has 1 (t=1, p=1)"
            raise ConfigError(message)
        found: Mapping[str, Any] = results[0]
        return found

    def _check(self, facts: Mapping[str, Any], spec: EngineSpec) -> None:
        """Compare what runs with what the layout says."""
        wanted = {
            "tensor": spec.axes.get("t", 1),
            "pipeline": spec.axes.get("p", 1),
            "dtype": spec.dtype,
            "fp32_head": spec.head.fp32,
        }
        wrong = [
            f"{name} is {facts[name]} there and {value} here" for name, value in wanted.items() if facts[name] != value
        ]
        if Path(facts["model"]).resolve() != Path(spec.model).resolve():
            wrong.append(f"model is {facts['model']} there and {spec.model} here")
        if wrong:
            message = f"the server does not fit the layout: {'; '.join(wrong)}. Change the one or start the other anew"
            raise ConfigError(message)

    def _connect(self, uds: str | None) -> None:
        import aiohttp

        connector = aiohttp.UnixConnector(uds, limit=0) if uds else aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            read_bufsize=_LINE,
            trust_env=False,
        )

    async def close(self) -> None:
        """End rows, connections and a server that was started here; nothing of it is left."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        self._break(StateError("the engine was closed"))
        if self._wire is not None:
            await asyncio.to_thread(self._wire.close)
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._process is not None:
            await asyncio.to_thread(self._process.end)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- talking
    async def _ask(self, method: str, path: str, body: Any = None, *, seconds: float = CALL_SECONDS) -> Any:
        """Send one request; StateError when it does not go through, with what the server says."""
        import aiohttp

        if self._session is None:
            message = "the engine is closed"
            raise StateError(message)
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, self._base + path, json=body, timeout=limit) as response:
                text = await response.text()
                status = response.status
        except TimeoutError as exc:
            message = f"vLLM's server did not answer {path} within {seconds:g} s"
            raise DeadlineError(message, who="vLLM's server", what=path, seconds=seconds) from exc
        except (aiohttp.ClientError, OSError) as exc:
            message = f"vLLM's server is out of reach: {type(exc).__name__}: {exc}"
            raise StateError(message) from exc
        if status != 200:
            message = f"vLLM's server answers {path} with status {status}: {text[:1000]}"
            raise StateError(message)
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    async def _healthy(self) -> bool:
        try:
            await self._ask("GET", "/health", seconds=10.0)
        except (StateError, DeadlineError):
            return False
        return True

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the engine's loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * CALL_SECONDS)

    async def _watching(self) -> None:
        """End everything when the server or its engine dies; vLLM itself leaves its API process behind."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            process = self._process
            try:
                await self._ask("GET", "/health", seconds=30.0)
            except DeadlineError:  # busy; a server that is dead refuses at once
                continue
            except StateError as exc:
                tail = f"; its last lines:\n{process.tail()}" if process is not None else ""
                message = f"vLLM's server has died ({exc}){tail}"
                self._break(WorkerError(message, worker="vLLM's server"))
                if self._wire is not None:
                    self._wire.close()
                if process is not None:
                    await asyncio.to_thread(process.end, ask=False)
                return

    def _break(self, fault: Exception) -> None:
        self._fault = self._fault or fault
        rows, self._rows = self._rows, {}
        for name, task in rows.items():
            task.cancel()
            self._heard(name, (), self._fault)

    # ---- rows
    def submit(self, calls: Sequence[Call]) -> None:
        """Hand over calls, each as one streaming request; those that come after a fault hear of it at once."""
        for call in calls:
            if self._fault is not None:
                self._heard(call.name, (), self._fault)
                continue
            self._rows[call.name] = self._loop.create_task(self._run(call))

    async def _run(self, call: Call) -> None:
        ending: str | Exception
        try:
            ending = await self._stream(call)
        except asyncio.CancelledError:
            raise
        except Exception as exc:  # noqa: BLE001 - the caller hears of it
            ending = self._fault or exc
        if self._rows.pop(call.name, None) is not None:
            self._heard(call.name, (), ending)

    async def _stream(self, call: Call) -> str:
        import aiohttp

        assert self._session is not None
        headers = {"X-Request-Id": call.name}
        try:
            async with self._session.post(
                f"{self._base}/v1/completions", json=self._body(call), headers=headers
            ) as response:
                if response.status != 200:
                    message = f"vLLM's server refuses a request of {len(call.tokens)} tokens: {await response.text()}"
                    raise (ConfigError if 400 <= response.status < 500 else StateError)(message)
                async for line in response.content:
                    text = line.decode().strip().removeprefix("data:").strip()
                    if not text or text == "[DONE]":
                        continue
                    drawn, ending = self._told(json.loads(text))
                    if ending in {"stop", "length"}:
                        if drawn:
                            self._heard(call.name, drawn, None)
                        return str(ending)
                    if drawn and call.name in self._rows:
                        self._heard(call.name, drawn, None)
                    if ending is not None:
                        message = f"vLLM's server ended a request by itself: {ending}"
                        raise StateError(message)
        except (aiohttp.ClientError, OSError) as exc:
            message = f"the connection to vLLM's server was lost: {type(exc).__name__}: {exc}"
            raise StateError(message) from exc
        message = "vLLM's server broke a request off without saying why"
        raise StateError(message)

    def _body(self, call: Call) -> dict[str, Any]:
        return {
            "model": call.adapter or self._model,
            "prompt": list(call.tokens),
            "max_tokens": call.most,
            "temperature": call.temperature,
            "top_p": call.top_p,
            "top_k": call.top_k,
            "seed": call.key & (2**63 - 1),
            "stop_token_ids": list(call.stop),
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "detokenize": False,
            "stream": True,
        }

    def _told(self, chunk: Mapping[str, Any]) -> tuple[list[Drawn], str | None]:
        """Return what a chunk says: tokens with both log-probs, and how the request ended."""
        if "choices" not in chunk:
            message = f"vLLM's server ended a request with an error: {json.dumps(chunk)[:1000]}"
            raise StateError(message)
        if not chunk["choices"]:
            return [], None
        choice = chunk["choices"][0]
        tokens = choice.get("token_ids") or []
        told = (choice.get("logprobs") or {}).get("top_logprobs") or []
        drawn = []
        for token, both in zip(tokens, told, strict=True):
            other = f"token_id:{(token + 1) % self.vocabulary}"
            drawn.append((int(token), float(both[other]), float(both[f"token_id:{token}"])))
        return drawn, choice.get("finish_reason")

    async def drop(self, names: Sequence[str]) -> None:
        """Close the requests' streams, by which vLLM aborts them, and wait until its worker holds none of them."""
        tasks = [task for name in names if (task := self._rows.pop(name, None)) is not None]
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=DROP_SECONDS)
        end = time.monotonic() + DROP_SECONDS
        while self._fault is None:
            rows = (await self._ask("POST", "/collective_rpc", {"method": "powertrain_rows"}))["results"][0]
            if not any(f"{name}-" in row for name in names for row in rows):
                return
            if time.monotonic() > end:
                message = f"vLLM still runs {len(rows)} rows {DROP_SECONDS:g} s after they were aborted"
                raise DeadlineError(message, who="vLLM's server", what="an abort", seconds=DROP_SECONDS)
            await asyncio.sleep(0.01)

    # ---- weights, adapters, memory
    def sink(self) -> RemoteSink:
        """Return what stands for the worker's sink."""
        return self._sink

    def _halt(self) -> None:
        self._wait(self._ask("POST", "/pause?mode=keep"))

    def _go_on(self) -> None:
        self._wait(self._ask("POST", "/resume"))

    def _forget(self) -> None:
        self._wait(self.reset_caches())

    async def reset_caches(self) -> None:
        """Forget all prefix caches; frozen requests of others compute theirs anew."""
        await self._ask("POST", "/reset_prefix_cache?reset_running_requests=true")

    def load(self, name: str, folder: str) -> None:
        """Load an adapter; ConfigError where the server does not take it."""
        if not self._lora:
            message = f"adapter {name!r} cannot be loaded: vLLM was started without room for any; set enable_lora=true"
            raise ConfigError(message)
        try:
            self._wait(self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}))
        except StateError as exc:
            message = f"vLLM does not take adapter {name!r}: {exc}"
            raise ConfigError(message) from exc

    def unload(self, name: str) -> None:
        """Forget an adapter; one that is not there is passed over."""
        with contextlib.suppress(StateError):
            self._wait(self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}))

    async def sleep(self) -> None:
        """Give the device's memory back where sleep mode is on; else only the caches are forgotten."""
        await self.reset_caches()
        if self._sleeps:
            await self._ask("POST", "/sleep?level=1")

    async def wake(self) -> None:
        """Undo `sleep`."""
        if self._sleeps:
            await self._ask("POST", "/wake_up")
        await self.reset_caches()

    def health(self) -> Mapping[str, Any]:
        """Return how many rows are running, and what broke."""
        return {"rows": len(self._rows), **({"fault": str(self._fault)} if self._fault else {})}

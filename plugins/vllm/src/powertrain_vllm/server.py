"""vLLM as its own OpenAI server: started here and ended with the engine, or one that runs already."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from powertrain.errors import ConfigError, PowertrainError, StateError
from powertrain.runtime import wire
from powertrain_vllm.adapters import check_room_made
from powertrain_vllm.configs import read, unpacked
from powertrain_vllm.http import Client, RefusedError
from powertrain_vllm.launched import Launched
from powertrain_vllm.ranks import ALONE
from powertrain_vllm.relay import Caller
from powertrain_vllm.remote import RemoteSink
from powertrain_vllm.serving import HOW, KEY, ROUTES
from powertrain_vllm.settings import OWN, engine_arguments
from powertrain_vllm.versions import generation

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain_vllm.backend import Call, Heard

logger = logging.getLogger(__name__)
CLOSE_SECONDS: Final = 10.0


class Server:
    """One vLLM server of one rank. See `Form`.

    Requests and adapters go over HTTP; weights go to the worker that holds them, by a socket in the server's private
    folder, so engine and server share a host. An update never pauses vLLM: the engine holds requests back itself.
    """

    max_model_len: int
    vocabulary: int
    ranks = ALONE
    gone: Callable[[str], None]

    def __init__(self) -> None:
        self._launched: Launched | None = None
        self._client: Client | None = None
        self._caller: Caller | None = None
        self._name = "vLLM's server"
        self._prefix = ""
        self._about: dict[str, Any] = {}
        self._loaded: dict[str, str] = {}
        self._asleep = self._closed = False
        self._ending = threading.Lock()

    async def start(self, spec: EngineSpec, options: Mapping[str, Any], heard: Heard) -> None:
        """Start a server, or (option `url`) attach to one. ConfigError for one that does not fit."""
        if spec.place.world != 1:
            message = f"form=server runs an engine of one rank, and this one has {spec.place.world}; use d for more"
            raise ConfigError(message)
        await asyncio.to_thread(self._start, spec, options, heard)

    def _start(self, spec: EngineSpec, options: Mapping[str, Any], heard: Heard) -> None:
        try:
            self._open(spec, options, heard)
            with self._ending:
                if self._closed:
                    message = "the engine was closed while its server started"
                    raise StateError(message)
        except BaseException:  # nothing is left of a start that failed, whether or not anybody closes the engine
            self._close()
            raise

    def _launch(self, spec: EngineSpec, options: Mapping[str, Any]) -> Launched:
        from powertrain_vllm.hooks import lora_ranks

        native = generation(_installed(), allow=options.get("untested_version") == "allow").head_dtype
        arguments = unpacked(spec) | engine_arguments(spec, options, native_head=native, ranks=lora_ranks())
        with self._ending:
            if self._closed:
                message = "the engine was closed before its server started"
                raise StateError(message)
            self._launched = Launched(spec, options, arguments)
        self._launched.start()
        return self._launched

    def _open(self, spec: EngineSpec, options: Mapping[str, Any], heard: Heard) -> None:
        if options.get("url"):
            url, key = _place(options)
            self._name = f"the vLLM server at {url}"
        else:
            if options.get("api_key_env"):
                message = "api_key_env names the key of a server that runs already; give its url, or leave both out"
                raise ConfigError(message)
            launched = self._launch(spec, options)
            url, key = launched.url, launched.key
            self._name = f"vLLM's server (process {launched.pid}, {url})"
        self._client = Client(url, key, name=self._name, heard=heard, lost=self._lost)
        self._client.open()
        self._read(spec, options)
        self._sit(spec)
        self._client.watch()

    # ---- what the server is
    @property
    def _http(self) -> Client:
        if self._client is None:
            message = "the engine has no server"
            raise StateError(message)
        return self._client

    def _read(self, spec: EngineSpec, options: Mapping[str, Any]) -> None:
        """Read what the server runs; ConfigError where it is not what the run needs."""
        try:
            about = self._http.call("GET", f"{ROUTES}about")
        except RefusedError as exc:
            if exc.status == 401:
                variable = options.get("api_key_env")
                what = f"the variable {variable} holds another key" if variable else f"say where {KEY} is: api_key_env"
                message = f"{self._name} refuses the API key ({exc}); {what}"
            else:
                message = f"{self._name} has nothing of powertrain ({exc}); {HOW}"
            raise ConfigError(message) from exc
        except StateError as exc:
            message = f"nothing answers: {exc}"
            raise ConfigError(message) from exc
        self._native_head = generation(about["vllm"], allow=options.get("untested_version") == "allow").head_dtype
        if self._launched is None:
            _check_fits(self._name, about, spec)
        self._about = about
        self.max_model_len = about["max_model_len"]
        self._http.model = about["name"]

    def _sit(self, spec: EngineSpec) -> None:
        """Have seats made in the workers, and open the line to the one that holds this rank's weights."""
        try:
            body = {"fp32_head": spec.head.fp32, "native_head": self._native_head}
            seats = self._http.call("POST", f"{ROUTES}sit", body)["seats"]
        except RefusedError as exc:
            message = f"{self._name} has no extension of powertrain in its workers ({exc}); {HOW}"
            raise ConfigError(message) from exc
        for rank, seat in enumerate(seats):
            if "fault" in seat:
                raise wire.rebuilt(seat["fault"], engine=self._name, rank=rank)
        seat = seats[spec.place.rank]
        self.vocabulary = self._http.vocabulary = seat["vocabulary"]
        self._prefix = seat["prefix"]
        who = f"the worker (process {seat['process']}) of {self._name}"
        self._caller = Caller(seat["path"], prefix=self._prefix, who=who, lost=self._why_lost)
        self._sink = RemoteSink(self._caller, self._forget)

    # ---- rows
    def submit(self, calls: Sequence[Call]) -> None:
        """Hand over rows; each is a request of its own."""
        there = self._loaded
        self._http.submit(
            [c if c.adapter is None else replace(c, adapter=there.get(c.adapter, c.adapter)) for c in calls]
        )

    async def drop(self, names: Sequence[str]) -> None:
        """End rows; what they drew until then has been heard."""
        await self._http.drop(names)

    # ---- weights, adapters, memory
    def sink(self) -> RemoteSink:
        """Return the sink, which writes into the worker's parameters."""
        return self._sink

    def _forget(self) -> None:
        try:
            done = self._http.call("POST", f"{ROUTES}forget")["done"]
        except RefusedError as exc:
            message = f"{self._name} did not reset its prefix cache: {exc}"
            raise StateError(message) from exc
        if not done:
            message = f"{self._name} did not give its prefix cache up; a request is running that should not be"
            raise StateError(message)

    def load(self, name: str, folder: str) -> None:
        """Load an adapter, so that what is wrong with it shows now."""
        check_room_made(name, self._about["lora"])
        # Of each load its own: prefix caches know an adapter by name and path, not by what a folder holds now.
        there = f"{name}#{secrets.token_hex(4)}"
        try:
            self._http.call("POST", "/v1/load_lora_adapter", {"lora_name": there, "lora_path": str(folder)})
        except RefusedError as exc:
            hint = "; is VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 set there?" if exc.status in {404, 405} else ""
            message = f"vLLM does not take adapter {name!r}: {exc}{hint}"
            raise ConfigError(message) from exc
        self._loaded[name] = there

    def unload(self, name: str) -> None:
        """Forget an adapter."""
        if name in self._loaded:
            there = self._loaded.pop(name)
            try:
                self._http.call("POST", "/v1/unload_lora_adapter", {"lora_name": there})
            except RefusedError as exc:
                if exc.status != 404:
                    message = f"{self._name} does not drop adapter {name!r}: {exc}"
                    raise StateError(message) from exc

    async def sleep(self) -> None:
        """Move the weights to the host and give up the KV cache; on a CPU only the caches are forgotten."""
        await asyncio.to_thread(self._sleep, True)

    async def wake(self) -> None:
        """Undo `sleep`."""
        await asyncio.to_thread(self._sleep, False)

    def _sleep(self, asleep: bool) -> None:
        if asleep:
            self._forget()
        if self._about["sleep"] and asleep != self._asleep:
            try:
                self._http.call("POST", f"{ROUTES}{'sleep' if asleep else 'wake'}")
            except RefusedError as exc:
                message = f"{self._name} did not {'go to sleep' if asleep else 'wake'}: {exc}"
                raise StateError(message) from exc
            self._asleep = asleep
        if not asleep:
            self._forget()

    # ---- end
    def _lost(self, reason: str) -> None:
        """The server is dead: its processes, of which some may linger, are ended, and its log is told."""
        launched = self._launched
        if launched is None or self._closed:
            return

        def bury() -> None:
            logger.error("%s is dead (%s); the end of its log:\n%s", self._name, reason, launched.log())
            launched.kill()

        threading.Thread(target=bury, name="powertrain-vllm-bury", daemon=True).start()

    def _why_lost(self) -> str:
        if self._client is not None and self._client.fault is not None:
            return str(self._client.fault)
        code = self._launched.code if self._launched is not None else None
        return Launched.how(code) if code is not None else ""

    async def close(self) -> None:
        """End a server that was started here; leave an attached one as it was found."""
        with self._ending:
            self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._launched is None and self._client is not None and self._client.fault is None:
            self._leave()
        if self._caller is not None:
            self._caller.close()
        if self._client is not None:
            self._client.close()
        if self._launched is not None:
            self._launched.close()
            if self._prefix:
                wire.sweep(self._prefix)

    def _leave(self) -> None:
        """Give an attached server back: awake, without this engine's adapters."""
        with suppress(PowertrainError, RefusedError):
            if self._asleep:
                self._sleep(False)
        for name in list(self._loaded):
            with suppress(PowertrainError, RefusedError):
                self.unload(name)

    def health(self) -> Mapping[str, Any]:
        """Return how many rows are running, where the server is, and what broke."""
        if self._client is None:
            return {}
        fault = self._client.fault
        facts = {"rows": self._client.rows, "server": self._name, "attached": self._launched is None}
        return {**facts, **({"fault": str(fault)} if fault else {})}


def _place(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return url and key of a server to attach to."""
    url, variable = str(options["url"]).rstrip("/"), options.get("api_key_env")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path or parts.query or parts.username:
        message = f"vllm?url={parts.scheme}://... is no address of a server; write http://host:port, and no more"
        raise ConfigError(message)
    own = {"dtype"}  # checked against the run's by `engine_arguments`, and against the server's below
    given = [name for name, value in options.items() if value is not None and name not in {*OWN, *own}]
    if given:
        message = f"{', '.join(given)}: said when a server is started, and the one at {url} runs already; leave it out"
        raise ConfigError(message)
    if variable and variable not in os.environ:
        message = f"api_key_env={variable}: this process has no variable of that name; set it to the server's key"
        raise ConfigError(message)
    return url, os.environ[variable] if variable else ""


def _check_fits(name: str, about: Mapping[str, Any], spec: EngineSpec) -> None:
    """ConfigError where an attached server does not run what the run is about."""
    ranks = about["t"] * about["p"] * about["d"]
    if ranks != spec.place.world:
        message = (
            f"{name} computes on {ranks} ranks (t{about['t']} p{about['p']} d{about['d']}), and this engine has "
            f"{spec.place.world}; attach to a server of that many"
        )
        raise ConfigError(message)
    if about["dtype"] != spec.dtype:
        message = f"{name} runs in {about['dtype']}, and the run's dtype is {spec.dtype}; start it with --dtype"
        raise ConfigError(message)
    if about["generation_config"] != "vllm":
        message = (
            f"{name} takes defaults of sampling from the model (--generation-config {about['generation_config']}), "
            "which would change what requests ask for; start it with --generation-config vllm"
        )
        raise ConfigError(message)
    if not Path(about["folder"]).is_dir():
        message = f"{name} has its folder {about['folder']} on another host; engine and server share a host"
        raise ConfigError(message)
    if _config(about["model"]) != _config(spec.model):
        message = f"{name} serves {about['model']}, and the run's model is {spec.model}; their configs differ"
        raise ConfigError(message)


def _config(folder: str) -> Any:
    found = read(folder)
    return {name: value for name, value in found.items() if name != "_name_or_path"} if found else str(folder)


def _installed() -> str:
    """Return the version of the vLLM that is installed, whatever its dist is called, without importing it."""
    dists = packages_distributions().get("vllm")
    if not dists:
        message = "vLLM is not installed; pip install 'powertrain-vllm[engine]'"
        raise ConfigError(message)
    return version(dists[0])

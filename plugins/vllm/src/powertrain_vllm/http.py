"""The HTTP client of a vLLM server: rows as streams of /v1/completions, and calls of its other routes.

All of it runs on an event loop of its own, so that tokens are read whatever the engine's loop is busy with.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError, DeadlineError, StateError
from powertrain.runtime.host import LoopThread
from powertrain_vllm.backend import HOTTEST, name_there, other
from powertrain_vllm.serving import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from powertrain_vllm.backend import Call, Drawn

CALL_SECONDS: Final = 300.0
CONNECT_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 2.0
"""An idle connection is not used again after it: vLLM closes those of 5 seconds, and a request sent then is lost."""
TOKEN: Final = "token_id:"
LOOK_SECONDS: Final = 1.0
STUCK_SECONDS: Final = 60.0
"""Without an answer to /health for so long a server counts as dead."""


class RefusedError(Exception):
    """The server answered with an error. status: HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """heard: as `backend.Heard`. lost(reason): called once, on the client's thread, when the server is found dead.

    name: how messages call the server. The key goes into a header of every request and nowhere else.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        name: str,
        heard: Callable[[str, Sequence[Drawn], str | Exception | None], None],
        lost: Callable[[str], None],
    ) -> None:
        self._url, self._key, self._name = url.rstrip("/"), key, name
        self._heard, self._lost = heard, lost
        self._thread = LoopThread("powertrain-vllm-http")
        self._session: Any = None
        self._rows: dict[str, tuple[asyncio.Task[None], Call]] = {}
        self._sent: set[str] = set()
        self._dropped: set[str] = set()
        self.fault: StateError | None = None
        self.model, self.vocabulary = "", 0

    @property
    def rows(self) -> int:
        """Number of rows that are running."""
        return len(self._rows)

    def open(self) -> None:
        """Begin; every other method comes after it."""
        self._wait(self._open(), CONNECT_SECONDS, "its client")

    async def _open(self) -> None:
        import aiohttp

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max(8, min(soft // 2, 4096))
        self._room = asyncio.Semaphore(most)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout, trust_env=False)

    def watch(self) -> None:
        """From now on look whether the server lives."""
        self._thread.submit(self._watch())

    def close(self) -> None:
        """End the client's thread; rows that still run hear nothing more. May be called twice."""
        if self._thread.alive:
            if self._session is not None:
                self._dropped.update(self._rows)
                self._wait(self._shut(), CONNECT_SECONDS, "its client's end")
            self._thread.stop()

    async def _shut(self) -> None:
        for task, _ in self._rows.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in self._rows.values()), return_exceptions=True)
        await self._session.close()

    def _wait(self, work: Any, seconds: float, what: str) -> Any:
        future = self._thread.submit(work)
        try:
            return future.result(seconds)
        except FutureTimeout as exc:
            if future.done():
                raise
            future.cancel()
            message = f"{self._name} did not answer within {seconds:g} s: {what}"
            raise DeadlineError(message, who=self._name, what=what, seconds=seconds) from exc

    # ---- calls
    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = CALL_SECONDS
    ) -> Any:
        """Call a route from any thread but the client's; returns the JSON answer, or the text of another kind.

        RefusedError for a status that is not 200, StateError where the server has gone, DeadlineError.
        """
        if self.fault is not None:
            raise self.fault
        return self._wait(self.ask(method, path, body, seconds=seconds), seconds + 5.0, path)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = CALL_SECONDS
    ) -> Any:
        """As `call`, on the client's loop."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(method, f"{self._url}{path}", json=body, timeout=timeout) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise RefusedError(answer.status, _told(answer.status, text))
                return json.loads(text) if "json" in answer.content_type else text
        except TimeoutError as exc:
            message = f"{self._name} did not answer {path} within {seconds:g} s"
            raise DeadlineError(message, who=self._name, what=path, seconds=seconds) from exc
        except aiohttp.ClientError as exc:
            raise self.fault or self._gone(exc) from exc

    def _gone(self, exc: BaseException) -> StateError:
        message = f"{self._name} cannot be reached ({type(exc).__name__}); it has ended, or broke the connection off"
        return StateError(message)

    # ---- rows
    def submit(self, calls: Sequence[Call]) -> None:
        """Begin rows; from any thread."""
        self._thread.loop.call_soon_threadsafe(self._begin, calls)

    def _begin(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if self.fault is not None:
                self._heard(call.name, (), self.fault)
            else:
                self._rows[call.name] = (self._thread.loop.create_task(self._row(call)), call)

    async def _row(self, call: Call) -> None:
        ending: str | Exception | None = None
        try:
            async with self._room:
                self._sent.add(call.name)
                ending = await self._stream(call)
        except asyncio.CancelledError:
            self._dropped.add(call.name)  # nobody waits for it
        except RefusedError as exc:
            message = f"vLLM refuses a request of {len(call.tokens)} tokens: {exc}"
            ending = ConfigError(message) if exc.status < 500 else StateError(f"{self._name}: {exc}")
        except Exception as exc:  # noqa: BLE001 - the row's caller gets it
            ending = self.fault or (exc if isinstance(exc, StateError) else self._gone(exc))
        finally:
            self._rows.pop(call.name, None)
            self._sent.discard(call.name)
        if call.name in self._dropped:
            self._dropped.discard(call.name)
            if ending in {"stop", "length"}:
                self._heard(call.name, (), ending)
        else:
            self._heard(call.name, (), ending)

    async def _stream(self, call: Call) -> str:
        """Hand a row's tokens on as they come; returns how it ended."""
        ending = ""
        headers = {"X-Request-Id": name_there(call)}
        body = completion(call, self.model)
        async with self._session.post(f"{self._url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise RefusedError(answer.status, _told(answer.status, await answer.text()))
            async for data in _events(answer.content):
                if data == b"[DONE]":
                    break
                found = json.loads(data)
                if "error" in found:
                    message = f"{self._name} broke a request off: {found['error'].get('message', found['error'])}"
                    raise StateError(message)
                for choice in found["choices"]:
                    drawn = self._drawn(choice.get("logprobs"))
                    if drawn:
                        self._heard(call.name, drawn, None)
                    ending = choice.get("finish_reason") or ending
        if ending == "abort" and call.name not in self._dropped:
            message = f"{self._name} ended a request that nobody here aborted"
            raise StateError(message)
        if not ending:
            message = f"{self._name} broke a request off without saying how it ended"
            raise StateError(message)
        return ending

    def _drawn(self, told: Mapping[str, Any] | None) -> list[Drawn]:
        drawn = []
        for token, plain, top in (
            zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True) if told else ()
        ):
            number = int(token.removeprefix(TOKEN))
            drawn.append((number, float(top[f"{TOKEN}{other(number, self.vocabulary)}"]), float(plain)))
        return drawn

    def drop(self, names: Sequence[str]) -> asyncio.Future[None]:
        """End rows and return an awaitable; see `backend.Form.drop`. Called on the engine's loop."""
        return asyncio.wrap_future(self._thread.submit(self._drop(names)))

    async def _drop(self, names: Sequence[str]) -> None:
        open_rows = {name: self._rows[name] for name in names if name in self._rows}
        self._dropped.update(open_rows)
        for name, (task, _) in open_rows.items():
            if name not in self._sent:
                task.cancel()
        end = self._thread.loop.time() + CALL_SECONDS
        pause = 0.02
        while tasks := [task for task, _ in open_rows.values() if not task.done()]:
            there = [name_there(call) for task, call in open_rows.values() if not task.done()]
            try:
                # Again until all have ended: a request that is on its way there is not known there yet.
                await self.ask("POST", f"{ROUTES}drop", {"names": there})
            except (StateError, RefusedError):
                if self.fault is None:
                    await self._look_for(LOOK_SECONDS)
            await asyncio.wait(tasks, timeout=pause)
            pause = min(1.0, 2 * pause)
            if self._thread.loop.time() > end:
                message = f"{self._name} did not end {len(tasks)} requests within {CALL_SECONDS:g} s"
                raise DeadlineError(message, who=self._name, what="the end of requests", seconds=CALL_SECONDS)
        if open_rows and self.fault is None:
            await self.ask("POST", f"{ROUTES}drop", {"names": []})  # steps that were on their way are done now

    # ---- life
    async def _watch(self) -> None:
        while self.fault is None:
            await self._look_for(STUCK_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_for(self, seconds: float) -> None:
        """Look at the server's health; one that is dead is noted, and all rows hear of it."""
        try:
            await self.ask("GET", "/health", seconds=seconds)
        except (StateError, RefusedError, DeadlineError) as exc:
            if self.fault is None:
                self.die(str(exc) or type(exc).__name__)

    def die(self, reason: str) -> None:
        """Take the server for dead, on the client's thread: what runs hears of it, and what comes."""
        self.fault = StateError(f"{self._name} is dead and answers no more: {reason}")
        self._lost(reason)
        for name, (task, _) in list(self._rows.items()):
            if name not in self._dropped:
                self._heard(name, (), self.fault)
                self._dropped.add(name)
            task.cancel()


def completion(call: Call, model: str) -> dict[str, Any]:
    """Return a row as the body of /v1/completions: what a server's own defaults could change is said."""
    return {
        "model": call.adapter or model,
        "prompt": list(call.tokens),
        "max_tokens": call.most,
        "temperature": min(call.temperature, HOTTEST),
        "top_p": call.top_p,
        "top_k": call.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(call.stop),
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "stream": True,
    }


async def _events(content: Any) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, however long a line is."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _told(status: int, text: str) -> str:
    """Return the message of an error's body, or at least its status."""
    try:
        found = json.loads(text)
        found = found.get("error", found.get("detail", found))
        return str(found.get("message", found) if isinstance(found, dict) else found)[:2000]
    except (ValueError, AttributeError):
        return text[:2000] or f"HTTP {status}"

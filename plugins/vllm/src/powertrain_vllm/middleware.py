"""What powertrain adds to vLLM's API server: `--middleware powertrain_vllm.middleware.Middleware`, an ASGI one.

vLLM has these as routes of its development mode, which then answer everybody, some of them anything. Here are the few
that an engine needs, for who has the API key:

    GET  /powertrain/about    what the server runs
    POST /powertrain/sit      {fp32_head, native_head}: seats in all workers -> what each says
    POST /powertrain/drop     {names}: end requests; returns when no worker has a step of theirs before it
    POST /powertrain/forget   reset the prefix cache -> {done}
    POST /powertrain/sleep, /powertrain/wake
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from powertrain_vllm.serving import FOLDER, KEY, OWNED, ROUTES, id_there, private

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
OPEN = ("/health",)
"""Paths of an owned server that answer without the key; vLLM itself guards few others than /v1."""
MOST = 16 << 20
"""Bytes of a request's body."""


class Middleware:
    """See above. Without the folder's variable it hands everything on."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._folder = os.environ.get(FOLDER, "")
        self._key = os.environ.get(KEY, "")
        self._owned = os.environ.get(OWNED) == "1"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer our own routes; for an owned server, ask for the key on all others but `OPEN`."""
        if not self._folder or scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        ours = path.startswith(ROUTES)
        if (ours or (self._owned and path not in OPEN)) and not self._has_key(scope):
            await _refuse(scope, send, self._key != "")
        elif ours and scope["type"] == "http":
            status, answer = await self._answer(scope, path.removeprefix(ROUTES), receive)
            await _reply(send, status, answer)
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Without a key nobody may use our routes: they write weights."""
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        return bool(self._key) and hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode())

    async def _answer(self, scope: Scope, route: str, receive: Receive) -> tuple[int, dict[str, Any]]:
        state = scope["app"].state
        found = getattr(self, f"_{scope['method'].lower()}_{route}", None) if route.isidentifier() else None
        if found is None:
            return 404, {"error": f"there is no {scope['method']} {ROUTES}{route}"}
        try:
            body = json.loads(await _body(receive) or b"{}")
            return 200, await found(state, body)
        except asyncio.CancelledError:
            raise
        except Exception as exc:  # noqa: BLE001 - the engine gets it
            return 500, {"error": f"{type(exc).__name__}: {exc}"}

    async def _get_about(self, state: Any, body: dict[str, Any]) -> dict[str, Any]:
        from vllm import __version__

        config = state.engine_client.vllm_config
        model, parallel = config.model_config, config.parallel_config
        names = getattr(state, "openai_serving_models", None)
        return {
            "vllm": __version__,
            "process": os.getpid(),
            "folder": str(private(self._folder)),
            "model": str(model.model),
            "name": names.base_model_paths[0].name if names else str(model.model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "generation_config": str(model.generation_config),
            "seed": int(model.seed or 0),
            "lora": config.lora_config is not None,
            "sleep": bool(model.enable_sleep_mode),
            "t": int(parallel.tensor_parallel_size),
            "p": int(parallel.pipeline_parallel_size),
            "d": int(parallel.data_parallel_size),
        }

    async def _post_sit(self, state: Any, body: dict[str, Any]) -> dict[str, Any]:
        asked = (bool(body["fp32_head"]), bool(body["native_head"]))
        return {"seats": await state.engine_client.collective_rpc("powertrain_sit", args=asked)}

    async def _post_drop(self, state: Any, body: dict[str, Any]) -> dict[str, Any]:
        engine = state.engine_client
        await engine.abort([id_there(name) for name in body["names"]])
        await engine.collective_rpc("powertrain_fence")
        return {}

    async def _post_forget(self, state: Any, body: dict[str, Any]) -> dict[str, Any]:
        return {"done": bool(await state.engine_client.reset_prefix_cache())}

    async def _post_sleep(self, state: Any, body: dict[str, Any]) -> dict[str, Any]:
        await state.engine_client.sleep(level=1)
        return {}

    async def _post_wake(self, state: Any, body: dict[str, Any]) -> dict[str, Any]:
        await state.engine_client.wake_up()
        return {}


async def _body(receive: Receive) -> bytes:
    found, more = bytearray(), True
    while more:
        message = await receive()
        found += message.get("body", b"")
        more = message.get("more_body", False)
        if len(found) > MOST:
            message_ = f"a body of more than {MOST} bytes"
            raise ValueError(message_)
    return bytes(found)


async def _refuse(scope: Scope, send: Send, keyed: bool) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    why = "the API key is missing or wrong" if keyed else f"the server was started without {KEY}"
    await _reply(send, 401, {"error": why})


async def _reply(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

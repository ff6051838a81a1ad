"""The server form: what it is started with and leaves behind, updates by real transfers, deaths, and attaching."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest
from flying import with_adapter
from vllm_servers import KEY, KEY_NAME, Running, restore

from powertrain import EngineSpec, GenerateRequest, SamplingParams
from powertrain.errors import ConfigError, PowertrainError, StateError, TransferError, UnfitError
from powertrain.interfaces.build import OptimSpec, RankSpec
from powertrain.interfaces.data import LossSpec, TrainBatch
from powertrain.interfaces.weights import Piece
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.testing.tensors.models import checkpoint, tiny_model
from powertrain.testing.tensors.reference import regret, replay
from powertrain.testing.tensors.weights import adapter, save_adapter
from powertrain.weights import Update, WeightVersion
from powertrain_vllm.engine import VllmEngine
from powertrain_vllm.serving import MIDDLEWARE

OPTIONS = {"form": "server", "max_model_len": 256, "enable_lora": True, "max_lora_rank": 8}
PROMPT = (3, 1, 4, 1, 5)
LONG = 200
DEATH_SECONDS = 15.0


def spec(**options):
    return EngineSpec(backend="vllm", role="infer", model=tiny_model(), options=options or OPTIONS)


@contextlib.asynccontextmanager
async def engine(**options):
    made = VllmEngine()
    made.prepare({})
    try:
        await made.build(spec(**options))
        yield made
    finally:
        await made.close()


def ask(name, *, most=8, **more):
    sampling = SamplingParams(max_tokens=most, temperature=0.0)
    return GenerateRequest(request_id=name, prompt=np.asarray(PROMPT), sampling=sampling, **more)


def tree(made):
    """Return all processes of an engine's server."""
    parent = psutil.Process(made._form._launched.pid)
    return [parent, *parent.children(recursive=True)]


async def until(true, seconds=DEATH_SECONDS):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not so within {seconds} s"
        await asyncio.sleep(0.05)


def gone(processes):
    return lambda: not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def status(url, path, key="", *, body=None):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url + path, data, headers), timeout=30) as answer:
            return answer.status
    except HTTPError as exc:
        return exc.code


async def write(made, version, folder):
    await made.pause()
    sink, tensors = made.weights(), checkpoint(folder)
    sink.begin(Update(version=version))
    sink.apply([Piece(entry.name, (0,) * len(entry.shape), tensors[entry.name]) for entry in sink.manifest()])
    return sink


class TestLaunched:
    async def test_engine_of_several_ranks_is_refused(self):
        place = RankSpec(world=2, rendezvous="127.0.0.1:1")
        made = VllmEngine()
        made.prepare({})
        several = EngineSpec(backend="vllm", role="infer", model=tiny_model(), options=OPTIONS, place=place)
        with pytest.raises(ConfigError, match="an engine of one rank, and this one has 2"):
            await made.build(several)
        await made.close()

    async def test_key_and_port_are_nobody_elses_and_nothing_is_left(self, caplog):
        caplog.set_level(logging.DEBUG)
        async with engine(**OPTIONS) as made:
            await made.resume("1.1")
            launched = made._form._launched
            key, url, folder = launched.key, launched.url, launched.folder
            processes = tree(made)
            assert len(processes) >= 2  # the API server and vLLM's engine
            told = [repr(made._form), repr(launched), str(made.health()), caplog.text, launched.log()]
            told += [" ".join(process.cmdline()) for process in processes]
            assert launched.log()
            assert [text for text in told if key in text] == []
            assert {p.environ().get("VLLM_API_KEY") for p in processes[:1]} == {key}
            heard = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
            assert "127.0.0.1" in heard
            assert set(heard) <= {"127.0.0.1", "::1"}
            assert folder.stat().st_mode & 0o777 == 0o700
            adapters = {"name": "x", "src": "/tmp"}
            for path, body in {
                "/v1/models": None,
                "/powertrain/about": None,
                "/adapters": adapters,
                "/metrics": None,
            }.items():
                assert status(url, path, body=body) == 401, path
                assert status(url, path, "wrong", body=body) == 401, path
            assert status(url, "/health") == 200
            assert status(url, "/v1/models", key) == 200
            assert status(url, "/powertrain/nothing", key) == 404
            assert status(url, "/collective_rpc", key, body={"method": "x"}) == 404  # vLLM's development mode is off
        await until(gone(processes))
        assert not folder.exists()

    @pytest.mark.parametrize("victim", ["engine", "server"])
    async def test_death_is_told_to_requests_in_flight_and_nothing_lingers(self, victim):
        async with engine(**OPTIONS) as made:
            await made.resume("1.1")
            processes = tree(made)
            core = next(p for p in processes if "EngineCore" in " ".join(p.cmdline()))
            task = asyncio.create_task(made.generate(ask("last", most=LONG)))
            await asyncio.sleep(0.05)
            begun = time.monotonic()
            (core if victim == "engine" else processes[0]).kill()
            with pytest.raises(StateError, match=rf"vLLM's server \(process {processes[0].pid}, http://127"):
                await asyncio.wait_for(task, DEATH_SECONDS)
            await until(lambda: "fault" in made.health())
            assert time.monotonic() - begun < DEATH_SECONDS
            with pytest.raises(StateError, match="is dead and answers no more"):
                await asyncio.wait_for(made.generate(ask("later")), DEATH_SECONDS)
            await made.pause()
            with pytest.raises(StateError, match=r"has gone|cannot be asked"):
                made.weights().begin(Update(version=WeightVersion(1, 2)))
            await until(gone(processes))

    @pytest.mark.parametrize("also", ["alone", "with-its-watcher"])
    async def test_engine_that_is_killed_leaves_no_process(self, tmp_path, also):
        code = f"""
import asyncio, json
from powertrain import EngineSpec
from powertrain_vllm.engine import VllmEngine
async def main():
    made = VllmEngine()
    made.prepare({{}})
    await made.build(EngineSpec(backend="vllm", role="infer", model={tiny_model()!r}, options={OPTIONS!r}))
    launched = made._form._launched
    print(json.dumps([launched.pid, str(launched.folder)]), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
        with (tmp_path / "log").open("w") as log:
            run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            pid, folder = json.loads(await asyncio.wait_for(asyncio.to_thread(run.stdout.readline), 120))
            watcher = psutil.Process(pid).parent()
            processes = [watcher, *watcher.children(recursive=True)]
            assert len(processes) >= 3
            if also == "with-its-watcher":  # what watches the tree for the launcher, beside the plugin in each process
                watcher.kill()
        finally:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            run.stdout.close()
        await until(gone(processes))
        await until(lambda: not Path(folder).exists())

    async def test_start_that_is_given_up_leaves_nothing(self):
        for seconds in (0.0, 3.0):
            made = VllmEngine()
            made.prepare({})
            task = asyncio.create_task(made.build(spec(**OPTIONS)))
            await asyncio.sleep(seconds)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, PowertrainError):
                await task
            launched = made._form._launched if hasattr(made, "_form") else None
            pids = [launched.pid] if launched and launched.pid else []
            await made.close()
            await until(gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]))
            assert bool(pids) == bool(seconds)
            if launched:
                await until(lambda folder=launched.folder: not folder.exists())

    async def test_server_that_does_not_start_is_told_with_its_log(self, caplog):
        begun = time.monotonic()
        made = VllmEngine()
        made.prepare({})
        with pytest.raises(ConfigError, match=r"does not start with these arguments: .*max_model_len .1048576"):
            await made.build(spec(form="server", max_model_len=1 << 20))
        folder = made._form._launched.folder
        await made.close()
        assert time.monotonic() - begun < 120
        assert "create_engine_config" in caplog.text  # the log's end, for what the message leaves out
        assert not folder.exists()


PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 4]]


class TestTransfers:
    """A trainer's rank, in its own process, and a server under the driver: what is sampled is what is trained."""

    @staticmethod
    async def gap(driver):
        sampling = SamplingParams(n=2, max_tokens=6)
        requests = [
            GenerateRequest(request_id=f"r{i}", prompt=np.array(p), sampling=sampling) for i, p in enumerate(PROMPTS)
        ]
        results = await driver.infer["vllm"].generate_batch(requests)
        pairs = [(p, c) for p, result in zip(PROMPTS, results, strict=True) for c in result.completions]
        batch = TrainBatch.from_sequences([p for p, _ in pairs], [c.tokens.tolist() for _, c in pairs])
        told = np.concatenate([np.concatenate([np.zeros(len(p)), c.logprobs_t1]) for p, c in pairs])
        return np.abs(await driver.train["fsdp"].logprobs(batch) - told)[batch.weights > 0].max()

    @staticmethod
    async def train(driver):
        batch = TrainBatch.from_sequences(PROMPTS, [[5, 6, 7, 8], [9, 9, 3], [4, 4]], groups=[0, 0, 0])
        await driver.train["fsdp"].train_step(batch, LossSpec(name="powertrain.tensors.loss:cross_entropy"))

    async def test_every_transfer_writes_into_the_servers_worker(self, tmp_path):
        registry, place, model = Registry(), RankSpec(device="cpu"), tiny_model()
        specs = {
            "fsdp": EngineSpec(backend="fsdp", role="train", model=model, place=place, optim=OptimSpec(lr=1e-2)),
            "vllm": EngineSpec(backend="vllm", role="infer", model=model, place=place),
        }
        layout = parse_layout("fsdp:d1+vllm:d1?form=server&max_model_len=128 via shm", registry=registry)
        async with Driver(layout, specs, registry=registry, run_dir=tmp_path, inline="never") as driver:
            await driver.infer["vllm"].resume("1.0")
            for counter in (1, 2):
                await self.train(driver)
                assert await self.gap(driver) > 1e-3
                report = await driver.push("fsdp", "vllm", WeightVersion(1, counter))
                assert await self.gap(driver) < 1e-5
                assert (report.transfer, report.bytes > 0) == ("shm", True)
            for counter, (name, options) in enumerate({"disk": {"folder": str(tmp_path / "w")}, "p2p": {}}.items(), 3):
                from powertrain.options import resolve

                about = registry.transfer(name)
                made = registry.load_class(about)(name, resolve(about.options, options, where=name))
                made.source, made.sinks = driver.train["fsdp"].handle, driver.infer["vllm"].handles
                await self.train(driver)
                report = await made.push(Update(version=WeightVersion(1, counter)), deadline=60.0)
                await made.close()
                assert report.transfer == name
                assert await self.gap(driver) < 1e-5

    @pytest.mark.parametrize("synchronous", [False, True])
    async def test_an_engine_in_the_trainers_process_gets_its_weights_through_memory(self, tmp_path, synchronous):
        """`local` is what is picked there; with synchronous rollouts it would share memory, which no server can."""
        registry, place, model = Registry(), RankSpec(device="cpu"), tiny_model()
        specs = {
            "fsdp": EngineSpec(backend="fsdp", role="train", model=model, place=place, optim=OptimSpec(lr=1e-2)),
            "vllm": EngineSpec(backend="vllm", role="infer", model=model, place=place),
        }
        layout = parse_layout("fsdp:d1|vllm:d1?form=server&max_model_len=128", registry=registry)
        options = {"local": {"synchronous": synchronous, "verify": 1}}
        async with Driver(layout, specs, registry=registry, run_dir=tmp_path, transfer_options=options) as driver:
            await driver.infer["vllm"].resume("1.0")
            for counter in (1, 2):
                await self.train(driver)
                assert await self.gap(driver) > 1e-3
                report = await driver.push("fsdp", "vllm", WeightVersion(1, counter))
                assert report.transfer == "local"
                assert await self.gap(driver) < 1e-5

    async def test_an_endpoint_that_is_no_transfers_is_refused(self, server):
        from powertrain.tensors.shm import ShmSink

        async with attached(server) as made:
            await made.pause()
            with pytest.raises(AttributeError):
                made.weights().endpoint(ShmSink, RankSpec()).no_such_operation  # noqa: B018
            with pytest.raises(ConfigError, match="no transfer that is installed"):
                made.weights().endpoint(type("Evil", (), {"__module__": "os"}), RankSpec())


@pytest.fixture(scope="module")
def server():
    os.environ[KEY_NAME] = KEY
    made = Running.start(tiny_model())
    yield made
    made.stop()


@contextlib.asynccontextmanager
async def attached(server):
    async with engine(form="server", url=server.url, api_key_env=KEY_NAME) as made:
        sink = made._sink
        if sink.version != "0.0" or sink.state != "steady":
            paused, sink._paused = sink._paused, lambda: True
            restore(sink, tiny_model())
            sink._paused = paused
        yield made


class TestAttached:
    async def test_server_is_left_running_and_as_it_was(self, server):
        async with attached(server) as made:
            await made.resume("1.1")
            assert made.health()["attached"] is True
            await made.load_adapter("policy-v1.2", save_adapter(adapter(2, tiny_model())))
            tokens = (await made.generate(ask("a"))).completions[0].tokens.tolist()
            assert max(regret(tiny_model(), list(PROMPT), tokens)) < 1e-3
            assert made._form.max_model_len == 256
        assert server.alive
        async with engine(form="server", url=server.url, api_key_env=KEY_NAME) as made:
            assert made.health()["version"] == "1.1"  # the server's own
            assert made.health()["adapters"] == []
            await made.load_adapter("policy-v1.2", save_adapter(adapter(3, tiny_model())))  # its name was given back

    async def test_one_engine_at_a_time(self, server):
        async with attached(server):
            other = VllmEngine()
            other.prepare({})
            with pytest.raises(StateError, match=rf"the engine of process {os.getpid()} has this server"):
                await other.build(spec(form="server", url=server.url, api_key_env=KEY_NAME))
            await other.close()
        async with attached(server) as made:
            await made.resume("1.1")

    async def test_engine_that_goes_within_an_update_leaves_the_server_unfit(self, server):
        async with attached(server) as made:
            await made.resume("1.1")
            await write(made, WeightVersion(1, 2), tiny_model(1))
        async with engine(form="server", url=server.url, api_key_env=KEY_NAME) as made:
            with pytest.raises(UnfitError):
                await made.generate(ask("b"))
        async with attached(server) as made:
            await made.resume("1.1")
            await made.generate(ask("c"))

    async def test_steps_of_another_client_fail_an_update(self, server):
        async with attached(server) as made:
            await made.resume("1.1")
            sink = await write(made, WeightVersion(1, 2), tiny_model(1))
            body = {"model": tiny_model(), "prompt": [1, 2, 3], "max_tokens": 2}
            assert await asyncio.to_thread(status, server.url, "/v1/completions", KEY, body=body) == 200
            with pytest.raises(TransferError, match=r"steps while weights were written.*another client"):
                sink.finish()
            sink.abort()
            assert sink.state == "unfit"

    async def test_prefix_cache_that_is_not_reset_fails_an_update(self, server):
        async with attached(server) as made:
            await made.resume("1.1")
            sink = await write(made, WeightVersion(1, 2), tiny_model(1))
            sink._forget = lambda: made._form._http.call("POST", "/powertrain/forgotten")
            with pytest.raises(Exception, match="there is no POST /powertrain/forgotten"):
                sink.finish()
            assert sink.state == "unfit"

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"url": "http://127.0.0.1:9", "api_key_env": KEY_NAME}, "nothing answers: .*127.0.0.1:9"),
            ({"url": "127.0.0.1:8000"}, "no address of a server"),
            ({"url": "http://me:secret@127.0.0.1:8000"}, "no address of a server"),
            ({"api_key_env": KEY_NAME}, "give its url"),
            ({"url": "http://127.0.0.1:9", "api_key_env": "NO_SUCH_VARIABLE"}, "no variable of that name"),
            ({"url": "http://127.0.0.1:9", "max_model_len": 64}, "max_model_len: said when a server is started"),
            ({"form": "process", "url": "http://127.0.0.1:9"}, "add form=server"),
        ],
        ids=str,
    )
    async def test_wrong_place_is_told(self, options, match):
        os.environ[KEY_NAME] = KEY
        made = VllmEngine()
        made.prepare({})
        with pytest.raises(ConfigError, match=match) as caught:
            await made.build(spec(**{"form": "server", **options}))
        await made.close()
        assert KEY not in str(caught.value)
        assert "secret" not in str(caught.value)

    async def test_wrong_key_is_told_and_not_shown(self, server, monkeypatch):
        monkeypatch.setenv("OTHER_KEY", "another-key")
        for name, match in (("OTHER_KEY", "OTHER_KEY holds another key"), (None, "api_key_env")):
            with pytest.raises(ConfigError, match=match) as caught:
                async with engine(form="server", url=server.url, api_key_env=name):
                    pass
            assert "another-key" not in str(caught.value)

    async def test_server_that_does_not_fit_is_told(self, server):
        for changes, match in (
            ({"dtype": "bfloat16"}, "runs in float32, and the run's dtype is bfloat16"),
            ({"model": "/no/such/model"}, "their configs differ"),
        ):
            made = VllmEngine()
            made.prepare({})
            options = {"form": "server", "url": server.url, "api_key_env": KEY_NAME}
            fields = {"model": tiny_model(), "dtype": "float32", **changes}
            with pytest.raises(ConfigError, match=match):
                await made.build(EngineSpec(backend="vllm", role="infer", options=options, **fields))
            await made.close()

    @pytest.mark.parametrize(
        ("more", "match"),
        [(("--seed=0",), "has nothing of powertrain"), ((f"--middleware={MIDDLEWARE}",), "no extension of powertrain")],
        ids=["plain", "no-extension"],
    )
    async def test_server_without_our_parts_is_told_how_to_start(self, more, match):
        os.environ[KEY_NAME] = KEY
        plain = await asyncio.to_thread(Running.start, tiny_model(), *more)
        try:
            with pytest.raises(ConfigError, match=f"{match}.*--worker-extension-cls powertrain_vllm"):
                async with engine(form="server", url=plain.url, api_key_env=KEY_NAME):
                    pass
        finally:
            plain.stop()

    async def test_dropped_rows_run_no_more_and_lose_nothing(self, server):
        async with attached(server) as made:
            await made.resume("1.1")
            whole = (await made.generate(ask("whole", most=LONG))).completions[0].tokens.tolist()

            def steps():
                return asyncio.to_thread(lambda: made._sink._caller.call("steps", seconds=10)["value"])

            for i in range(3):
                before = await steps()
                tasks = [asyncio.create_task(made.generate(ask(f"r{i}-{j}", most=LONG))) for j in range(40)]
                await asyncio.sleep(0.2 * i)  # the first are taken back before vLLM has heard of them all
                await made.pause("keep")
                after = await steps()
                await asyncio.to_thread(made._form._forget)  # which vLLM refuses while a request holds a block
                await asyncio.sleep(0.3)
                assert await steps() == after
                assert after > before or not i
                assert not [task for task in tasks if task.done()]
                await made.resume(None)
                for task in tasks:
                    assert (await task).completions[0].tokens.tolist() == whole

    async def test_adapters_come_and_go_over_http(self, server):
        async with attached(server) as made:
            await made.resume("1.1")

            def names():
                request = Request(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
                with urlopen(request, timeout=30) as answer:
                    return [card["id"] for card in json.load(answer)["data"]][1:]

            await made.load_adapter("policy-v1.2", save_adapter(adapter(2, tiny_model())))
            assert [name.partition("#")[0] for name in names()] == ["policy-v1.2"]
            base, own = [(await made.generate(ask(f"a-{x}", adapter=x))).completions[0] for x in (None, "policy-v1.2")]
            assert base.tokens.tolist() != own.tokens.tolist()
            await made.unload_adapter("policy-v1.2")
            assert names() == []

    async def test_an_adapter_loaded_anew_from_a_rewritten_folder_finds_no_old_prefixes(self, server, tmp_path):
        """vLLM's cache knows an adapter by name and path; the second load's weights are others."""
        prompt = np.asarray([1 + i * 7 % 60 for i in range(200)])
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        folder = tmp_path / "adapter"
        async with attached(server) as made:
            await made.resume("1.1")
            for seed in (2, 3):
                shutil.copytree(save_adapter(adapter(seed, tiny_model())), folder, dirs_exist_ok=True)
                await made.load_adapter("policy-v1.2", str(folder))
                request = GenerateRequest(
                    request_id=f"s{seed}", prompt=prompt, sampling=sampling, adapter="policy-v1.2"
                )
                [completion] = (await made.generate(request)).completions
                right = replay(with_adapter(tiny_model(), folder), prompt, completion.tokens.tolist())
                assert np.abs(completion.logprobs_t1 - right).max() < 1e-4, seed
                await made.unload_adapter("policy-v1.2")

    async def test_no_cache_of_old_weights_is_used(self, server):
        prompt = [1 + i * 7 % 60 for i in range(200)]  # longer than a block of the cache, 128 tokens on a CPU
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        async with attached(server) as made:
            await made.resume("1.1")
            for version, folder in (("1.1", tiny_model()), ("1.2", tiny_model(1))):
                if version != "1.1":
                    (await write(made, WeightVersion.parse(version), folder)).finish()
                    await made.resume(version)
                for again in range(2):  # the second time from the cache
                    request = GenerateRequest(request_id=f"p{again}", prompt=np.asarray(prompt), sampling=sampling)
                    completion = (await made.generate(request)).completions[0]
                    right = replay(folder, prompt, completion.tokens.tolist())
                    assert np.abs(completion.logprobs_t1 - right).max() < 1e-4, (version, again)

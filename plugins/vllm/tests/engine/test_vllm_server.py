"""The server form on a real vLLM server on CPU: one server for the module, and one that is killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")
ENV = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
os.environ.update(ENV)

from powertrain.errors import ConfigError, StateError, WorkerError  # noqa: E402
from powertrain.interfaces.build import EngineSpec  # noqa: E402
from powertrain.runtime.host import LoopThread  # noqa: E402
from powertrain.testing.tensors.models import tiny_model  # noqa: E402
from powertrain.weights import Update, WeightVersion  # noqa: E402
from powertrain_vllm.backend import Call  # noqa: E402
from powertrain_vllm.server import Server  # noqa: E402

OPTIONS = {"max_model_len": 256, "enforce_eager": True, "max_num_seqs": 16}
SECONDS = 240.0
KEY = "a-key-that-nobody-sees"


class Running:
    """A started server, with what was heard."""

    def __init__(self, options=OPTIONS):
        self.thread = LoopThread("test")
        self.server = Server()
        self.heard, self.news = {}, threading.Condition()
        spec = EngineSpec(backend="vllm", role="infer", model=tiny_model(), axes={}, seed=3, timeout=60.0)
        self.do(self.server.start(spec, options, self.note))

    def do(self, work):
        return self.thread.submit(work).result(SECONDS)

    def note(self, name, drawn, ending):
        with self.news:
            tokens, endings = self.heard.setdefault(name, ([], []))
            tokens.extend(drawn)
            if ending is not None:
                endings.append(ending)
            self.news.notify_all()

    def submit(self, *calls):
        async def there():
            self.server.submit(calls)

        self.do(there())

    def wait(self, condition, seconds=60.0):
        with self.news:
            assert self.news.wait_for(condition, seconds), self.heard

    def ended(self, name):
        return bool(self.heard.get(name, ((), ()))[1])

    def answers(self, *calls):
        self.submit(*calls)
        self.wait(lambda: all(self.ended(call.name) for call in calls))
        return [self.heard[call.name] for call in calls]

    def tree(self):
        import psutil

        return psutil.Process(self.server._process._parent.pid).children(recursive=True)

    def close(self):
        self.do(self.server.close())
        self.thread.stop()


def call(name, most=8, key=5, temperature=1.0, **more):
    fields = {"top_p": 0.9, "top_k": 0, "stop": (), "tokens": (3, 5, 7), **more}
    return Call(name=f"powertrain-{name}", most=most, key=key, temperature=temperature, **fields)


@pytest.fixture(scope="module")
def running():
    os.environ["POWERTRAIN_TEST_KEY"] = KEY
    found = Running({**OPTIONS, "api_key_env": "POWERTRAIN_TEST_KEY"})
    del os.environ["POWERTRAIN_TEST_KEY"]
    yield found
    found.close()


@pytest.mark.timeout(300)
def test_server_draws_by_key_and_tells_both_log_probs(running):
    first, second, other = running.answers(call("a"), call("b"), call("c", key=6))
    assert first == second
    assert first[1] == ["length"]
    assert len(first[0]) == 8
    assert first[0] != other[0]
    assert any(drawn != plain for _, drawn, plain in first[0])


@pytest.mark.timeout(120)
def test_stop_tokens_end_a_row_and_are_part_of_it(running):
    tokens = [token for token, *_ in running.answers(call("d", temperature=0.0))[0][0]]
    stopped, endings = running.answers(call("e", temperature=0.0, stop=(tokens[2],)))[0]
    assert endings == ["stop"]
    assert [token for token, *_ in stopped] == tokens[: tokens.index(tokens[2]) + 1]


@pytest.mark.timeout(120)
def test_dropped_row_is_gone_from_the_worker_and_not_heard_of_again(running):
    running.submit(call("f", most=240))
    running.wait(lambda: "powertrain-f" in running.heard)
    running.do(running.server.drop(["powertrain-f"]))
    rows = running.do(running.server._ask("POST", "/collective_rpc", {"method": "powertrain_rows"}))["results"][0]
    assert not [row for row in rows if "powertrain-f-" in row]
    assert not running.ended("powertrain-f")


@pytest.mark.timeout(120)
def test_refused_row_is_heard_of_once(running):
    ((_, endings),) = running.answers(call("g", adapter="nobody"))
    assert [type(ending) for ending in endings] == [ConfigError]


@pytest.mark.timeout(120)
def test_paused_server_holds_new_rows_and_goes_on(running):
    running.do(running.server._ask("POST", "/pause?mode=keep"))
    running.submit(call("h"))
    assert running.do(running.server._ask("GET", "/is_paused"))["is_paused"]
    assert not running.ended("powertrain-h")
    running.do(running.server._ask("POST", "/resume"))
    running.wait(lambda: running.ended("powertrain-h"))


@pytest.mark.timeout(120)
def test_key_is_in_no_command_line_and_no_log(running):
    lines = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in running.tree()]
    assert len(lines) >= 2
    assert not [line for line in lines if KEY.encode() in line]
    assert KEY not in running.server._process.log.read_text()


@pytest.mark.timeout(120)
def test_nothing_but_unix_sockets_is_open(running):
    import psutil

    found = [(c.laddr, p.name()) for p in running.tree() for c in p.net_connections("inet") if c.status == "LISTEN"]
    assert not [(place, name) for place, name in found if place.ip not in {"127.0.0.1", "::1"}], psutil
    assert running.server._folder.stat().st_mode & 0o077 == 0


@pytest.mark.timeout(120)
def test_update_that_is_given_up_lets_the_server_go_on(running):
    sink = running.server.sink()
    assert "model.embed_tokens.weight" in sink.manifest().by_name()
    sink.publish("1.0")
    sink.begin(Update(version=WeightVersion(1, 1), kind="full"))
    assert sink.state == "updating"
    assert running.do(running.server._ask("GET", "/is_paused"))["is_paused"]
    with pytest.raises(Exception, match="was not written"):
        sink.finish()
    sink.abort()
    assert (sink.state, sink.version) == ("steady", "1.0")
    assert not running.do(running.server._ask("GET", "/is_paused"))["is_paused"]


@pytest.mark.timeout(300)
def test_death_of_the_engine_ends_rows_and_everything():
    """The API process outlives a dead engine; here nothing does."""
    running = Running()
    tree, folder, segments = running.tree(), running.server._folder, set(running.server._process._segments)
    engine = next(
        process for process in tree if "EngineCore" in process.name() or "EngineCore" in str(process.cmdline())
    )
    running.submit(call("i", most=250))
    running.wait(lambda: "powertrain-i" in running.heard)
    engine.send_signal(signal.SIGKILL)
    running.wait(lambda: running.ended("powertrain-i"), 40.0)
    assert isinstance(running.heard["powertrain-i"][1][0], StateError | WorkerError)
    running.close()
    import psutil

    assert not psutil.wait_procs(tree, timeout=20)[1]
    assert not folder.exists()
    assert not [path for path in segments if Path(path).exists()]

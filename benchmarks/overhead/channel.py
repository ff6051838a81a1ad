"""Round trip of an empty call to a worker process, beside a bare zmq round trip and a multiprocessing pipe.

    python benchmarks/overhead/channel.py [--rounds 20] [--calls 100] [--output FILE]

All ends live while the measurement lasts; rounds of `calls` calls take turns, so that a busy machine disturbs all
alike. The calls: `abort` of no request, on the worker's event loop, and a weight source's `changes`, one number, on
the engine's thread; the engines are the toys of core's tests. What a call adds to bare zmq is a
token and its check, msgpack, the hops between caller, channel thread and engine at both ends, and a deadline.
"""

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
TOY = ROOT / "core" / "tests" / "runtime" / "toy"
RESULT = ROOT / "benchmarks" / "results" / "overhead_channel.json"
AGAINST = "zmq REQ/REP"


def serve_zmq(port_pipe):
    """Answer every message with an empty one, until a message says `end`."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.REP)
    port_pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while socket.recv() != b"end":
        socket.send(b"")
    socket.send(b"")


def serve_pipe(pipe):
    """Answer every message with None, until one is not None."""
    while pipe.recv() is None:
        pipe.send(None)


class Zmq:
    """A plain zmq pair over loopback, blocking on both sides."""

    def __init__(self):
        import zmq

        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve_zmq, args=(there,))
        self._process.start()
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.connect(f"tcp://127.0.0.1:{here.recv()}")

    async def call(self):
        """Send an empty message and wait for the answer."""
        self._socket.send(b"")
        self._socket.recv()

    def close(self):
        """End the other process."""
        self._socket.send(b"end")
        self._socket.recv()
        self._socket.close()
        self._process.join(10)


class Pipe:
    """A multiprocessing pipe, which pickles."""

    def __init__(self):
        self._here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve_pipe, args=(there,))
        self._process.start()

    async def call(self):
        """Send an empty message and wait for the answer."""
        self._here.send(None)
        self._here.recv()

    def close(self):
        """End the other process."""
        self._here.send("end")
        self._process.join(10)


async def times_of(call, count):
    """Return the milliseconds of each of `count` calls, one after the other."""
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        await call()
        found.append((time.perf_counter() - begun) * 1e3)
    return found


def make_driver(folder):
    """Return a driver of two workers: a training and an inference engine of the tests' toy plugin."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TOY), os.environ.get("PYTHONPATH", "")]))
    os.environ["POWERTRAIN_PLUGINS"] = "powertrain-toy,local"
    sys.path.insert(0, str(TOY))
    from powertrain.interfaces.build import EngineSpec
    from powertrain.layout import parse_layout
    from powertrain.registry import Registry
    from powertrain.runtime.driver import Driver

    registry = Registry()
    layout = parse_layout("toytrain:d1+toyinfer:d1", registry=registry)
    specs = {part.label: EngineSpec(backend=part.backend, role=part.role, model="") for part in layout.parts}
    return Driver(layout, specs, registry=registry, run_dir=folder, inline="never")


async def measure(args, folder):
    """Return every way's milliseconds."""
    async with make_driver(folder) as driver:
        train, infer = driver.train["toytrain"].handle, driver.infer["toyinfer"].handles[0]
        bare, pipe = Zmq(), Pipe()
        ways = {
            "powertrain, event loop": lambda: infer.call("abort", [], deadline=60.0),
            "powertrain, engine thread": lambda: train.call("weights.changes", deadline=60.0),
            AGAINST: bare.call,
            "multiprocessing.Pipe": pipe.call,
        }
        found = {name: [] for name in ways}
        for call in ways.values():
            await times_of(call, args.calls)
        for _ in range(args.rounds):
            for name, call in ways.items():
                found[name] += await times_of(call, args.calls)
        bare.close()
        pipe.close()
        return found


def main():
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100, help="calls of each way in a round")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, folder))
    middle = median(found[AGAINST])
    ways = {}
    for name, times in found.items():
        ordered = sorted(times)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        row = {"median_ms": round(median(times), 4), "p99_ms": round(p99, 4), "least_ms": round(ordered[0], 4)}
        ways[name] = {**row, "median_over_zmq": round(median(times) / middle, 2)}
        print(f"{name:26} {ways[name]}")
    document = {
        "benchmark": "overhead_channel",
        "date": f"{datetime.date.today()}",
        "unit": "milliseconds from call to answer, one call at a time, worker on the same host",
        "calls_of_each": args.rounds * args.calls,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_1min": round(load, 2),
        "versions": {name: importlib.metadata.version(name) for name in ("powertrain", "pyzmq", "msgpack")},
        "ways": ways,
    }
    args.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The transfer `shm` beside plain copies of the same bytes: trainer and engine in two processes, a 0.5B model's shape.

    python benchmarks/transfer/shm.py OUT.json [--repeats 12] [--tiny]

Real engines (`fsdp`, `hf`) in workers; `Driver.push` is timed from its call to its return, all phases, the engine idle.
Three cases: the direct path with one thread and with two (`OMP_NUM_THREADS` of the workers; the trainer is idle
meanwhile), and the staging area with one thread on each side. Each repeat also takes, in turn with it:

- memcpy_1, memcpy_2: the same bytes between two buffers of one process, by one thread and by two;
- two copies: one process copies its buffer into a ring in shared memory, another one the ring into its own, at the same
  time and without waiting for one another. No transfer through an area in shared memory can be faster.

Then a training step, one more update, and a checksum of every tensor on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import setting
import torch

from powertrain.interfaces.build import EngineSpec, OptimSpec, RankSpec
from powertrain.interfaces.data import LossSpec, TrainBatch
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.tensors.shm import SLOTS, ShmTransfer
from powertrain.weights import WeightVersion

RING = SLOTS * ShmTransfer.BUCKET_MB << 20
CHUNK = ShmTransfer.BUCKET_MB << 20
PLAIN = ("memcpy_1", "memcpy_2", "two_copies")
CASES = {"direct_1": (True, 1), "direct_2": (True, 2), "staged_1": (False, 1)}
"""Whether the direct path is allowed, and threads of each worker."""
CROSS_ENTROPY = LossSpec(name="powertrain.tensors.loss:cross_entropy")


def write_model(folder: Path, *, tiny: bool) -> int:
    """Write random weights of Qwen2.5-0.5B's shape, bfloat16, tied; returns bytes."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    full = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    small = {"vocab_size": 512, "hidden_size": 56, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**(small if tiny else full), **heads), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in model.parameters())


def buffer(size: int) -> tuple[torch.Tensor, int]:
    """Return memory of one process, all of it touched, and its address."""
    made = torch.empty(size, dtype=torch.uint8).fill_(1)
    return made, made.data_ptr()


def memcpy(target: int, source: int, size: int) -> float:
    """Return the seconds of one copy."""
    begun = time.perf_counter()
    ctypes.memmove(target, source, size)
    return time.perf_counter() - begun


def memcpy_by_two(target: int, source: int, size: int) -> float:
    """Return the seconds of one copy, half of it by each of two threads."""
    half = size // 2
    parts = [(target, source, half), (target + half, source + half, size - half)]
    threads = [threading.Thread(target=ctypes.memmove, args=part) for part in parts]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def ring_copier(pipe, area: mmap.mmap, size: int, *, into: bool) -> None:
    """Copy `size` bytes through the ring each time that something comes; answers when it has ended."""
    own, address = buffer(size)
    ring = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
    for at in range(0, RING, mmap.PAGESIZE):
        area[at] = 1
    while pipe.recv():
        for begin in range(0, size, CHUNK):
            count, place = min(CHUNK, size - begin), ring + begin % RING
            ctypes.memmove(*((place, address + begin) if into else (address + begin, place)), count)
        pipe.send(time.perf_counter())
    del own


class TwoCopies:
    """The two processes of the limit."""

    def __init__(self, size: int) -> None:
        area = mmap.mmap(-1, RING)
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for into in (True, False):
            here, there = context.Pipe()
            process = context.Process(target=ring_copier, args=(there, area, size), kwargs={"into": into}, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self.run()

    def run(self) -> float:
        """Return the seconds until both have copied everything."""
        begun = time.perf_counter()  # one clock for all processes of a host
        for pipe in self.pipes:
            pipe.send(True)
        return max(pipe.recv() for pipe in self.pipes) - begun

    def close(self) -> None:
        """End both."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(False)
            process.join(30)


def make_driver(model: str, run_dir: str, *, direct: bool = True, threads: int = 1) -> Driver:
    """Return the driver of both engines, each in a worker with so many threads."""
    same = {"model": model, "place": RankSpec(device="cpu"), "dtype": "bfloat16", "deterministic": False}
    specs = {
        "fsdp": EngineSpec(backend="fsdp", role="train", optim=OptimSpec(lr=1e-4), **same),
        "hf": EngineSpec(backend="hf", role="infer", **same),
    }
    registry = Registry()
    return Driver(
        parse_layout("fsdp:d1|hf:d1 via shm", registry=registry),
        specs,
        registry=registry,
        run_dir=run_dir,
        inline="never",
        transfer_options={"shm": {"direct": direct}},
        env={"OMP_NUM_THREADS": str(threads)},
    )


async def measure(
    model: str, size: int, repeats: int, vocabulary: int, *, direct: bool, threads: int
) -> dict[str, object]:
    """Take all repeats of one case and return what was seen."""
    limit = TwoCopies(size)
    (_a, source), (_b, target) = buffer(size), buffer(size)
    rows: dict[str, list[float]] = {name: [] for name in ("push", *PLAIN, "empty_call")}
    phases, count = [], 0
    with tempfile.TemporaryDirectory() as run_dir:
        async with make_driver(model, run_dir, direct=direct, threads=threads) as driver:
            await driver.infer["hf"].resume("1.0")

            async def push():
                nonlocal count
                count += 1
                begun = time.perf_counter()
                report = await driver.push("fsdp", "hf", WeightVersion(1, count))
                return time.perf_counter() - begun, report

            first, report = await push()
            await push()
            for _ in range(repeats):
                seconds, report = await push()
                rows["push"].append(seconds)
                phases.append(dict(report.seconds))
                rows["memcpy_1"].append(memcpy(target, source, size))
                rows["memcpy_2"].append(memcpy_by_two(target, source, size))
                rows["two_copies"].append(limit.run())
                begun = time.perf_counter()
                await driver.infer["hf"].health()
                rows["empty_call"].append(time.perf_counter() - begun)
            limit.close()
            rng = np.random.default_rng(1)
            texts = [rng.integers(1, vocabulary, 8).tolist() for _ in range(4)]
            await driver.train["fsdp"].train_step(TrainBatch.from_sequences(texts[:2], texts[2:]), CROSS_ENTROPY)
            await push()
            checksum = await setting.digest(driver.transfer("fsdp", "hf"))
    median = {name: statistics.median(values) for name, values in rows.items()}
    assert report.details["direct"] == float(direct), "the other path was taken"
    return {
        "direct": direct,
        "threads_of_each_worker": threads,
        "bytes": report.bytes,
        "first_seconds": first,
        "seconds": rows,
        "phases_median_seconds": {name: statistics.median(row[name] for row in phases) for name in phases[0]},
        "median_seconds": median,
        "gb_per_s": {name: report.bytes / 1e9 / median[name] for name in ("push", *PLAIN)},
        "push_bandwidth_to": {name: median[name] / median["push"] for name in PLAIN},
        "checksum_after_a_step_and_an_update": checksum,
    }


def main() -> None:
    """Run all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = setting.head("shm.py", "setting.py") | {"bucket_mb": ShmTransfer.BUCKET_MB, "slots": SLOTS, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), tiny=args.tiny)
        for name, (direct, threads) in CASES.items():
            case = asyncio.run(
                measure(folder, size, args.repeats, 512 if args.tiny else 151936, direct=direct, threads=threads)
            )
            result["cases"][name] = case
            print(name, "GB/s", {key: round(rate, 2) for key, rate in case["gb_per_s"].items()})
            print("  bandwidth of a push to", {key: round(rate, 3) for key, rate in case["push_bandwidth_to"].items()})
    setting.write(args.out, result)


if __name__ == "__main__":
    main()

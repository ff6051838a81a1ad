"""One rank of engines of several cards, for tests: python ranks_world.py LAYOUT RENDEZVOUS RANK KIND=FOLDER...

For each model in turn an engine is built, and what its rank holds is compared with the static manifest. Two engines in
turn in one process want two rendezvous, so RENDEZVOUS is host:port,host:port,... Prints "alike KIND" or what differs.
"""

import asyncio
import sys

from powertrain import EngineSpec
from powertrain.interfaces.build import RankSpec
from powertrain.layout import parse_layout
from powertrain.registry import Registry
from powertrain.tensors.checkpoint import read_config
from powertrain_vllm.engine import VllmEngine


def difference(layout, folder, running, rank):
    """Return what is not the same in the static manifest of a rank, "" where all is."""
    [part] = parse_layout(layout).parts
    make = Registry(allow=("vllm",)).load_class(part.spec, "manifest")
    made = make(read_config(folder) | {"dtype": "float32"}, part).rank(rank)
    mine, other = made.by_name(), running.by_name()
    found = [f"{name} is static only" for name in mine if name not in other]
    found += [f"{name} is running only" for name in other if name not in mine]
    found += [f"{mine[n]} is static, {other[n]} is running" for n in mine if n in other and mine[n] != other[n]]
    facts = [(one.rank, one.world, one.kind, dict(one.tied)) for one in (made, running)]
    return "; ".join([*found, *([f"{facts[0]} is static, {facts[1]} is running"] if facts[0] != facts[1] else [])])


async def main(layout, rendezvous, rank, models):
    [part] = parse_layout(layout).parts
    world = part.cards_per_instance
    for meet, model in zip(rendezvous.split(","), models, strict=False):
        kind, folder = model.split("=")
        place = RankSpec(rank=rank, local_rank=rank, world=world, rendezvous=meet if world > 1 else "")
        engine = VllmEngine()
        engine.prepare({})
        options = {"max_model_len": 128}
        spec = EngineSpec(
            backend="vllm", role="infer", model=folder, axes=part.axes, place=place, options=options, timeout=60.0
        )
        try:
            await engine.build(spec)
            found = difference(layout, folder, engine.weights().manifest(), rank)
            print(f"differs {kind}: {found}" if found else f"alike {kind}", flush=True)
        finally:
            await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))

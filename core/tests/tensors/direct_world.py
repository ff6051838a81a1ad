"""Ranks for tests of shm's direct path: every way in which a place can differ from what arrives for it."""

import torch
from transfer_world import Sink, Source

from powertrain.tensors.sink import BoxSink
from powertrain.weights import Box, Entry, Manifest

SHAPES = {
    "plain": (37, 64),
    "cast": (700, 1000),
    "turned": (24, 40),
    "rows": (9, 300),
    "fine": (9, 6),
    "column": (8, 12),
    "large": (2300, 4096),
    "scalar": (),
}
"""large: of more than two system calls. cast: of more than one buffer."""
FLOAT = {"cast", "turned", "scalar", "column"}
"""float32 at the trainer; all else is bfloat16."""
TURNED = {"column"}
"""Lies column by column at the trainer."""


def value(name, step):
    """Return a whole tensor after `step` steps; numbers are whole, and small enough for bfloat16."""
    numbers = torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.int64)
    mixed = (numbers * 131 + len(name) * 17 + step * 7) % 251
    return mixed.to(torch.float32 if name in FLOAT else torch.bfloat16).reshape(SHAPES[name])


def dtype(name):
    return "float32" if name in FLOAT else "bfloat16"


class MixedSource(Source):
    """Rows of each tensor. anew: they are copied at each look."""

    def __init__(self, rank, world):
        self.rank, self.world, self.step, self.adapter, self.anew = rank, world, 0, False, False
        self.named = {name: self.laid(name) for name in SHAPES}

    def laid(self, name):
        mine = self.shard(value(name, self.step))
        return mine.t().contiguous().t() if name in TURNED else mine.clone()

    def manifest(self):
        entries = []
        for name, shape in SHAPES.items():
            mine = self.named[name]
            start = (min(self.rank * -(-shape[0] // self.world), shape[0]), *[0] * (len(shape) - 1)) if shape else ()
            boxes = (Box(start, tuple(mine.shape), name, 0, mine.stride()),) if mine.numel() else ()
            entries.append(Entry(name, dtype(name), shape, boxes))
        return Manifest(self.rank, self.world, tuple(entries))

    def tensors(self):
        return {name: tensor.clone() for name, tensor in self.named.items()} if self.anew else self.named

    def train(self):
        self.step += 1
        for name, tensor in self.named.items():
            tensor.copy_(self.shard(value(name, self.step)))

    def move(self):
        self.named = {name: self.laid(name) for name in SHAPES}

    def make_anew(self):
        self.anew = True


class MixedSink(Sink):
    """Everything whole, each in a place of another kind."""

    def __init__(self, rank=0, world=1):
        named = {
            "plain": torch.zeros(37, 64, dtype=torch.bfloat16),
            "cast": torch.zeros(700, 1000, dtype=torch.bfloat16),
            "turned": torch.zeros(40, 24),
            "rows": torch.zeros(9, 512, dtype=torch.bfloat16),
            "fine": torch.zeros(9, 8, dtype=torch.bfloat16),
            "column": torch.zeros(8, 12),
            "large": torch.zeros(2300, 4096, dtype=torch.bfloat16),
            "scalar": torch.zeros(()),
        }
        entries = []
        for name, shape in SHAPES.items():
            held = named[name].stride()
            seen = shape[::-1] if name == "turned" else shape
            box = Box((0,) * len(shape), seen, name, 0, held)
            more = {"accepts": ("float32",)} if name == "cast" else {}
            more |= {"transform": "transpose"} if name == "turned" else {}
            own = "bfloat16" if name == "cast" else dtype(name)
            entries.append(Entry(name, own, seen, (box,), **more))
        BoxSink.__init__(self, Manifest(rank, world, tuple(entries)), named)
        self.slow, self.broken, self.adapters = 0.0, False, {}

    def wrong(self, step):
        """Return the names whose bytes are not those of a step, in their place or beside it."""
        found = []
        for name, held in self.tensors().items():
            whole = value(name, step).to(held.dtype)
            whole = whole.t() if name == "turned" else whole
            part = held[:, : whole.shape[1]] if name in {"rows", "fine"} else held
            beside = held[:, whole.shape[1] :] if name in {"rows", "fine"} else held[:0] if held.dim() else held * 0
            if not torch.equal(part, whole) or bool(beside.any()):
                found.append(name)
        return found

    def move(self):
        for name in self._tensors:
            self._tensors[name] = self._tensors[name].clone()

    def threads(self, count):
        torch.set_num_threads(count)

"""From a global batch to micro-batches: who computes what, in which rows, and where each log-prob belongs.

Planning is pure and sees the whole batch, so every rank works out all ranks' shares alike. Three layouts of rows:

- `shared`: a prompt once, then its completions, [prompt, completion 1, completion 2, ...], each completion with
  positions that go on from the prompt and a mask that lets it see the prompt and itself alone; groups whose prompts
  begin alike share a row and its beginning where that costs less;
- `packed`: whole sequences end to end, each with its own positions and a block-diagonal mask;
- `padded`: one sequence a row, padded on the right, where causality alone keeps padding out. Right for every decoder.

The first two need a model whose layers are all full attention, under an implementation that takes a 4-D mask (sdpa or
eager); `packed` also works under flash attention, which reads the borders from the positions. `auto` takes shared,
else packed, else padded. The last token of a sequence predicts nothing and is never fed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.interfaces.data import IntArray, TrainBatch

MODES: Final = ("auto", "shared", "packed", "padded")
_MASKED: Final = ("sdpa", "eager")
_HEAD: Final = -2  # cluster number of a row's shared head; -1 is padding


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sequences computed together since their prompts are equal.

    prefix: tokens at the head of the prompt that the whole row shares and feeds once, equal for all its clusters.
    tokens: fed for this cluster alone, the rest of its prompt once.
    """

    members: tuple[int, ...]
    tokens: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. K scored tokens, U positions whose hidden state predicts at least one of them.

    inputs: exactly what the model's forward receives. source: int64 [U], row * L + column of each position, rising.
    rows: int64 [K], index into `source`. targets: int64 [K] token ids. place: int64 [K], index into the batch's tokens.
    """

    inputs: Mapping[str, Tensor]
    source: Tensor
    rows: Tensor
    targets: Tensor
    place: Tensor


def is_full_attention(model: Any) -> bool:
    """Say whether each layer of a transformers model is plain causal attention that reads `position_ids`."""
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_sdpa", False):
        return False
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return False
    if layers := getattr(config, "layer_types", None):
        return set(layers) == {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window is None and getattr(config, "attention_chunk_size", None) is None


def choose_mode(model: Any, wanted: str, attention: str) -> str:
    """Return the mode for a model; ConfigError when the wanted one would give wrong numbers.

    auto: shared for full attention with sdpa or eager, packed for full attention with another implementation, padded
    for everything else (sliding windows, chunked or linear attention, state-space layers).
    """
    full = is_full_attention(model)
    masked = attention in _MASKED
    if wanted == "auto":
        return "padded" if not full else "shared" if masked else "packed"
    if wanted not in MODES:
        message = f"packing is {wanted!r}; it takes {', '.join(MODES)}"
        raise ConfigError(message)
    if wanted != "padded" and not full:
        message = (
            f"packing {wanted!r} needs full attention in every layer, which {type(model).__name__} has not; use padded"
        )
        raise ConfigError(message)
    if wanted == "shared" and not masked:
        message = f"packing 'shared' needs attention sdpa or eager, not {attention!r}; use packed or padded"
        raise ConfigError(message)
    return wanted


def scored_tokens(batch: TrainBatch, *, weighted: bool) -> Any:
    """Return bool [N]: tokens behind their prompt, and with `weighted` only those whose weight is not 0."""
    lengths = np.diff(batch.starts)
    offsets = np.arange(len(batch.tokens)) - np.repeat(batch.starts[:-1], lengths)
    scored = offsets >= np.repeat(batch.prompt_lens, lengths)
    return scored & (batch.weights != 0) if weighted else scored


def plan(
    batch: TrainBatch, scored: Any, *, mode: str, world: int, budget: int, hidden_size: int = 512, masked: bool = True
) -> list[list[list[list[Cluster]]]]:
    """Deal the batch: rank -> micro-batches -> rows -> clusters. Pure: equal on every rank.

    scored: bool [N]. budget: padded tokens of one micro-batch; a longer row stands alone. hidden_size: weighs the
    quadratic cost of long rows against what sharing a prompt saves. masked: False when rows may be as long as the
    budget, since no mask is made. Sequences without a scored token are left out; ranks may get none. ConfigError for
    a model input that is not one value a token.
    """
    for name, value in batch.model_inputs.items():
        if len(value) != len(batch.tokens):
            message = f"model input {name!r} has {len(value)} values for {len(batch.tokens)} tokens, not one each"
            raise ConfigError(message)
    clusters = _clusters(batch, scored, shared=mode == "shared", world=world, budget=budget, hidden_size=hidden_size)
    shares: list[list[Cluster]] = [[] for _ in range(world)]
    loads = [0] * world
    for cluster in clusters:
        rank = loads.index(min(loads))
        shares[rank].append(cluster)
        loads[rank] += cluster.tokens
    width = min(budget, hidden_size * 3 // 2) if masked else budget
    result = []
    for share in shares:
        if mode == "packed":
            rows = _rows(share, width)
        elif mode == "shared" and not batch.model_inputs:
            rows = _headed(batch, share, budget, hidden_size)
        else:
            rows = [[cluster] for cluster in share]
        result.append(_micro_batches(rows, budget, single=mode == "packed" and not masked))
    return result


def _clusters(
    batch: TrainBatch, scored: Any, *, shared: bool, world: int, budget: int, hidden_size: int
) -> list[Cluster]:
    """Return all clusters, longest first, ties in batch order."""
    counts = np.add.reduceat(scored.astype(np.int64), batch.starts[:-1])
    lengths = np.diff(batch.starts)
    live = [int(i) for i in np.flatnonzero(counts)]
    together: dict[Any, list[int]] = {}
    for i in live:
        begin, size = int(batch.starts[i]), int(batch.prompt_lens[i])
        key = batch.tokens[begin : begin + size].tobytes() if shared and not batch.model_inputs else i
        together.setdefault(key, []).append(i)
    share = sum(int(lengths[i]) - 1 for i in live) / world
    found = []
    for members in together.values():
        prompt = int(batch.prompt_lens[members[0]])
        extra = [int(lengths[i]) - 1 - prompt for i in members]
        found += _split(members, prompt, extra, limit=min(budget, share), hidden_size=hidden_size)
    return sorted(found, key=lambda cluster: (-cluster.tokens, cluster.members))


def _split(members: list[int], prompt: int, extra: list[int], *, limit: float, hidden_size: int) -> list[Cluster]:
    """Cut a group into the clusters that cost least: a prompt repeated against a row's quadratic attention.

    A token of one layer costs about 24 h^2 floating-point operations in products and 4 h L in attention over a row of
    L tokens with a dense mask, so a row costs L (1 + L / 6h).
    """
    best: tuple[tuple[bool, float], list[Cluster]] | None = None
    for size in range(len(members), 0, -1):
        parts = [
            Cluster(tuple(members[at : at + size]), prompt + sum(extra[at : at + size]))
            for at in range(0, len(members), size)
        ]
        cost = sum(part.tokens * (1 + part.tokens / (6 * hidden_size)) for part in parts)
        key = (max(part.tokens for part in parts) > limit and size > 1, cost)
        if best is None or key < best[0]:
            best = (key, parts)
    assert best is not None
    return best[1]


def _rows(clusters: Iterable[Cluster], width: int) -> list[list[Cluster]]:
    """First fit of clusters, longest first, into rows of `width` tokens."""
    rows: list[list[Cluster]] = []
    room: list[int] = []
    for cluster in clusters:
        at = next((i for i, free in enumerate(room) if free >= cluster.tokens), None)
        if at is None:
            rows.append([cluster])
            room.append(width - cluster.tokens)
        else:
            rows[at].append(cluster)
            room[at] -= cluster.tokens
    return rows


def _headed(batch: TrainBatch, clusters: list[Cluster], budget: int, hidden_size: int) -> list[list[Cluster]]:
    """Put clusters whose prompts begin alike (a system prompt, examples) into rows that feed the beginning once.

    As many to a row as cost least, by the same reckoning as in `_split`.
    """
    alone = [[cluster] for cluster in clusters]
    prefix = _common(batch, clusters)
    if prefix == 0:
        return alone
    own = [replace(cluster, tokens=cluster.tokens - prefix, prefix=prefix) for cluster in clusters]
    best, least = alone, _cost(alone, hidden_size)
    for size in range(2, len(own) + 1):
        rows = [own[at : at + size] for at in range(0, len(own), size)]
        cost = _cost(rows, hidden_size)
        if cost < least and max(_length(row) for row in rows) <= budget:
            best, least = rows, cost
    return best


def _common(batch: TrainBatch, clusters: list[Cluster]) -> int:
    """Length of what all clusters' prompts begin with, at least one token of each left out; 0 for a single cluster."""
    if len(clusters) < 2:
        return 0
    firsts = [(int(batch.starts[c.members[0]]), int(batch.prompt_lens[c.members[0]])) for c in clusters]
    length = min(size for _, size in firsts) - 1
    prompts = np.stack([batch.tokens[begin : begin + length] for begin, _ in firsts])
    differs = np.flatnonzero((prompts != prompts[0]).any(axis=0))
    return int(differs[0]) if len(differs) else length


def _cost(rows: list[list[Cluster]], hidden_size: int) -> float:
    return sum(_length(row) * (1 + _length(row) / (6 * hidden_size)) for row in rows)


def _micro_batches(rows: list[list[Cluster]], budget: int, *, single: bool) -> list[list[list[Cluster]]]:
    """Gather rows of like length, longest first, as long as their padded size fits the budget."""
    result: list[list[list[Cluster]]] = []
    width = 0
    for row in sorted(rows, key=lambda row: -_length(row)):
        if result and not single and (len(result[-1]) + 1) * width <= budget:
            result[-1].append(row)
        else:
            result.append([row])
            width = _length(row)
    return result


def _length(row: Sequence[Cluster]) -> int:
    return row[0].prefix + sum(cluster.tokens for cluster in row)


class _Canvas:
    """The rows of one micro-batch while they are filled."""

    def __init__(self, rows: int, width: int) -> None:
        shape = (rows, width)
        self.width = width
        self.origin = np.full(shape, -1, dtype=np.int64)  # index into the batch's tokens
        self.position = np.zeros(shape, dtype=np.int64)
        self.cluster = np.full(shape, -1, dtype=np.int64)
        self.segment = np.full(shape, -1, dtype=np.int64)  # 0 in prompts that are shared or owned
        self.source: list[IntArray] = []
        self.place: list[IntArray] = []

    def write(self, row: int, column: int, origin: int, count: int, position: int, segment: int) -> None:
        span = slice(column, column + count)
        self.origin[row, span] = np.arange(origin, origin + count)
        self.position[row, span] = np.arange(position, position + count)
        self.segment[row, span] = segment


def _draw(batch: TrainBatch, rows: Sequence[Sequence[Cluster]], scored: Any) -> _Canvas:
    canvas = _Canvas(len(rows), max(_length(row) for row in rows))
    for r, row in enumerate(rows):
        head = row[0].prefix
        canvas.cluster[r, :head] = _HEAD
        canvas.write(r, 0, int(batch.starts[row[0].members[0]]), head, 0, 0)
        column = head
        for c, cluster in enumerate(row):
            prompt = int(batch.prompt_lens[cluster.members[0]])
            canvas.cluster[r, column : column + cluster.tokens] = c
            canvas.write(r, column, int(batch.starts[cluster.members[0]]) + head, prompt - head, head, 0)
            column += prompt - head
            last = r * canvas.width + column - 1
            for s, i in enumerate(cluster.members):
                first, end = int(batch.starts[i]) + prompt, int(batch.starts[i + 1])
                canvas.write(r, column, first, end - 1 - first, prompt, s + 1)
                flat = r * canvas.width + column + np.arange(-1, end - 1 - first)
                flat[0] = last
                chosen = scored[first:end]
                canvas.source.append(flat[chosen])
                canvas.place.append(np.arange(first, end)[chosen])
                column += end - 1 - first
    return canvas


def render(
    batch: TrainBatch,
    rows: Sequence[Sequence[Cluster]],
    scored: Any,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> MicroBatch:
    """Lay one micro-batch out as tensors. dtype: of the additive mask that eager attention needs (sdpa takes booleans).

    A mask is made only where a row holds more than one sequence and the implementation reads masks.
    """
    canvas = _draw(batch, rows, scored)
    padding = canvas.origin < 0
    inputs = {"input_ids": np.where(padding, 0, batch.tokens[canvas.origin])}
    several = any(len(row) > 1 or len(row[0].members) > 1 for row in rows)
    if not several:  # no mask: causality keeps the padding on the right out, and rising positions say "one sequence"
        inputs["position_ids"] = np.broadcast_to(np.arange(canvas.width), padding.shape).copy()
    else:
        inputs["position_ids"] = canvas.position
    for name, value in batch.model_inputs.items():
        inputs[name] = np.asarray(value)[np.where(padding, 0, canvas.origin)]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in inputs.items()}
    if several and attention in _MASKED:
        mask = _mask(torch.from_numpy(canvas.cluster).to(device), torch.from_numpy(canvas.segment).to(device))
        if attention == "eager":
            mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, torch.finfo(dtype).min)
        tensors["attention_mask"] = mask
    place = np.concatenate(canvas.place)
    source, inverse = np.unique(np.concatenate(canvas.source), return_inverse=True)
    indices = (source, inverse, batch.tokens[place], place)
    return MicroBatch(tensors, *(torch.from_numpy(np.asarray(value, dtype=np.int64)).to(device) for value in indices))


def _mask(cluster: Tensor, segment: Tensor) -> Tensor:
    """Return bool [R, 1, L, L]: a token sees earlier ones of its segment, its cluster's prompt and the row's head."""
    causal = torch.ones(cluster.shape[1], cluster.shape[1], dtype=torch.bool, device=cluster.device).tril()
    near = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    own = near & (cluster[:, :, None] == cluster[:, None, :])
    return ((own | (cluster[:, None, :] == _HEAD)) & causal)[:, None]

"""What is right: tokens, log-probs, losses and steps by the plainest means, one sequence at a time in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powertrain.testing.tensors.models import plain_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powertrain.interfaces.build import OptimSpec
    from powertrain.interfaces.data import LossSpec, TrainBatch

    Floats = NDArray[np.float64]


def regret(model: str | Any, prompt: Sequence[int], tokens: Sequence[int]) -> Floats:
    """Return how far each token's log-prob lies below the greatest one there: 0 all along for greedy tokens."""
    table = _table(model, prompt, tokens)
    chosen = table.gather(1, _column(tokens))[:, 0]
    found: Floats = (table.amax(-1) - chosen).numpy()
    return found


def replay(
    model: str | Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Floats:
    """Return float64 log-probs of `tokens` after `prompt`, each under temperature, then top_k, then top_p."""
    import torch

    ordered = (_table(model, prompt, tokens) / temperature).sort(-1, descending=True)
    weights = ordered.values.softmax(-1)
    if top_k:
        weights[:, top_k:] = 0
        weights = weights / weights.sum(-1, keepdim=True)
    if top_p < 1:
        weights = torch.where(weights.cumsum(-1) - weights >= top_p, 0.0, weights)
        weights = weights / weights.sum(-1, keepdim=True)
    places = ordered.indices.argsort(-1).gather(1, _column(tokens))
    found: Floats = weights.gather(1, places)[:, 0].log().numpy()
    return found


def distribution(model: str | Any, prompt: Sequence[int]) -> Floats:
    """Return float64 [V]: the probability of each next token."""
    found: Floats = _table(model, prompt, [0])[0].exp().numpy()
    return found


def _table(model: str | Any, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
    """Return float64 [T, V] log-probs at the places of `tokens`."""
    import torch

    model = plain_model(model) if isinstance(model, str) else model
    ids = torch.tensor([[*map(int, prompt), *map(int, tokens)]])
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


def _column(tokens: Sequence[int]) -> Any:
    import torch

    return torch.tensor([int(token) for token in tokens])[:, None]


def scores(model: str | Any, batch: TrainBatch, temperature: float = 1.0) -> Floats:
    """Return float64 [N]: the log-prob of every token behind its prompt, 0 on prompts."""
    import numpy as np

    found = np.zeros(len(batch.tokens))
    for begin, middle, end in spans(batch):
        prompt, tokens = batch.tokens[begin:middle].tolist(), batch.tokens[middle:end].tolist()
        found[middle:end] = replay(model, prompt, tokens, temperature=temperature)
    return found


def spans(batch: TrainBatch) -> list[tuple[int, int, int]]:
    """Return (begin, end of the prompt, end) of each sequence."""
    begins = batch.starts[:-1]
    return [(int(b), int(b + p), int(e)) for b, p, e in zip(begins, batch.prompt_lens, batch.starts[1:], strict=True)]


def steps(
    folder: str, batches: Sequence[TrainBatch], loss: LossSpec, optim: OptimSpec
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Take optimizer steps with torch's own AdamW; returns (loss, gradient norm) of each, and name -> weight after."""
    import torch

    from powertrain.tensors.models import load_causal_lm

    model = load_causal_lm(folder, attention="eager")
    betas = (optim.beta1, optim.beta2)
    adam = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    seen = []
    for batch in batches:
        adam.zero_grad()
        total = _loss(model, batch, loss)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip or float("inf"))
        adam.step()
        seen.append((float(total.detach()), float(norm)))
    return seen, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _loss(model: Any, batch: TrainBatch, loss: LossSpec) -> Any:
    import torch

    from powertrain.tensors.loss import LossInputs, load_loss

    total = torch.zeros(())
    for number, (begin, middle, end) in enumerate(spans(batch)):
        ids = torch.from_numpy(batch.tokens[begin:end])[None]
        table = (model(ids).logits[0, middle - begin - 1 : -1] / loss.temperature).log_softmax(-1)
        chosen = table.gather(1, ids[0, middle - begin :, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1) if loss.entropy else None
        fields = {name: torch.as_tensor(value[middle:end]) for name, value in batch.token_fields.items()}
        fields |= {
            name: torch.full_like(chosen, float(value[number])).detach() for name, value in batch.sample_fields.items()
        }
        weights = torch.from_numpy(batch.weights[middle:end])
        output = load_loss(loss.name)(LossInputs(chosen, entropy, fields, weights), loss.config)
        total = total + (output.terms * weights).sum()
    return total / batch.total_weight()


def head_error(weight: Any, tokens: Sequence[int], logprobs: Sequence[float]) -> float:
    """Return how far log-probs at one position are from any that an exact head could give (root mean square).

    Log-probs of several tokens after the same prompt are W h - c for one unknown hidden state h and constant c. What
    is left after the best h and c (least squares in float64) is the head's own rounding, whatever computed h: about
    1e-6 for a float32 product, and a unit in the last place of a bfloat16 logit, above 1e-3, for one in bfloat16.
    weight: [V, H], as the engine holds it. tokens: more than H + 1 different ones.
    """
    import numpy as np

    rows = np.asarray(weight.double())[np.asarray(tokens)]
    table = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
    assert len(rows) > table.shape[1], (len(rows), table.shape[1])
    wanted = np.asarray(logprobs, np.float64)
    left = table @ np.linalg.lstsq(table, wanted, rcond=None)[0] - wanted
    return float(np.sqrt((left**2).sum() / (len(rows) - table.shape[1])))

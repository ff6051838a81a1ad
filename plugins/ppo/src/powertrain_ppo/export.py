"""The end of a run: an export that is read back, and a plot of what happened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.errors import CheckpointError


def verify_export(folder: Path) -> int:
    """Read an exported model or adapter back (configuration, index, tensor names) and return how many tensors it holds.

    CheckpointError for a file or a tensor that is missing.
    """
    adapter = (folder / "adapter_config.json").is_file()
    stem = "adapter_model" if adapter else "model"
    index = folder / f"{stem}.safetensors.index.json"
    if adapter:
        json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    else:
        from transformers import AutoConfig

        AutoConfig.from_pretrained(str(folder))
    if index.is_file():
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        found = {name: file for file in sorted(set(places.values())) for name in _names(folder / file)}
    else:
        places = found = dict.fromkeys(_names(folder / f"{stem}.safetensors"), f"{stem}.safetensors")
    wrong = sorted(name for name in {*places, *found} if places.get(name) != found.get(name))
    if adapter:
        wrong += [name for name in found if not name.startswith("base_model.model.") or ".lora_" not in name]
    if wrong or not found:
        message = (
            f"the export in {folder} does not load again: {len(wrong)} of {len(places)} tensors, such as {wrong[:3]}"
        )
        raise CheckpointError(message)
    return len(found)


def name_base(folder: Path, model: str) -> None:
    """Let an exported adapter name its base model as the configuration does, not the folder it was loaded from."""
    file = folder / "adapter_config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": model}
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as exc:
        message = f"the export's file {file} cannot be read: {exc}"
        raise CheckpointError(message) from exc


def plot(rows: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Draw reward, held-out accuracy and train/infer mismatch over steps into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(
        *_series(rows, "reward/mean"), color="tab:blue", linewidth=1.0, alpha=0.6, label="reward (training prompts)"
    )
    steps, values = _series(rows, "eval/accuracy")
    upper.plot(steps, values, color="tab:orange", marker="o", label="accuracy (held-out prompts, greedy)")
    upper.set_ylabel("reward, accuracy")
    upper.legend(loc="best")
    upper.set_title(title)
    lower.plot(*_series(rows, "mismatch/mean"), color="tab:green", label="mean |Δ log-prob|")
    lower.plot(*_series(rows, "mismatch/max"), color="tab:red", alpha=0.6, label="largest |Δ log-prob|")
    if any(row.get("mismatch/max") for row in rows):
        lower.set_yscale("log")
    lower.set_ylabel("training against inference")
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    lower.legend(loc="best")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]

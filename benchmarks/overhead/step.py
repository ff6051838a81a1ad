"""Our share of a step: the demo's whole step beside the kernels in it, and beside a bare torch loop.

    python benchmarks/overhead/step.py run examples/grpo_sums.yaml ppo.steps=12 [key=value ...]

Started like `powertrain run`, so that the environment is the one of a real run. Two measures, of the same steps:

- share: the part of a whole step that is not spent in the model's forward passes, the LM head, drawing tokens, copying
  caches, the backward pass, clipping or the optimizer. Both times are of one step, so a busy machine hardly moves it.
- bare: the step beside a plain loop over transformers and torch (bare.py) that does the same work on a second copy of
  the model: same prompts, number of tokens, layout of the training rows, optimizer. The two take turns, step by step.

No token ends a completion and all groups are trained on, so that every step has the same work in it. The first step is
left out. Ends with 1 when the median share is above 2 %.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "overhead_step.json"
AIM = 0.02
SAME = ("ppo.skip_constant=false", "ppo.held_out=0", "ppo.export=false", "ppo.plot=false")
SAME += (f"ppo.reward={ROOT / 'benchmarks' / 'main_job' / 'rewards.py'}:first_line",)


class Kernels:
    """Books the time of wrapped functions; one that runs inside another is booked once."""

    def __init__(self):
        self._seconds, self._depth = {}, 0

    def wrap(self, owner, name, label):
        """Replace a function or method by one that is booked under `label`."""
        original = getattr(owner, name)

        def call(*args, **kwargs):
            self._depth += 1
            begun = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._seconds[label] = self._seconds.get(label, 0.0) + time.perf_counter() - begun

        setattr(owner, name, call)

    def taken(self):
        """Return what was booked since the last call."""
        found, self._seconds = self._seconds, {}
        return found


def watch(kernels):
    """Wrap what a bare loop could not do without, and nothing else."""
    import torch

    import powertrain_fsdp.engine as trainer
    import powertrain_fsdp.step as training
    from powertrain.tensors.head import LMHead
    from powertrain_fsdp.model import Scorer
    from powertrain_hf import decode

    kernels.wrap(decode.Decoder, "_hidden", "generate: model")
    kernels.wrap(decode.Decoder, "_select", "generate: copy caches")
    kernels.wrap(LMHead, "logits", "generate: head")
    kernels.wrap(decode, "draw", "generate: draw")
    kernels.wrap(Scorer, "forward", "train: forward")
    kernels.wrap(torch.Tensor, "backward", "train: backward")
    kernels.wrap(training, "_square", "train: norm")
    kernels.wrap(trainer, "clip", "train: clip")
    kernels.wrap(torch.optim.AdamW, "step", "train: optimizer")


def record(rows):
    """Keep what every training pass computes on, for the bare loop's: (micro-batch, advantages, old log-probs)."""
    from powertrain_fsdp.step import Work

    fields = Work.fields

    def kept(self, micro):
        found = fields(self, micro)
        rows.append((micro, found["advantages"], found["old_logprobs"]))
        return found

    Work.fields = kept


def timed(work):
    """Return wall and CPU seconds (of all threads)."""
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - cpu


def watched(loop, found):
    """Return the recipe's loop that measures every step of it, and takes a bare one behind each."""
    from bare import Bare

    kernels, rows = Kernels(), []

    class Watched(loop):
        async def _begin(self):
            await super()._begin()
            options, optim = self.options, self.context.config.optim
            sizes = {name: options[name] for name in ("group_size", "max_tokens")}
            self.bare = Bare(self.context.model_folder, optim, **sizes)
            watch(kernels)
            record(rows)

        async def _step(self, step, rollouts):
            rows.clear()
            kernels.taken()
            load, begun, cpu = os.getloadavg()[0], time.perf_counter(), time.process_time()
            await super()._step(step, rollouts)
            whole, cpu = time.perf_counter() - begun, time.process_time() - cpu
            inside = kernels.taken()
            bare_wall, bare_cpu = timed(lambda: self._bare_step(step))
            row = {"whole": whole, "whole_cpu": cpu, "kernels": inside, "bare": bare_wall, "bare_cpu": bare_cpu}
            found.append({**row, "share": 1 - sum(inside.values()) / whole, "load_1min": round(load, 2)})
            print(f"step {step}: share {found[-1]['share']:.4f}, {whole:.2f} s, bare {bare_wall:.2f} s", flush=True)

        def _bare_step(self, step):
            options = self.options
            records = [record for _, record in self.data.batch(step, options["prompts_per_step"], self.seed)]
            prompts = self.bare.tokenizer([record["prompt"] for record in records])["input_ids"]
            texts, _ = self.bare.generate(prompts)
            rewards = [text.split("\n")[0].strip() for text in texts]
            tokens = len(rewards) * options["max_tokens"]
            self.bare.train(list(rows), tokens)

        async def _save(self, step):
            pass

    return Watched


def summary(found):
    """Return the medians of all steps but the first."""
    rows = found[1:]
    shares = sorted(row["share"] for row in rows)
    return {
        "steps": len(rows),
        "whole_s_median": round(median(row["whole"] for row in rows), 3),
        "share_median": round(median(shares), 5),
        "share_least_most": [round(shares[0], 5), round(shares[-1], 5)],
        "ours_ms_median": round(median(row["whole"] * row["share"] for row in rows) * 1e3, 1),
        "over_bare_wall_median": round(median(row["whole"] / row["bare"] for row in rows), 4),
        "over_bare_cpu_median": round(median(row["whole_cpu"] / row["bare_cpu"] for row in rows), 4),
        "bare_s_median": round(median(row["bare"] for row in rows), 3),
        "kernels_s_median": {
            name: round(median(row["kernels"][name] for row in rows), 4) for name in sorted(rows[0]["kernels"])
        },
        "load_1min": [row["load_1min"] for row in rows],
    }


def main():
    """Run the recipe in this process; write and judge."""
    from powertrain.cli import main as command
    from powertrain_ppo import recipe

    class Endless(recipe.Prompts):
        def __init__(self, *args):
            super().__init__(*args)
            self.stop_ids = ()

    found = []
    recipe.Prompts = Endless
    recipe.Loop = watched(recipe.Loop, found)
    if not set(SAME) & set(sys.argv):
        sys.argv += SAME  # it stays there when the process replaces itself
        sys.orig_argv += SAME
    status = command()
    if status or len(found) < 2:
        return status or 2
    names = ("torch", "transformers", "powertrain", "powertrain-fsdp", "powertrain-hf", "powertrain-ppo")
    document = {
        "benchmark": "overhead_step",
        "date": f"{datetime.date.today()}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "aim": AIM,
        **summary(found),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return int(document["share_median"] > AIM)


if __name__ == "__main__":
    sys.exit(main())

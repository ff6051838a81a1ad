"""Our side: `powertrain run` as a user types it, with a loop that waits for its turn before each step.

    ours.py run examples/grpo_sums.yaml [key=value ...]         started by run.py, see pace.py

Changed against the command: the turns, and no checkpoint behind the last step (TRL saves none either). With
BENCH_FORCED set no token ends a completion, so that every one has `max_tokens` tokens.
"""

import json
import os
import sys
import time

from pace import Follower


class Ended(Exception):
    """The benchmark has seen enough steps."""


def paced(loop, follower):
    """Return the recipe's loop with turns."""

    class Paced(loop):
        async def _begin(self):
            await super()._begin()
            follower.tell(ready=True)

        async def _step(self, step, rollouts):
            if not follower.wait():
                raise Ended
            begun = time.perf_counter()
            await super()._step(step, rollouts)
            seconds = time.perf_counter() - begun
            row = json.loads(self.context.folder.metrics_file.read_text().splitlines()[-1])
            follower.tell(
                seconds=seconds,
                generate=row["time/generate"],
                train=row["time/train"],
                tokens=row["rollout/tokens"],
                trained_tokens=row["train/tokens"],
                reward=row["reward/mean"],
                grad_norm=row["grad_norm"],
                lr=row["lr"],
                details={key: value for key, value in row.items() if key.startswith("time/")},
            )

        async def _save(self, step):
            pass

    return Paced


def main():
    """Run the command in this process."""
    from powertrain.cli import main as command
    from powertrain_ppo import recipe

    if os.environ.get("BENCH_FORCED"):

        class Endless(recipe.Prompts):
            def __init__(self, *args):
                super().__init__(*args)
                self.stop_ids = ()

        recipe.Prompts = Endless
    recipe.Loop = paced(recipe.Loop, Follower())
    try:
        return command()
    except Ended:
        return 0


if __name__ == "__main__":
    sys.exit(main())

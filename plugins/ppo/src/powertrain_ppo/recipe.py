"""The loop: generate, reward, train, push, measure, save; synchronous or up to `max_staleness` versions ahead."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import CheckpointError, ConfigError, PowertrainError
from powertrain.interfaces.data import LossSpec, SamplingParams
from powertrain.interfaces.recipe import Recipe
from powertrain_ppo.data import Data, load_data
from powertrain_ppo.evaluate import evaluate
from powertrain_ppo.progress import Progress
from powertrain_ppo.prompts import Prompts
from powertrain_ppo.references import check_call, check_named, load_function
from powertrain_ppo.rewards import Reward
from powertrain_ppo.rollouts import Ages, Rollout, judged, requests, training_batch
from powertrain_ppo.state import check_state, read_state, save_state

if TYPE_CHECKING:
    from powertrain.interfaces.data import StepResult, TrainBatch
    from powertrain.run.context import RunContext
    from powertrain.weights import TransferReport


OWN_LOSS: Final = "powertrain_ppo.losses:grpo"


class Ppo(Recipe):
    """GRPO on one training and one inference part. See the package's README for the metrics that it writes."""

    def check(self, context: RunContext) -> None:
        """Load data and functions, and refuse a layout that is not one training and one inference part."""
        layout = context.config.layout
        for role in ("train", "infer"):
            labels = [part.label for part in layout.role(role) if not part.frozen]
            if len(labels) != 1:
                message = (
                    f"recipe ppo needs one {role} part that is not frozen; the layout has {', '.join(labels) or 'none'}"
                )
                raise ConfigError(message)
        self._check_options(local=not any(part.python for part in layout.role("train")))
        self.synchronous = self.options["max_staleness"] == 0
        self.data = load_data(self.options, seed=context.config["seed"], path=context.config.path)
        self.reward = self._function(context, "reward")
        self.verdict = self._function(context, "check") if self.options["check"] else None

    def _check_options(self, *, local: bool) -> None:
        """Refuse what the loop could not use; local: this interpreter's modules are the training engine's too."""
        for text in self.options["stop"]:
            if not isinstance(text, str) or not text:
                message = f'ppo.stop: {text!r} is no text; each is one token of the model as text, such as "\\n"'
                raise ConfigError(message)
        if local:
            check_named(self.options["loss"], what="ppo.loss")
        own_loss = self.options["loss"] != OWN_LOSS and not self.options["skip_constant"]
        if self.options["group_size"] == 1 and not own_loss:
            message = (
                "ppo.group_size is 1, and a completion alone in its group has advantage 0, so nothing would be learnt; "
                "it must be 2 or more (or give a ppo.loss of your own with terms beside the advantage, and "
                "ppo.skip_constant: false)"
            )
            raise ConfigError(message)

    def _function(self, context: RunContext, option: str) -> Reward:
        name = self.options[option]
        function = load_function(name, what=f"ppo.{option}", path=context.config.path)
        check_call(function, name, "record", "text", "tokens", what=f"ppo.{option}")
        return Reward(
            function, name, deadline=self.options["reward_deadline"], parallel=self.options["reward_parallel"]
        )

    async def run(self, context: RunContext) -> None:
        """Train to the last step, or on from the newest checkpoint, then export and plot."""
        with Progress(self.options["steps"]) as progress:
            loop = Loop(context, self.options, self.data, self.reward, self.verdict, progress)
            await loop.run()
        from powertrain.run.metrics import read_metrics

        rows = read_metrics(context.folder.metrics_file)
        if self.options["plot"]:
            from powertrain_ppo.export import plot

            file = context.folder.path / "plot.png"
            plot(rows, file, f"{context.config['name']}: {context.config['engines']}")
            progress.say(f"plotted {file}")
        first, last = rows[0], rows[-1]
        if "eval/accuracy" in first and "eval/accuracy" in last:
            before, after, count = first["eval/accuracy"], last["eval/accuracy"], last["eval/rows"]
            progress.say(f"held-out accuracy {before:.3f} -> {after:.3f} on {count} prompts in {last['step']} steps")
        progress.say(f"run folder: {context.folder.path}")


class Loop:
    """One run's loop; `trained` is the number of optimizer steps that the trainer's weights have taken."""

    def __init__(
        self,
        context: RunContext,
        options: Mapping[str, Any],
        data: Data,
        reward: Reward,
        verdict: Reward | None,
        progress: Progress,
    ) -> None:
        config, driver = context.config, context.driver
        self.context, self.options, self.data = context, options, data
        self.reward, self.verdict, self.progress = reward, verdict, progress
        self.labels = tuple(
            next(part.label for part in config.layout.role(role) if not part.frozen) for role in ("train", "infer")
        )
        self.train, self.pool = driver.train[self.labels[0]], driver.infer[self.labels[1]]
        self.seed = config["seed"]
        self.texts = Prompts(context.model_folder, options["stop"])
        self.ages = Ages()
        self.trained = 0
        self.adapter: str | None = None
        self.version = context.start_version
        self.loss = LossSpec(
            name=options["loss"],
            config={"clip_low": options["clip_low"], "clip_high": options["clip_high"]},
            temperature=options["temperature"],
            entropy=options["entropy"],
        )

    async def run(self) -> None:
        """Take every step that is left."""
        self.ages.published(self.version, 0)
        await self._begin()
        ahead, last = self.options["max_staleness"], self.options["steps"]
        rollouts: dict[int, asyncio.Task[Rollout]] = {}
        try:
            for step in range(self.trained + 1, last + 1):
                # Batch j may be sampled once the published weights have taken j - 1 - max_staleness steps.
                for j in range(step, min(step + ahead, last) + 1):
                    if j not in rollouts:
                        rollouts[j] = asyncio.create_task(self._rollout(j))
                await self._step(step, rollouts)
        finally:
            for task in rollouts.values():
                task.cancel()
            await asyncio.gather(*rollouts.values(), return_exceptions=True)
        await self._finish()

    async def _begin(self) -> None:
        """Evaluate the untouched model, or take up the newest checkpoint."""
        folder = self.context.folder
        found = folder.latest() if self.context.resumed else None
        if found is None:
            if self.context.resumed:
                folder.rewind(-1)
            row = await self._evaluated(0)
            folder.log(0, {**row, "weight_version": self.version})
            self.progress.step(0, {**row, "weight_version": self.version})
            return
        self.trained, checkpoint = found
        self.progress.say(f"going on from {checkpoint}")
        with self._or_an_earlier_one(checkpoint):
            state = read_state(checkpoint, step=self.trained)
        check_state(checkpoint, state, options=self.options, seed=self.seed)
        with self._or_an_earlier_one(checkpoint):
            await self.train.load(str(checkpoint / "trainer"))
        folder.rewind(self.trained)
        await self._push()

    @contextmanager
    def _or_an_earlier_one(self, checkpoint: Path) -> Iterator[None]:
        """Let the error of a checkpoint that cannot be used say what a resume can go on from without it."""
        try:
            yield
        except CheckpointError as exc:
            earlier = [path.name for _, path in self.context.folder.complete() if path.name < checkpoint.name]
            then = f"goes on from {earlier[-1]}" if earlier else "begins anew, since no earlier checkpoint is there"
            message = f"{exc}\nbring it back, or move {checkpoint} elsewhere: `powertrain resume` then {then}"
            raise CheckpointError(message) from exc

    async def _rollout(self, step: int) -> Rollout:
        """Sample and judge the batch of `step` with whatever weights are published when its requests go out."""
        options, seconds = self.options, {}
        records = self.data.batch(step, options["prompts_per_step"], self.seed)
        encoded = [self.texts.encode(record) for _, record in records]
        sampling = SamplingParams(
            max_tokens=options["max_tokens"],
            temperature=options["temperature"],
            stop_token_ids=self.texts.stop_ids,
            seed=self.seed,
            n=options["group_size"],
        )
        names = [(f"rollout-{position}", ids) for (position, _), ids in zip(records, encoded, strict=True)]
        with timed(seconds, "generate"):
            results = await self.pool.generate_batch(requests(names, sampling, self.adapter))
        with timed(seconds, "reward"):
            samples, lost = await judged(records, encoded, results, texts=self.texts, reward=self.reward)
        if not samples:
            message = f"all {lost} completions of step {step} were aborted or empty; see pause_mode and max_tokens"
            raise PowertrainError(message)
        return Rollout(step, samples, lost, seconds)

    async def _step(self, step: int, rollouts: dict[int, asyncio.Task[Rollout]]) -> None:
        options, seconds = self.options, {}
        with timed(seconds, "step"):
            self.progress.doing(f"step {step}: sampling")
            with timed(seconds, "wait"):
                rollout = await rollouts.pop(step)
            ages = [self.ages.of_tokens(sample.completion, self.trained) for sample in rollout.samples]
            self._check_staleness(ages)
            batch, advantages = training_batch(
                rollout.samples,
                ages,
                std=options["advantage_std"],
                eps=options["advantage_eps"],
                skip_constant=options["skip_constant"],
            )
            self.progress.doing(f"step {step}: training")
            with timed(seconds, "train"):
                result = await self.train.train_step(batch, self.loss)
            self.trained = step
            self.progress.doing(f"step {step}: publishing the weights")
            with timed(seconds, "sync"):
                report = await self._push()
        row = self._metrics(rollout, ages, advantages, result)
        row |= self._mismatch(batch, result)
        row |= _timings(rollout, result, report, seconds)
        every = options["eval_every"]
        if step == options["steps"] or (every and step % every == 0):
            row |= await self._evaluated(step)
        self.context.folder.log(step, row)
        self.progress.step(step, row)
        if step == options["steps"] or (options["save_every"] and step % options["save_every"] == 0):
            await self._save(step)

    def _check_staleness(self, ages: list[list[int]]) -> None:
        oldest, bound = max(max(row) for row in ages), self.options["max_staleness"]
        if oldest > bound:
            message = f"a token lags {oldest} versions behind the weights in training; max_staleness is {bound}"
            raise PowertrainError(message)

    async def _push(self) -> TransferReport:
        """Publish the trainer's weights under a new version; requests that go out later are answered by it."""
        # Rollouts are looked at by this coroutine's callers only, so noting the version afterwards is in time.
        report = await self.context.push(*self.labels)
        self.version = str(report.version)
        self.ages.published(self.version, self.trained)
        lora = self.context.config.lora
        if lora is not None:
            self.adapter = report.version.adapter_name(lora.name)
        return report

    async def _evaluated(self, step: int) -> dict[str, float]:
        if not self.data.held_out:
            return {}
        what = f"evaluating {len(self.data.held_out)} held-out prompts"
        if step == 0:  # before any step, the wait for which there is nothing else to see
            self.progress.say(what)
        self.progress.doing(f"step {step}: {what}")
        seconds: dict[str, float] = {}
        with timed(seconds, "eval"):
            row = await evaluate(
                self.data.held_out,
                name=f"eval-{step}",
                generate=self.pool.generate_batch,
                texts=self.texts,
                reward=self.reward,
                check=self.verdict,
                max_tokens=self.options["max_tokens"],
                batch=self.options["eval_batch"],
                adapter=self.adapter,
            )
        return {**row, "time/eval": seconds["eval"]}

    async def _save(self, step: int) -> None:
        self.progress.doing(f"step {step}: saving")
        with self.context.folder.checkpoint(step, keep_last=self.context.config["keep_last"]) as part:
            (part / "trainer").mkdir()
            await self.train.save(str(part / "trainer"))
            save_state(part, step=step, options=self.options, seed=self.seed)

    async def _finish(self) -> None:
        if not self.options["export"]:
            return
        from powertrain_ppo.export import name_base, verify_export

        self.progress.doing("exporting the model")
        final = self.context.folder.path / "export"
        with self.context.folder.publishing(final) as part:
            await self.train.export(str(part))
            name_base(part, self.context.config["model"])
            self.texts.tokenizer.save_pretrained(str(part))
            count = verify_export(part)
        self.progress.say(f"exported {count} tensors to {final}")

    def _metrics(
        self, rollout: Rollout, ages: list[list[int]], advantages: list[float], result: StepResult
    ) -> dict[str, Any]:
        samples = rollout.samples
        flat = [age for row in ages for age in row]
        mixed = {sample.group for sample, advantage in zip(samples, advantages, strict=True) if advantage}
        return {
            "reward/mean": math.fsum(sample.reward for sample in samples) / len(samples),
            "reward/groups_mixed": len(mixed) / len({sample.group for sample in samples}),
            "rollout/samples": len(samples),
            "rollout/lost": rollout.lost,
            "rollout/tokens": rollout.tokens,
            "rollout/length": rollout.tokens / len(samples),
            "rollout/cut_off": sum(sample.completion.finish == "length" for sample in samples) / len(samples),
            "staleness/mean": sum(flat) / len(flat),
            "staleness/max": max(flat),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "train/tokens": result.tokens,
            **{f"policy/{k}": v for k, v in result.metrics.items() if k not in {"mismatch", "mismatch_max"}},
            "weight_version": self.version,
        }

    def _mismatch(self, batch: TrainBatch, result: StepResult) -> dict[str, Any]:
        """Return training's log-probs against inference's at equal weights; tokens of older versions do not count."""
        scored = int((batch.weights > 0).sum())
        fresh = float(batch.token_fields["fresh"].sum()) / scored
        mean, largest = result.metrics.get("mismatch"), result.metrics.get("mismatch_max")
        return {
            "mismatch/mean": mean / fresh if mean is not None and fresh else None,
            "mismatch/max": largest if fresh else None,
            "mismatch/heads_agree": self.context.driver.heads_agree,
        }


def _timings(
    rollout: Rollout, result: StepResult, report: TransferReport, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return all that differs between two equal runs, under `time/`."""
    return {
        **{f"time/{name}": value for name, value in {**rollout.seconds, **seconds}.items()},
        "time/tokens_per_s": rollout.tokens / seconds["step"],
        **{f"time/train/{name}": value for name, value in result.seconds.items()},
        **{f"time/{name}": value for name, value in report.metrics().items()},
    }


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long the block took."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - begun

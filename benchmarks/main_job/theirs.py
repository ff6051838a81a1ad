"""TRL's side: GRPOTrainer on the same job, in an environment of its own; waits for its turn before each step.

    theirs.py JOB.json                                          started by run.py and sweep.py, see pace.py

The job file has the model's folder, the prompts of every step in order, the learning rate of every step, the
optimizer's numbers and `settings`: what the sweep varies. Everything that defines the result (group size, lengths,
sampling, loss, advantages, optimizer) is the same as ours; see README.md for the list.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from pace import Follower

SETTINGS = {
    "per_device_train_batch_size": 16,
    "attention": "sdpa",
    "cache_implementation": None,
    "use_transformers_continuous_batching": False,
    "gradient_checkpointing": False,
    "torch_compile": False,
}
"""What the sweep varies inside the process; threads and the allocator are varied by the environment."""


def dataset(job):
    """Return the prompts in the order in which ours are asked; `shuffle_dataset` is off."""
    from datasets import Dataset

    return Dataset.from_list(
        [{key: row[key] for key in ("prompt", "answer")} for step in job["prompts"] for row in step]
    )


class Meter:
    """Takes the times inside a step by wrapping the trainer's own methods, and plays the follower's part."""

    def __init__(self, follower):
        self.follower, self.inside, self.seen = follower, {}, {}
        self.begun = None

    def timed(self, name, function):
        """Return `function` that books its time under `name`."""

        def call(*args, **kwargs):
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside[name] = self.inside.get(name, 0.0) + time.perf_counter() - begun

        return call

    def close_step(self):
        """Tell what the step took: all between two begins of a step, logging and loading of data included."""
        if self.begun is not None:
            seconds, self.begun = time.perf_counter() - self.begun, None
            # Training: forward, backward, clipping and optimizer, that is the step less sampling and judging.
            train = seconds - self.inside["rollout"] - self.inside.get("other", 0.0)
            self.follower.tell(seconds=seconds, generate=self.inside["generate"], train=train, **self.seen)

    def open_step(self):
        """Wait for the turn; False when there is none."""
        go = self.follower.wait()
        self.inside, self.begun = {}, time.perf_counter()
        return go


def reward_function(job, meter):
    """Return the reward in TRL's form: the same check on the decoded text as ours."""
    forced = job["forced"]

    def exact(completions, answer, completion_ids, **_):
        texts = [text.split("\n")[0] if forced else text for text in completions]
        values = [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]
        tokens = sum(map(len, completion_ids))
        meter.seen = {"tokens": tokens, "trained_tokens": tokens, "reward": sum(values) / len(values)}
        return values

    return exact


def turns(meter):
    """Return the callback that makes the trainer wait."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 0:
                meter.follower.tell(ready=True)
            meter.close_step()
            if not meter.open_step():
                os._exit(0)

        def on_train_end(self, *_, **__):
            meter.close_step()

    return Turns()


def trainer_of(job, settings, meter, folder):
    """Return the trainer with TRL's own interfaces alone, except where `forced` takes its stop tokens away."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=settings["attention"]
    )
    model.generation_config.eos_token_id = job["stop_ids"]
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    rows = settings["per_device_train_batch_size"]
    samples = job["prompts_per_step"] * job["group_size"]
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        seed=job["seed"],
        max_steps=len(job["prompts"]),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=samples // rows,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=job["temperature"],
        beta=0.0,
        num_iterations=1,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        loss_type="dapo",
        scale_rewards="group",
        disable_dropout=True,
        shuffle_dataset=False,
        max_grad_norm=job["clip"],
        cache_implementation=settings["cache_implementation"],
        use_transformers_continuous_batching=settings["use_transformers_continuous_batching"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        torch_compile=settings["torch_compile"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optim = job["optim"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1.0,
        betas=(optim["beta1"], optim["beta2"]),
        eps=optim["eps"],
        weight_decay=optim["weight_decay"],
        fused=True,
    )
    rates = job["lr"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)])
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward_function(job, meter),
        train_dataset=dataset(job),
        processing_class=tokenizer,
        callbacks=[turns(meter)],
        optimizers=(optimizer, schedule),
    )
    if job["forced"]:
        trainer.eos_token_ids = [-1]  # no token is
        trainer.generation_kwargs["eos_token_id"] = None
        trainer.generation_config.eos_token_id = None
    trainer._generate_single_turn = meter.timed("generate", trainer._generate_single_turn)
    trainer._generate_and_score_completions = meter.timed("rollout", trainer._generate_and_score_completions)
    return trainer


def main():
    """Train until told to end."""
    job = json.loads(Path(sys.argv[1]).read_text())
    meter = Meter(Follower())
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(job, {**SETTINGS, **job["settings"]}, meter, folder)
        trainer.train()


if __name__ == "__main__":
    main()

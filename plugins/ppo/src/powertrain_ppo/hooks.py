"""The spec of the recipe `ppo`; light, so that a configuration can be checked without numpy and torch."""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import RecipeSpec

OPTIONS = (
    OptionSpec(name="steps", type="int", default=100, minimum=1, help="Optimizer steps of the whole run."),
    OptionSpec(name="prompts_per_step", type="int", default=8, minimum=1, help="Prompts in each step's batch."),
    OptionSpec(name="group_size", type="int", default=8, minimum=1, help="Completions sampled for each prompt."),
    OptionSpec(name="max_tokens", type="int", default=64, minimum=1, help="Longest completion in tokens."),
    OptionSpec(
        name="temperature", type="float", default=1.0, minimum=0.01, help="Of sampling and of the trained log-probs."
    ),
    OptionSpec(
        name="data",
        default="powertrain_ppo.tasks:sums",
        help="A JSONL file, or 'module:function' or 'file.py:function' that returns records with a `prompt`.",
    ),
    OptionSpec(name="data_options", type="mapping", default={}, help="Keyword arguments of the data function."),
    OptionSpec(
        name="held_out",
        type="int",
        default=128,
        minimum=0,
        help="Rows kept for evaluation, never trained on; a few more where rows share a key.",
    ),
    OptionSpec(
        name="reward",
        default="powertrain_ppo.tasks:exact",
        help="'module:function' or 'file.py:function', called with (record, text, tokens); returns a finite number.",
    ),
    OptionSpec(name="reward_deadline", type="float", default=60.0, minimum=0.001, help="Seconds for one reward."),
    OptionSpec(name="reward_parallel", type="int", default=16, minimum=1, help="Async rewards that run at once."),
    OptionSpec(
        name="check",
        help="As `reward`; says if a completion is right (evaluation's accuracy). Without it: reward is 1 or more.",
    ),
    OptionSpec(
        name="max_staleness", type="int", default=0, minimum=0, help="Versions a sample may lag; 0 is synchronous."
    ),
    OptionSpec(name="loss", default="powertrain_ppo.losses:grpo", help="Loss by name, see powertrain.tensors.loss."),
    OptionSpec(name="clip_low", type="float", default=0.2, minimum=0, help="Lower clip of the ratio, 1 - clip_low."),
    OptionSpec(name="clip_high", type="float", default=0.2, minimum=0, help="Upper clip of the ratio, 1 + clip_high."),
    OptionSpec(
        name="advantage_std",
        default="population",
        choices=("population", "sample", "none"),
        help="Deviation that advantages are divided by: over n, over n - 1, or not at all.",
    ),
    OptionSpec(name="advantage_eps", type="float", default=1e-6, minimum=0, help="Added to that deviation."),
    OptionSpec(
        name="skip_constant",
        type="bool",
        default=True,
        help="Leave groups whose rewards are all equal out of the training pass: their gradient is 0 (not so for a "
        "loss with terms beside the advantage).",
    ),
    OptionSpec(name="entropy", type="bool", default=False, help="Also measure the policy's entropy (costs time)."),
    OptionSpec(name="stop", type="list", default=[], help="Further texts, one token each, that end a completion."),
    OptionSpec(
        name="eval_every", type="int", default=0, minimum=0, help="Steps between evaluations; 0: before and after."
    ),
    OptionSpec(name="eval_batch", type="int", default=64, minimum=1, help="Prompts evaluated in one request."),
    OptionSpec(name="save_every", type="int", default=0, minimum=0, help="Steps between checkpoints; 0: at the end."),
    OptionSpec(name="export", type="bool", default=True, help="Write the model (or adapter) in HF format at the end."),
    OptionSpec(name="plot", type="bool", default=True, help="Draw reward, accuracy and mismatch at the end."),
)


@hookimpl
def powertrain_recipe() -> RecipeSpec:
    """Describe the recipe."""
    return RecipeSpec(
        name="ppo",
        recipe="powertrain_ppo.recipe:Ppo",
        summary="GRPO with rewards from a Python function",
        options=OPTIONS,
        requires=("numpy", "transformers", "jinja2", "matplotlib"),
        install="pip install 'powertrain-ppo[engine]'",
        api=(1, 0),
    )

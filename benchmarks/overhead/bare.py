"""The step as a plain loop over transformers and torch: what is left when there is no powertrain."""

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Bare:
    """A model of its own with an AdamW of its own. optim: as `OptimSpec`; sampling is at temperature 1."""

    def __init__(self, folder, optim, *, group_size, max_tokens):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.group_size, self.max_tokens, self.limit = group_size, max_tokens, optim.clip
        betas = (optim.beta1, optim.beta2)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    @torch.inference_mode()
    def generate(self, prompts):
        """Return the decoded completions of prompts of one length: what they all begin with is prefilled once."""
        ids = torch.tensor(prompts)
        cache = DynamicCache(config=self.model.config)
        shared = min(int((ids == ids[0]).all(0).long().cumprod(0).sum()), ids.shape[1] - 1)
        self.model.model(input_ids=ids[:1, :shared], cache=cache, use_cache=True)
        cache.batch_repeat_interleave(len(ids))
        hidden = self.model.model(input_ids=ids[:, shared:], cache=cache, use_cache=True).last_hidden_state
        logits = self.model.lm_head(hidden[:, -1]).repeat_interleave(self.group_size, 0)
        cache.batch_repeat_interleave(self.group_size)
        drawn, logprobs = [], []
        for number in range(self.max_tokens):
            logs = logits.log_softmax(-1)
            drawn.append(torch.multinomial(logs.exp(), 1))
            logprobs.append(logs.gather(1, drawn[-1]))
            if number < self.max_tokens - 1:
                hidden = self.model.model(input_ids=drawn[-1], cache=cache, use_cache=True).last_hidden_state
                logits = self.model.lm_head(hidden[:, -1])
        return self.tokenizer.batch_decode(torch.cat(drawn, 1)), torch.cat(logprobs, 1)

    def train(self, micros, denominator):
        """Take one step over rows that are laid out already: (micro-batch, advantages, old log-probs) each."""
        for micro, advantages, old in micros:
            hidden = self.model.model(**micro.inputs, use_cache=False).last_hidden_state.flatten(0, 1)[micro.source]
            logits = self.model.lm_head(hidden)
            logprobs = logits[micro.rows, micro.targets] - logits.logsumexp(-1)[micro.rows]
            ratio = (logprobs - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).sum() / denominator
            loss.backward()
        clip_grad_norm_(self.model.parameters(), self.limit, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

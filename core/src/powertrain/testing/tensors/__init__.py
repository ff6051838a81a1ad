"""The suites' use of torch, in functions alone: tiny models, a plain reference, weights and adapters by hand."""

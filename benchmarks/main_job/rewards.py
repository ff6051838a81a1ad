"""Our reward where no token ends a completion: the first line counts, as if it had ended there."""

from powertrain_ppo.tasks import exact


def first_line(record, text, tokens):
    """Return 1 when the completion's first line is the record's answer, else 0."""
    return exact(record, text.split("\n")[0], tokens)

"""What the toy training engine wants in its environment."""


def needs(options, spec):
    return {"TOY_MODEL": spec.model, "TOY_NUMBER": 3, "TOY_FAIL": options["fail"]}

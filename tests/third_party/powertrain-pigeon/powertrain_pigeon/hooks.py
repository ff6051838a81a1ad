from powertrain import TransferSpec, hookimpl

PARTS = {part: f"powertrain_pigeon.transfer:Pigeon{part.capitalize()}" for part in ("driver", "source", "sink")}


@hookimpl
def powertrain_transfer():
    return TransferSpec(name="pigeon", reach=("process",), requires=("torch",), api=(1, 0), **PARTS)

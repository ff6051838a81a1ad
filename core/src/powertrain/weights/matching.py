"""Which of the sender's tensors becomes which of the receiver's, and whether the two fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from powertrain.weights.boxes import ITEM_SIZE, Box, Entry
from powertrain.weights.names import match_names
from powertrain.weights.patterns import EngineManifest, Pattern, Tensor

_PLAIN = ("", "transpose")
"""Transforms that make no scales."""


def matched(source: EngineManifest, sink: EngineManifest, problems: list[str]) -> dict[int, list[Tensor]]:
    """Return number of a source's tensor -> the sink's tensors that are made of it; faults go to `problems`.

    Names are matched as `powertrain.weights.names` says; a tied tensor answers to all names of its storage, on both
    sides. What the receiver has frozen, or its transforms make themselves, may be missing at the sender.
    """
    if source.kind == "adapter":
        return {i: [_whole(one, sink.world)] for i, one in enumerate(source.tensors)}
    numbers = {tensor.name: i for i, tensor in enumerate(source.tensors)}
    holder = numbers | {alias: numbers[name] for alias, name in source.tied.items() if name in numbers}
    aliases = _names_of(sink)
    match = match_names(holder, [alias for names in aliases.values() for alias in names])
    problems += [f"{one} and {other} would both become {name}" for one, other, name in match.clashes]
    offered = {name: holder[own] for own, name in match.names.items()}
    found = {name: list(dict.fromkeys(offered[a] for a in names if a in offered)) for name, names in aliases.items()}
    made = set()
    result: dict[int, list[Tensor]] = {}
    for tensor in sink.tensors:
        numbers_found = found[tensor.name]
        for number in numbers_found:
            result.setdefault(number, []).append(tensor)
        if len(numbers_found) > 1:
            both = " and ".join(source.tensors[number].name for number in numbers_found)
            problems.append(f"{both} would both be written to {tensor.name}, which the receiver has tied")
        elif numbers_found:
            sent = source.tensors[numbers_found[0]].pattern.entry
            problems += [f"{tensor.name} {fault}" for fault in _misfit(sent, tensor.pattern.entry)]
            made.update(_scales(tensor, sent, found, problems))
    problems += [
        f"{tensor.name} is wanted by the receiver and not sent; freeze it or send it"
        for tensor in sink.tensors
        if not (found[tensor.name] or tensor.pattern.entry.frozen or tensor.name in made)
    ]
    unmatched = (name for name in match.unmatched if name in numbers and numbers[name] not in result)
    problems += [f"{name} is sent and the receiver has no such tensor" for name in unmatched]
    return result


def _whole(tensor: Tensor, world: int) -> Tensor:
    shape = tensor.pattern.entry.shape
    box = Box((0,) * len(shape), shape, "", 0, (0,) * len(shape))
    return Tensor(tensor.name, Pattern(tensor.pattern.entry, ((tuple(range(world)), (box,)),)))


def _names_of(sink: EngineManifest) -> Mapping[str, list[str]]:
    """Return tensor name -> all names of its storage, its own first."""
    names = {tensor.name: [tensor.name] for tensor in sink.tensors}
    for alias, name in sorted(sink.tied.items()):
        if name in names and alias not in names:
            names[name].append(alias)
    return names


def _misfit(sent: Entry, wanted: Entry) -> Iterator[str]:
    shape = sent.shape[::-1] if wanted.transform == "transpose" else sent.shape
    if shape != wanted.shape:
        turned = ", which it transposes" if shape != sent.shape else ""
        yield f"has shape {list(sent.shape)} at the sender and {list(wanted.shape)} at the receiver{turned}"
    if sent.dtype != wanted.dtype:
        said = f"is {sent.dtype} at the sender; the receiver holds {wanted.dtype}"
        if sent.dtype not in wanted.accepts:
            yield f"{said} and does not cast"
        elif ITEM_SIZE[wanted.dtype] == 1 and wanted.transform in _PLAIN:
            yield f"{said} and names no transform that makes its scales"


def _scales(tensor: Tensor, sent: Entry, found: Mapping[str, list[int]], problems: list[str]) -> list[str]:
    """Return the scales that the receiver makes itself; faults are those of scales that must or must not be sent."""
    scales = [f"{tensor.name.rpartition('.')[0]}.{scale}" for scale in tensor.pattern.entry.scales]
    converted = sent.dtype != tensor.pattern.entry.dtype
    for name in scales:
        if bool(found.get(name)) == converted:
            what = "sent, though the receiver makes it" if converted else "not sent, though it belongs to the values"
            problems.append(f"{name} is {what} of {tensor.name}, which is sent as {sent.dtype}")
    return scales if converted else []

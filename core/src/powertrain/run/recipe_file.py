"""Reading and writing recipe files: YAML without dates, with repeated keys refused, and `env` as plain text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from powertrain.errors import ConfigError

_MERGE: Final = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`, whose mappings are laid under the one that it stands in."""


def _loader(text: str, *, typed: bool = True) -> Any:
    """Parse YAML; typed=False keeps every scalar but null as text. Raises yaml.YAMLError."""
    import yaml

    known = yaml.SafeLoader.yaml_implicit_resolvers
    tags = {tag for pairs in known.values() for tag, _ in pairs} - {"tag:yaml.org,2002:timestamp"}
    if not typed:
        tags = {_MERGE, "tag:yaml.org,2002:null"}

    class Loader(yaml.SafeLoader):
        """A loader that refuses a key given twice and knows no dates."""

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [pair for pair in pairs if pair[0] in tags] for first, pairs in known.items()
        }

        def compose_mapping_node(self, anchor: Any) -> Any:
            """Refuse a key written twice, and lay what `<<` names under the mapping's own keys."""
            node = super().compose_mapping_node(anchor)
            own = [pair for pair in node.value if pair[0].tag != _MERGE]
            keys = [self.construct_object(key, deep=True) for key, _ in own]
            twice = next((at for at, key in enumerate(keys) if key in keys[:at]), None)
            if twice is not None:
                message = f"key {keys[twice]!r} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, message, own[twice][0].start_mark)
            named = [value for key, value in node.value if key.tag == _MERGE]
            under = [
                one for value in named for one in (value.value if isinstance(value, yaml.SequenceNode) else [value])
            ]
            # Not left to PyYAML, where a key that both a mapping and what it merges have can get the wrong value.
            # Of keys given more than once the last counts.
            if all(isinstance(one, yaml.MappingNode) for one in under):  # else PyYAML explains it
                node.value = [pair for one in reversed(under) for pair in one.value] + own
            return node

    return yaml.load(text, Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a recipe file's mapping; values under `env` are kept as they are written. ConfigError otherwise."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        data, raw = _loader(text), _loader(text, typed=False)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as exc:
        fault = "is not YAML" if isinstance(exc, yaml.YAMLError) else "cannot be read"
        message = f"recipe file {str(path)!r} {fault}: {exc}"
        raise ConfigError(message) from exc
    data = {} if data is None else data  # an empty file: what it lacks is told with all else
    if not isinstance(data, dict):
        message = f"recipe file {str(path)!r} holds a {type(data).__name__}; it must be a mapping of keys"
        raise ConfigError(message)
    if isinstance(data.get("env"), dict):
        data["env"] = raw["env"]
    return data


def lay_over(data: dict[str, Any], words: Iterable[str], *, fixed: Container[str] = ()) -> list[str]:
    """Lay `a.b=value` words over a mapping, YAML-typed (text under `env`); returns the faults. fixed: keys to keep."""
    import yaml

    problems: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        in_env = key.startswith("env.")
        keys = ["env", key.removeprefix("env.")] if in_env else key.split(".")
        try:
            value = text if in_env else _loader(text)
        except yaml.YAMLError as exc:
            problems.append(f"the value of {key!r} is not YAML: {text!r} ({str(exc).splitlines()[0]}); quote it")
            continue
        if not equals or not all(keys):
            problems.append(f"{word!r} is not of the form key=value")
        elif keys[0] in fixed:
            problems.append(f"{key!r} cannot be changed in a run that has begun")
        else:
            problems += _set(data, keys, value)
    return problems


def _set(data: dict[str, Any], keys: Sequence[str], value: Any) -> list[str]:
    """Set a nested key in place, making the mappings on its way; returns faults."""
    table = data
    for depth, key in enumerate(keys[:-1], start=1):
        if table.get(key) is None:
            table[key] = {}
        table = table[key]
        if not isinstance(table, dict):
            return [f"{'.'.join(keys)!r}: {'.'.join(keys[:depth])!r} is {table!r} and holds no keys"]
    table[keys[-1]] = value
    return []


def write_yaml(data: Mapping[str, Any]) -> str:
    """Return YAML text in the mapping's order, lists and short mappings on one line where PyYAML finds it fit."""
    import yaml

    return str(yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120))

"""The page of the Python API: public names and what plugins are written with, from their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Any

NOTE = "<!-- Written by scripts/reference.py from the code (`make reference`); not by hand. -->\n"

MODULES: Mapping[str, tuple[str, ...]] = {
    "powertrain.errors": (),
    "powertrain.interfaces.weights": (),
    "powertrain.interfaces.transfer": (),
    "powertrain.interfaces.launcher": (),
    "powertrain.interfaces.build": (),
    "powertrain.weights": (),
    "powertrain.runtime.clients": ("TrainClient", "InferPool"),
    "powertrain.run.context": ("RunContext",),
    "powertrain.tensors.head": ("LMHead",),
    "powertrain.tensors.loss": ("LossInputs", "LossOutput", "cross_entropy"),
    "powertrain.tensors.models": ("materialize", "load_causal_lm"),
    "powertrain.tensors.determinism": ("seed_all", "enable", "check"),
    "powertrain.tensors.sink": ("BoxSink", "whole_manifest"),
}
"""Modules beside the public names, and which of their names are shown; all that they define (or export) if none."""


# ---- text
def escaped(text: str) -> str:
    """Escape what Markdown or HTML would take for markup, outside of backticks."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if i % 2 else re.sub(r"([<\[*_|])", r"\\\1", piece) for i, piece in enumerate(pieces))


def prose(text: str) -> str:
    """Return a docstring as Markdown; indented lines are code and stay as they are."""
    lines = inspect.cleandoc(text).splitlines()
    return "\n".join(line if line.startswith("    ") else escaped(line) for line in lines)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |\n" for line in lines)


# ---- Python API
def api() -> str:
    """Return the page of public names, from their docstrings."""
    import powertrain

    text = [
        "# Python API\n",
        NOTE,
        (
            "Names under `powertrain` are imported on first use (`import powertrain as pt`). The other modules are "
            "what engines, transfers and recipes are written with. Abstract methods are marked.\n"
        ),
        "## powertrain\n",
    ]
    homes = powertrain._HOME
    text += [entry(name, getattr(powertrain, name), homes[name]) for name in sorted(homes, key=str.lower)]
    for path, chosen in MODULES.items():
        module = import_module(path)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == path]
        exported = [name for name, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)]
        names = chosen or (exported if path == "powertrain.weights" else own)
        names = [
            name for name in names if not name.startswith("_") and homes.get(name) not in (path, "powertrain.weights")
        ]
        text += [f"## {path}\n", prose(module.__doc__ or "") + "\n"]
        text += [entry(name, getattr(module, name), "") for name in names]
    return "\n".join(text)


def entry(name: str, value: Any, home: str) -> str:
    """Return the section of one name."""
    where = f"From `{home}`. " if home else ""
    if inspect.isclass(value):
        return f"### `{name}`\n\n{where}{_class(name, value)}"
    if inspect.isfunction(value):
        return f"### `{name}`\n\n```python\n{name}{_signature(value)}\n```\n\n{where}{prose(value.__doc__ or '')}\n"
    docstring = constant_docstring(home, name)
    value_text = f"Value: `{value!r}`. " if isinstance(value, str | int | tuple) else ""
    return f"### `{name}`\n\n{where}{value_text}{prose(docstring)}\n"


def constant_docstring(module: str, name: str) -> str:
    """Return the text that stands below a module's constant."""
    body = ast.parse(inspect.getsource(import_module(module))).body
    for node, below in itertools.pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    return text
    return "The decorator of a plugin's hooks, see `powertrain.hookspecs`." if name == "hookimpl" else ""


def _class(name: str, cls: type) -> str:
    parents = [base.__name__ for base in cls.__bases__ if base not in (object,) and base.__name__ != "ABC"]
    text = [f"Class{f' ({chr(44).join(parents)})' if parents else ''}.\n", prose(cls.__doc__ or "") + "\n"]
    if issubclass(cls, Enum):
        text.append(table(("member", "value"), [(f"`{one.name}`", f"`{one.value}`") for one in cls]))
    elif dataclasses.is_dataclass(cls):
        rows = [
            (f"`{one.name}`", f"`{one.type}`".replace("|", "&#124;"), _default(one)) for one in dataclasses.fields(cls)
        ]
        rows = [(field, kind.replace("`", "") if "&#124;" in kind else kind, default) for field, kind, default in rows]
        text.append(table(("field", "type", "default"), rows))
    elif issubclass(cls, tuple):
        text.append(
            table(("field", "type"), [(f"`{field}`", str(kind)) for field, kind in cls.__annotations__.items()])
        )
    elif "__init__" in vars(cls) and inspect.isfunction(vars(cls)["__init__"]):
        text.append(f"```python\n{name}{_signature(vars(cls)['__init__'], bound=True)}\n```\n")
    members = [(key, member) for key, member in vars(cls).items() if not key.startswith("_")]
    for key, member in members:
        found = _member(key, member)
        text += [found] if found else []
    return "\n".join(text)


def _member(key: str, member: Any) -> str:
    abstract = " (abstract)" if getattr(member, "__isabstractmethod__", False) else ""
    if isinstance(member, property):
        return f"`{key}`{abstract}\n:   {_hanging(member.__doc__)}\n"
    plain: Callable[..., Any] = inspect.unwrap(getattr(member, "__func__", member))
    if not inspect.isfunction(plain) or not plain.__doc__:
        return ""
    words = "async " if inspect.iscoroutinefunction(plain) else ""
    words = "classmethod " if isinstance(member, classmethod) else words
    return f"`{words}{key}{_signature(plain, bound=True)}`{abstract}\n:   {_hanging(plain.__doc__)}\n"


def _hanging(text: str | None) -> str:
    return re.sub(r"\n(?=[^\n])", "\n    ", prose(text or ""))


def _signature(function: Callable[..., Any], *, bound: bool = False) -> str:
    """Return parameters and result as written; bound: without the first one."""
    signature = inspect.signature(function)
    kept = list(signature.parameters.values())[1 if bound else 0 :]
    quoted = str(signature.replace(parameters=kept))
    return re.sub(r"'([^']*)'(?=[,)=\s]|$)", lambda found: _unquoted(found, quoted), quoted)


def _unquoted(found: re.Match[str], text: str) -> str:
    """Drop the quotes of an annotation; those of a default stay."""
    before = text[: found.start()].rstrip()
    return found[1] if before.endswith((":", "->")) else found[0]


def _default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as a value, also where a factory makes it."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return f"`{field.default_factory()!r}`" if field.default_factory is not dataclasses.MISSING else "required"

"""What the site says is true: built strictly, generated pages current, and all that a reader may copy checked."""

import ast
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from powertrain.cli.main import COMMANDS, main
from powertrain.layout import parse_layout
from powertrain.options import READERS
from powertrain.registry import Registry
from powertrain.run.config import load_config, resolve_config
from powertrain.specs import BackendSpec

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DEMO = ROOT / "examples" / "grpo_sums.yaml"
GENERATED = sorted(
    path.stem for path in (DOCS / "reference").glob("*.md") if "scripts/reference.py" in path.read_text()
)
READMES = [ROOT / "README.md", *sorted(ROOT.glob("plugins/*/README.md"))]
PAGES = [*sorted(DOCS.rglob("*.md")), *READMES]
FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]*)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)


def named(path):
    return str(path.relative_to(ROOT))


def blocks(*languages):
    """Return (id, text) of every fenced block of these languages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[2] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[4], id=f"{named(page)}:{line}"))
    return found


def own(name):
    """True for what the page about writing an engine makes up; tests/test_docs_engine.py installs and runs that."""
    return "plain" in name


# ---- the site
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found.get("id"), found.get("name") if tag == "a" else None}
        self.links += [found[key] for key in ("href", "src") if found.get(key)]


def test_every_link_and_anchor_of_the_site_leads_somewhere(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= 20
    broken = []
    for path, page in pages.items():
        for link in page.links:
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_pages_name_no_address_and_no_machine_path():
    found = {named(path): re.findall(r"https?://\S+|/(?:work|root|home)/\S*", path.read_text()) for path in PAGES}
    assert {name: hits for name, hits in found.items() if hits} == {}


@pytest.mark.parametrize("page", [*READMES, ROOT / "CONTRIBUTING.md"], ids=named)
def test_links_of_a_readme_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


# ---- generated pages
@functools.cache
def fresh_pages():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return {path.stem: text for path, text in module.pages().items()}
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_all_generated_pages_are_there():
    assert sorted(fresh_pages()) == GENERATED


@pytest.mark.parametrize("name", GENERATED)
def test_generated_page_is_current(name):
    assert (DOCS / "reference" / f"{name}.md").read_text() == fresh_pages()[name], "run `make reference`"


def test_configuration_page_has_values_for_all_defaults():
    page = fresh_pages()["configuration"]
    assert "<" not in page.replace("<!--", "")
    assert '`{"fp32": true, "chunk": null}`' in page
    assert "factory" not in page


@pytest.mark.parametrize("name", Registry().names("backend"))
def test_every_option_of_a_backend_is_on_the_configuration_page(name):
    section = fresh_pages()["configuration"].partition(f"## Backend `{name}`")[2].partition("\n## ")[0]
    options = Registry().backend(name).options
    told = getattr(options, "shipped", options)
    assert all((f"| `{o.name}` |" if o.listed else f" `{o.name}`") in section for o in told)
    assert len(told) >= len([option for option in options if option.listed])


def test_api_page_has_every_public_name():
    import powertrain

    page = fresh_pages()["api"]
    assert [name for name in powertrain._HOME if f"### `{name}`\n" not in page] == []
    assert "0x" not in page


# ---- what a reader looks for is on a page
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BackendSpec)])
def test_every_field_of_a_backends_spec_is_explained_to_who_writes_one(field):
    page = (DOCS / "writing-an-engine.md").read_text()
    assert f"**{field}**" in page or f"        {field}=" in page


@pytest.mark.parametrize("kind", READERS)
def test_every_type_of_an_option_is_explained_to_who_writes_an_engine(kind):
    assert f"| `{kind}` |" in (DOCS / "writing-an-engine.md").read_text()


@pytest.mark.parametrize("name", re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
def test_every_variable_of_the_makefile_is_on_a_page(name):
    assert any(re.search(rf"make [a-z]+ [^\n]*\b{name}=", page.read_text()) for page in PAGES)


@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_every_command_is_on_a_page_that_people_write(name):
    assert any(f"powertrain {name}" in page.read_text() for page in PAGES if page.stem not in GENERATED)


# ---- what a reader may copy
@pytest.mark.parametrize("text", blocks("layout"))
def test_config_string_parses(text):
    for line in text.splitlines():
        assert str(parse_layout(str(parse_layout(line)))) == str(parse_layout(line))


def test_grammar_is_the_parsers():
    import powertrain.layout

    [block] = [one.values[0] for one in blocks("text") if "config-strings" in one.id]
    told = [" ".join(line.split()) for line in powertrain.layout.__doc__.splitlines()]
    assert [line for line in block.splitlines() if " ".join(line.split()) not in told] == []


def inline_strings():
    backends = "|".join(Registry().names("backend"))
    pattern = re.compile(rf"`((?:{backends})(?:\[\w+\])?:[^`]*\d[^`]*)`")
    return [
        pytest.param(text.replace("\\|", "|"), id=f"{named(page)}:{text}")
        for page in PAGES
        for text in pattern.findall(page.read_text())
    ]


@pytest.mark.parametrize("text", inline_strings())
def test_config_string_in_prose_parses(text):
    assert parse_layout(text).parts


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_resolves(text, monkeypatch):
    monkeypatch.setattr("powertrain.run.config.locate", lambda *_: None)  # a page's model may stand for the reader's
    given = yaml.safe_load(text)
    data = given if "recipe" in given else {**yaml.safe_load(DEMO.read_text()), **given}
    assert resolve_config(data).layout.parts


@pytest.mark.parametrize("text", [one for one in blocks("python") if "docs/reference/api.md" not in one.id])
def test_python_compiles(text):
    lines = text if not text.startswith(" ") else f"class _:\n{text}"
    compile(lines, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_parses(text):
    assert tomllib.loads(text)


@pytest.mark.parametrize("text", blocks("json"))
def test_json_parses(text):
    assert json.loads(text)


def command_lines():
    """Return every `powertrain ...` line of every page that people write, in blocks, indented or in prose."""
    found = {}
    for page in PAGES:
        if page.stem in GENERATED:
            continue
        text = page.read_text()
        lines = re.findall(r"^(?:    |\$ )(powertrain [^|\n]+?)(?:  +#.*)?$", text, re.MULTILINE)
        lines += re.findall(r"^\$ (powertrain .+)$", text, re.MULTILINE) + re.findall(r"`(powertrain [^`\n]+)`", text)
        found.update({f"{named(page)}: {line}": line for line in lines})
    return [pytest.param(line, id=name) for name, line in sorted(found.items()) if "COMMAND" not in line]


def parsed(line):
    """Return the arguments that the real parser makes of a command line; a usage error ends the test."""
    import argparse

    name, *words = shlex.split(line)[1:]
    table = {command: path for command, path, _ in COMMANDS}
    assert name in table, f"no subcommand {name!r}"
    if not words:  # a mention
        return name, argparse.Namespace()
    parser = argparse.ArgumentParser(prog=name, exit_on_error=False)
    import_module(table[name]).add_arguments(parser)
    return name, parser.parse_args(words)


@pytest.mark.parametrize("line", command_lines())
def test_command_line_is_real(line):
    name, args = parsed(line)
    words = [word for word in getattr(args, "overrides", []) if word not in ("...", "key=value") and not own(word)]
    file = ROOT / getattr(args, "recipe", "")
    assert name in ("explain", "engines") or load_config(file if file.is_file() else DEMO, words).layout.parts


def shown_commands():
    found = []
    for block in blocks("console"):
        for piece in re.split(r"^\$ ", block.values[0], flags=re.MULTILINE)[1:]:
            line, _, output = piece.partition("\n")
            if output.strip():
                found.append(pytest.param(line, output, id=f"{block.id}: {line}"))
    return found


@pytest.mark.parametrize(("line", "output"), shown_commands())
def test_shown_output_is_what_the_command_prints(line, output, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(ROOT)
    main(shlex.split(line)[1:])
    printed = "".join(f"{row.rstrip()}\n" for row in "".join(capsys.readouterr()).splitlines())
    pieces = (re.escape(piece) for piece in re.split(r"^\.\.\.$\n?", output.rstrip("\n"), flags=re.MULTILINE))
    assert re.fullmatch("(?:.*\n)*?".join(pieces) + r"\s*", printed), printed


@pytest.mark.parametrize("text", blocks("console"))
def test_make_and_pip_lines_name_what_there_is(text):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in map(shlex.split, re.findall(r"^\$ (.+)$", text, re.MULTILINE)):
        if words[0] == "make":
            names = {word for word in words[1:] if "=" not in word}
            assert names <= targets
            known = re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word.partition("=")[0] for word in words[1:] if "=" in word} <= set(known)
        elif words[0] == "pip" and not own(words[-1]):
            dist, _, extra = words[-1].rstrip("]").partition("[")
            project = tomllib.loads(
                (ROOT / "plugins" / dist.removeprefix("powertrain-") / "pyproject.toml").read_text()
            )
            assert extra in project["project"]["optional-dependencies"]


# ---- what pages claim of plugins, variables and messages
@pytest.mark.parametrize("name", Registry().names("backend"))
def test_backend_page_says_if_the_engine_is_there(name):
    planned = Registry().backend(name).status == "planned"
    assert ("**The engine is not there yet.**" in (DOCS / "backends" / f"{name}.md").read_text()) == planned
    status = "engine not there yet" if planned else "ready"
    role = Registry().backend(name).role
    assert f"| [{name}]({name}.md) | {role} | {status} |" in (DOCS / "backends" / "index.md").read_text()


@pytest.mark.parametrize("name", Registry().names("transfer"))
def test_transfers_page_says_if_a_transfer_is_there(name):
    rows = [row for row in (DOCS / "transfers.md").read_text().splitlines() if row.startswith("| [") and name in row]
    status = "not there yet" if Registry().transfer(name).status == "planned" else "ready"
    assert [row.split("|")[-2].strip() for row in rows] == [status]


def sources():
    return [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]


def test_page_of_variables_names_exactly_those_of_the_code():
    page = (DOCS / "reference" / "environment-variables.md").read_text()
    code = "\n".join(path.read_text() for path in sources())
    ours = r"POWERTRAIN_[A-Z_]+"
    assert set(re.findall(ours, page)) == set(re.findall(rf"[\"'$`]({ours})", code))
    listed = re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)
    assert [name for name in listed if name not in code] == []


def test_page_of_variables_has_the_defaults_of_the_code():
    from powertrain.env import default_variables, determinism_variables

    page = (DOCS / "reference" / "environment-variables.md").read_text()
    values = {**default_variables(), **determinism_variables(0, {})}
    varying = {"OMP_NUM_THREADS": "the host", "PYTHONHASHSEED": "the seed"}
    for name, value in values.items():
        assert f"| `{name}` | {varying.get(name, f'`{value}`')}" in page


@functools.cache
def messages_of_the_code():
    """Return all texts of the code, `…` for what is filled in; constants of text are filled in here."""
    trees = [ast.parse(path.read_text()) for path in sources()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    constants = {
        getattr(target, "id", ""): node.value.value
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }

    def text(node):
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        inner = node.value if isinstance(node, ast.FormattedValue) else None
        return constants.get(inner.id, "…") if isinstance(inner, ast.Name) else "…"

    found = [text(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]
    return "\n".join([*found, (ROOT / "scripts" / "make_env.sh").read_text()])


def quoted_messages():
    return [
        pytest.param(block.values[0].strip(), id=block.id)
        for block in blocks("text")
        if block.id.startswith("docs/troubleshooting")
    ]


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_message_exists(message):
    pieces = [piece.strip() for piece in message.split("…") if len(piece.strip()) > 3]
    assert any(len(piece) >= 9 for piece in pieces), "too little text to be found again"
    assert [piece for piece in pieces if piece not in messages_of_the_code()] == []


def test_no_check_has_run_dry():
    """A pattern above that finds nothing would let everything pass."""
    counts = [blocks("layout"), blocks("yaml"), blocks("python"), inline_strings(), command_lines(), shown_commands()]
    assert min(map(len, [*counts, quoted_messages()])) >= 5

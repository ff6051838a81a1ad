"""The dists as wheels in environments of their own, and a third party's packages beside them.

Third-party packages such as torch come from this interpreter's site-packages: a folder of links to them, without
powertrain's own dists, stands on each environment's path.
"""

from __future__ import annotations

import email
import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DISTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
THIRD_PARTY = Path(__file__).parents[1] / "third_party"
HEAVY = {"torch", "transformers", "peft", "safetensors", "accelerate", "matplotlib"}
EXTRAS = [f"powertrain-{name}[engine]" for name in ("archon", "fsdp", "hf", "ppo")]
SPECS = [f"powertrain-{name}" for name in ("megatron", "sglang", "vllm")]


def pip(*words, **kwargs):
    """Run pip as it is without a network and without this machine's settings."""
    quiet = ("-q", "--isolated", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *quiet, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(sources, into):
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", into, *sources)
    return into


class Environment:
    """A new virtual environment without any package, but for a folder of links on its path."""

    def __init__(self, folder: Path, shared: Path, wheels: Path) -> None:
        self.folder, self.wheels = folder, wheels
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / "shared.pth").write_text(f"{shared}\n")
        self.home = folder.with_name(f"{folder.name}-home")
        self.home.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "POWERTRAIN", "VIRTUAL_ENV"))}
        self.env = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}

    def install(self, *names):
        """Install with all that the wheels ask for, which has to be there already."""
        pip("--python", self.folder, "install", "--no-index", "--no-compile", "--find-links", self.wheels, *names)

    def uninstall(self, *names):
        pip("--python", self.folder, "uninstall", "-y", *names)

    def call(self, program, *words):
        command = [self.folder / "bin" / program, *map(str, words)]
        given = {"cwd": self.home, "env": self.env, "timeout": 200}
        return subprocess.run(command, capture_output=True, text=True, check=False, **given)

    def powertrain(self, *words):
        done = self.call("powertrain", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *words):
        """Run a command that must end with status 2 and one block of text; return that."""
        done = self.call("powertrain", *words)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        return done.stderr

    def python(self, code):
        """Run code that prints one JSON value; return that."""
        done = self.call("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @staticmethod
    def metrics(folder):
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def checked(self):
        """Return the rows of `powertrain engines --check` by kind and name."""
        rows = json.loads(self.powertrain("engines", "--check", "--json"))["plugins"]
        return {(row["kind"], row["name"]): row for row in rows}


def link_all(folder: Path, entries) -> Path:
    folder.mkdir()
    for entry in entries:
        if "powertrain" not in entry.name and entry.name != "__pycache__" and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def hard_dependencies(name):
    """Return the names of all dists that a dist needs without extras, however far down."""
    found, todo = set(), [name]
    while todo:
        needs = [Requirement(text) for text in metadata.requires(todo.pop()) or ()]
        new = {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})} - found
        found |= new
        todo += new
    return found


@pytest.fixture(scope="session")
def tmp(tmp_path_factory):
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="session")
def wheels(tmp):
    """Return the folder with the wheels of all dists and of the third party's packages."""
    outside = tmp / "elsewhere"
    shutil.copytree(THIRD_PARTY, outside, ignore=shutil.ignore_patterns("__pycache__"))
    return build([*DISTS, *outside.iterdir()], tmp / "wheelhouse")


@pytest.fixture(scope="session")
def everything(tmp):
    """Return a folder of links to all that is installed here but powertrain."""
    entries = {path.name: path for folder in reversed(site.getsitepackages()) for path in Path(folder).iterdir()}
    return link_all(tmp / "everything", entries.values())


@pytest.fixture(scope="session")
def light(tmp):
    """Return a folder of links to core's hard dependencies alone."""
    names = hard_dependencies("powertrain")
    assert not names & HEAVY
    entries = {}
    for dist in map(metadata.distribution, names):
        tops = {file.parts[0] for file in dist.files if file.parts[0] != ".."}
        entries |= {top: Path(dist.locate_file(top)) for top in tops}
    return link_all(tmp / "light", entries.values())


@pytest.fixture(scope="session")
def full(tmp, everything, wheels):
    """Return an environment with all dists of this repository, what their engines need, and a guest's transfer."""
    environment = Environment(tmp / "full", everything, wheels)
    environment.install(*EXTRAS, *SPECS, "powertrain-pigeon")
    return environment


@pytest.fixture(scope="session")
def bare(tmp, light, wheels):
    """Return an environment with all dists of this repository and without what the engines need."""
    environment = Environment(tmp / "bare", light, wheels)
    environment.install(*(extra.partition("[")[0] for extra in EXTRAS), *SPECS)
    return environment


@pytest.fixture(scope="session")
def core(tmp, light, wheels):
    environment = Environment(tmp / "core", light, wheels)
    environment.install("powertrain")
    return environment


@pytest.fixture(scope="session")
def guest(tmp, light, wheels):
    """Return an environment with core, one engine that cannot run there, and the third party's packages."""
    environment = Environment(tmp / "guest", light, wheels)
    environment.install("powertrain-hf", "powertrain-echo", "powertrain-parrot")
    return environment


class Wheel:
    def __init__(self, source: Path, wheels: Path) -> None:
        self.project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        name = self.project["name"].replace("-", "_")
        (path,) = wheels.glob(f"{name}-*.whl")
        with zipfile.ZipFile(path) as archive:
            self.files = {info.filename: archive.read(info) for info in archive.infolist()}
        self.info = f"{name}-{self.project['version']}.dist-info"
        self.metadata = email.message_from_bytes(self.files[f"{self.info}/METADATA"])
        self.needs = [Requirement(text) for text in self.metadata.get_all("Requires-Dist") or ()]


@pytest.fixture(scope="session")
def open_wheel(wheels):
    """Return a function from a dist's source folder to its wheel's content."""
    return lambda source: Wheel(source, wheels)


CHARACTERS = "0123456789+= "
RECIPE = """
recipe: ppo
engines: fsdp:d1|hf:d1
model: model
device: cpu
optim: {lr: 1.0e-2}
ppo:
  {steps: 2, prompts_per_step: 3, group_size: 4, max_tokens: 4, held_out: 4, data: rows.jsonl, reward: mine.py:sevens}
"""
REWARD = """
def sevens(record, text, tokens):
    return text.count("7") / 4
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 15,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def tiny_model(folder: Path) -> None:
    """Write a random one-layer Llama whose vocabulary is `CHARACTERS` and two special tokens, without torch."""
    import numpy
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    words = {word: i for i, word in enumerate(["<end>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    attention = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
    layer = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    layer |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    layer |= {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (len(words), 32), "model.norm": (32,)}
    random = numpy.random.default_rng(0)
    weights = {f"{name}.weight": random.normal(0, 0.1, shape).astype("float32") for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="session")
def recipe(tmp):
    """Return a recipe file with its model, data and reward beside it."""
    folder = tmp / "recipe"
    folder.mkdir()
    tiny_model(folder / "model")
    rows = [{"prompt": f"{a}+{b}="} for a in range(5) for b in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARD)
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder / "tiny.yaml"

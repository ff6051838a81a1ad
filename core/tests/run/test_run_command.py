"""`powertrain run` as a stranger calls it: what a faulty request is answered, before anything starts."""

from pathlib import Path

import pytest
import yaml

from powertrain.cli.main import main
from powertrain.run.folder import RunFolder

RECIPE = {
    "recipe": "ppo",
    "engines": "fsdp:d1|hf:d1",
    "model": "someone/some-model",
    "ppo": {"data": "powertrain_ppo.tasks:sums", "reward": "powertrain_ppo.tasks:exact", "steps": 3},
}


@pytest.fixture
def dry(tmp_path: Path, capsys, monkeypatch):
    """Return what a dry run of the recipe, with keys laid over it, answers: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **keys) -> tuple[int, str, str]:
        Path("sums.yaml").write_text(yaml.safe_dump({**RECIPE, **keys}))
        status = main(["run", "sums.yaml", *words, "--dry-run"])
        return status, *capsys.readouterr()

    return run


def test_the_recipe_by_itself_is_accepted(dry):
    assert dry()[0] == 0


@pytest.mark.parametrize("runs", ["file", "file/below", "nowhere-link"])
@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_runs_that_is_no_folder_is_refused(tmp_path, monkeypatch, capsys, runs, words):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("nowhere-link").symlink_to("nowhere")
    Path("sums.yaml").write_text(yaml.safe_dump({**RECIPE, "runs": runs, "inline": "never"}))
    assert main(["run", "sums.yaml", *words]) == 2
    assert f"runs: '{tmp_path / runs.split('/')[0]}' is " in capsys.readouterr().err


def test_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="is a file or a link to nothing, not a folder"):
        RunFolder.make(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden"])
def test_name_that_is_no_folder_is_refused_by_a_dry_run(dry, name):
    status, _, err = dry(f"name={name}")
    assert status == 2
    assert f"a run cannot be named {name!r}" in err


@pytest.mark.parametrize("words", [["hf.head_fp32=null"], ["engines=fsdp:d1|hf:d1?head_fp32=null"]])
def test_null_of_a_parts_head_means_the_runs_setting(dry, words):
    assert dry(*words, "head.fp32=false")[0] == 0


@pytest.mark.parametrize("given", [{"shm": None}, {"shm": {}}, None])
def test_transfer_without_options_is_accepted(dry, given):
    assert dry(transfer_options=given)[0] == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"bucket_mb": 64},
            "(did you mean 'disk.bucket_mb' or 'ipc.bucket_mb' or ",
        ),
        ({"shm": 5}, "transfer shm is 5; it must be a mapping of options"),
        ({5: 1}, "transfer_options: 5 is no transfer; there are: "),
        ({5: {}}, "transfer_options: 5 is no transfer; there are: "),
        ({None: None}, "transfer_options: None is no transfer; there are: "),
        ({"shmm": {}}, "transfer_options: 'shmm' is no transfer (did you mean 'shm'?)"),
        ({"shm": {"bucket_m": 1}}, "unknown option 'bucket_m' (did you mean 'bucket_mb'?)"),
    ],
)
def test_faulty_transfer_options_are_told(dry, given, told):
    status, _, err = dry(transfer_options=given)
    assert status == 2
    assert told in err


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("./models", "model folder './models' does not exist below {base}"),
        ("", "option 'model' is ''; leave it out, or give a text"),
        ("package:json/x.gguf", "package 'json' has no file 'x.gguf'"),
    ],
)
def test_model_that_cannot_be_is_told_by_a_dry_run_beside_the_other_faults(dry, tmp_path, model, told):
    status, _, err = dry("sed=1", model=model)
    assert status == 2
    assert told.format(base=repr(str(tmp_path))) in err
    assert "'sed'" in err


@pytest.mark.parametrize(("steps", "refused"), [(1, True), (5, True), (6, False), (9, False)])
def test_resumed_run_cannot_have_fewer_steps_than_it_has_taken(dry, tmp_path, capsys, monkeypatch, steps, refused):
    config = dry("ppo.steps=6")[1]
    with RunFolder.make(tmp_path / "run") as folder:
        folder.write_config(config)
        with folder.checkpoint(6, keep_last=1):
            pass
    carried = []
    monkeypatch.setattr("powertrain.cli.resume.carry_on", lambda *args, **kwargs: carried.append(args) or 0)
    assert main(["resume", "run", f"ppo.steps={steps}"]) == (2 if refused else 0)
    told = f"'ppo.steps' is {steps}; the run has taken 6, give at least 6"
    assert (told in capsys.readouterr().err) is refused
    assert len(carried) == (not refused)


@pytest.mark.parametrize(("words", "status"), [([], 2), (["base=."], 0)])
def test_resumed_run_whose_recipe_has_moved_is_given_the_new_folder(tmp_path, dry, capsys, monkeypatch, words, status):
    with RunFolder.make(tmp_path / "run") as folder:
        folder.write_config(dry()[1].replace(f"base: {tmp_path}", f"base: {tmp_path}/gone"))
    monkeypatch.setattr("powertrain.cli.resume.carry_on", lambda *args, **kwargs: 0)
    assert main(["resume", "run", *words]) == status
    assert ("'base' is" in capsys.readouterr().err) is (status == 2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["runn", "a.yaml"], "no command 'runn' (did you mean 'run'?); there are: run, resume, "),
        (["xyz"], "no command 'xyz'; there are: run, resume, "),
        (
            ["run", "a.yaml", "--steps", "3"],
            "no option '--steps'; settings are words without dashes, such as 'ppo.steps=3';",
        ),
        (["run", "a.yaml", "--steps"], "such as 'ppo.steps=true'"),
        (
            ["run", "a.yaml", "--optim.lr=1"],
            "no option '--optim.lr=1'; settings are words without dashes, such as 'optim.lr=1'",
        ),
        (["run", "--lr", "1", "a.yaml"], "such as 'optim.lr=1'"),
        (["run", "a.yaml", "--model=x"], "such as 'model=x'"),
        (
            ["run", "a.yaml", "--dry-runn"],
            "no option '--dry-runn' (did you mean '--dry-run'?); `powertrain run --help`",
        ),
        (
            ["resume", "run", "--steps=3"],
            "no option '--steps=3'; settings are words without dashes, such as 'ppo.steps=3'",
        ),
        (["explain", "fsdp:d1", "--jsn"], "no option '--jsn' (did you mean '--json'?); `powertrain explain "),
        (["engines", "--what"], "no option '--what'; `powertrain engines --help` lists what there is"),
    ],
)
def test_unusable_command_line_is_told_with_the_way_out(capsys, words, told):
    assert main(words) == 2
    assert told in capsys.readouterr().err

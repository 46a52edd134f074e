"""What the user got wrong ends in one line that names it and status 2, without a traceback, and changes no file."""

import hashlib
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT, toy_rows, write_rows
from safetensors.torch import load_file, save_file

from command_line import InputError, parse_options, write_file
from grasp import GraspOptions

SMALL = dict(batch_size=2, max_steps=1, max_new_tokens=2, answer_format="text", save_steps=0)


@pytest.fixture
def place(tmp_path, model_folder, monkeypatch):
    """A folder with a copy of the model, data and a config file; it is the current one."""
    shutil.copytree(model_folder, tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", toy_rows(4))
    settings = dict(model="model", dataset="rows.jsonl", output_dir="out", **SMALL)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(name, *argv):
    """`python NAME ARGV` in this process; returns its exit status."""
    kept, sys.argv = sys.argv, [name, *map(str, argv)]
    try:
        runpy.run_path(str(ROOT / name), run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = kept


grasp = partial(script, "grasp.py")


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_rows(path, **changes):
    rows = toy_rows(4)
    rows[1].update(changes)
    write_rows(path, rows)


def drop_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def finished_run(place):
    (place / "out").mkdir()
    (place / "out/metrics.jsonl").write_text("{}\n")


def checkpoint(place, **settings):
    """An output folder as a killed run leaves it."""
    shutil.copytree(place / "model", place / "out/checkpoint-1")
    options = GraspOptions(model="model", dataset="rows.jsonl", output_dir="out", **{**SMALL, **settings})
    (place / "out/options.yaml").write_text(yaml.safe_dump(asdict(options)))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


# name: (what is done to the folder, the arguments, words of the one line)
WRONG = {
    "no arguments": (None, [], ["--model", "needed"]),
    "no data set": (None, ["--model", "model"], ["--dataset", "needed"]),
    "missing config file": (None, ["nowhere.yaml"], ["nowhere.yaml: no such file"]),
    "config file is a folder": (None, ["model"], ["model", "directory"]),
    "YAML no mapping": (lambda p: (p / "run.yaml").write_text("- a\n- b\n"), ["run.yaml"], ["run.yaml", "option: value"]),
    "broken YAML": (lambda p: (p / "run.yaml").write_text("a: [1\nb: {"), ["run.yaml"], ["run.yaml", "YAML"]),
    "deep YAML": (lambda p: (p / "run.yaml").write_text("[" * 3000), ["run.yaml"], ["run.yaml", "YAML"]),
    "unknown YAML key": (
        lambda p: (p / "run.yaml").write_text("lerning_rate: 1\n"),
        ["run.yaml"],
        ["'lerning_rate'", "'learning_rate'"],
    ),
    "unknown flag": (None, ["run.yaml", "--max-new-token", "3"], ["'--max-new-token'", "'max_new_tokens'"]),
    "unknown flag before the file": (None, ["--sede", "3", "run.yaml"], ["'--sede'", "'seed'"]),
    "unknown flag without a file": (None, ["--lerning-rate", "3", "--model", "m"], ["'--lerning-rate'", "'learning_rate'"]),
    "second file": (None, ["run.yaml", "other.yaml"], ["'other.yaml'"]),
    "flag without value": (None, ["run.yaml", "--seed"], ["--seed", "expected one argument"]),
    "negative number": (None, ["run.yaml", "--learning-rate", "-0.1"], ["--learning-rate", "-0.1", "at least 0"]),
    "zero": (None, ["run.yaml", "--batch-size=0"], ["--batch-size", "0", "at least 1"]),
    "too large": (None, ["run.yaml", "--max-dropped", "1.5"], ["--max-dropped", "1.5", "at most 1"]),
    "not a number": (None, ["run.yaml", "--learning-rate", "nan"], ["--learning-rate", "nan"]),
    "infinite": (None, ["run.yaml", "--learning-rate", "inf"], ["--learning-rate", "inf"]),
    "word for a number": (None, ["run.yaml", "--epochs", "two"], ["--epochs", "'two'"]),
    "fraction for a count": (None, ["run.yaml", "--batch-size", "2.5"], ["--batch-size", "'2.5'"]),
    "word for a switch": (None, ["run.yaml", "--gradient-checkpointing", "maybe"], ["--gradient-checkpointing", "'maybe'"]),
    "list for a number": (lambda p: (p / "run.yaml").write_text("seed: [1, 2]\n"), ["run.yaml"], ["seed", "[1, 2]"]),
    "bad choice": (None, ["run.yaml", "--divergence", "reverse"], ["--divergence", "'reverse'", "reverse_kl"]),
    "missing data": (None, ["run.yaml", "--dataset", "nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
    "empty data": (lambda p: (p / "rows.jsonl").write_text(""), ["run.yaml"], ["rows.jsonl", "found 0"]),
    "no JSON": (lambda p: (p / "rows.jsonl").write_text("hello\n"), ["run.yaml"], ["rows.jsonl, row 1", "JSON"]),
    "no text": (lambda p: (p / "rows.jsonl").write_bytes(b"\xff\x00"), ["run.yaml"], ["rows.jsonl", "decode"]),
    "no question": (lambda p: edit_rows(p / "rows.jsonl", question=None), ["run.yaml"], ["row 2", "'q1'", "question"]),
    "aspects as strings": (
        lambda p: edit_rows(p / "rows.jsonl", rubric_aspects=["a", "b"]),
        ["run.yaml"],
        ["row 2", "rubric_aspects", "list of objects"],
    ),
    "duplicate ids": (lambda p: edit_rows(p / "rows.jsonl", id="q0"), ["run.yaml"], ["row 2", "'q0'", "once"]),
    "config without rows": (
        lambda p: write_rows(p / "data/Art_and_Entertainment/train.jsonl", toy_rows(4)),
        ["run.yaml", "--dataset", "./data", "--config", "Music"],
        ["data", "Music"],
    ),
    "missing split": (
        lambda p: write_rows(p / "data/train.jsonl", toy_rows(2)),
        ["run.yaml", "--dataset", "./data", "--split", "trian"],
        ["data", "'trian'"],
    ),
    "missing held-out split": (
        lambda p: write_rows(p / "data/train.jsonl", toy_rows(2)),
        ["run.yaml", "--dataset", "./data", "--eval-steps", "1"],
        ["data", "'validation'"],
    ),
    "too many left out": (
        lambda p: edit_rows(p / "rows.jsonl", rubric_aspects=[]),
        ["run.yaml"],
        ["1 of 4 rows", "no aspects", "q1", "--max-dropped"],
    ),
    "prompts over the budget": (
        None,
        ["run.yaml", "--max-prompt-tokens", "9"],
        ["4 of 4 rows", "over 9 tokens", "--max-prompt-tokens"],
    ),
    "prompt longer than the model": (
        lambda p: edit_rows(p / "rows.jsonl", narrative="tea " * 1200),
        ["run.yaml", "--privileged", "both"],
        ["1024", "--max-prompt-tokens"],
    ),
    "answer longer than the model, before a run": (
        None,
        ["run.yaml", "--max-new-tokens", "1000", "--dry-run"],
        ["1024", "lower --max-new-tokens"],
    ),
    "a name that no file can have": (
        lambda p: (p / "odd.yaml").write_text('prompts: "a\\0b"\n'),
        ["odd.yaml", "--model", "model", "--dataset", "rows.jsonl", "--output-dir", "out"],
        ["no such file"],
    ),
    "resume beside a damaged account": (
        lambda p: (checkpoint(p), (p / "out/data.json").write_text("{}")),
        ["run.yaml", "--resume"],
        ["data.json: is not what a run wrote"],
    ),
    "no held-out split": (
        lambda p: ((p / "d").mkdir(), shutil.copy(p / "rows.jsonl", p / "d/train.jsonl")),
        ["run.yaml", "--dataset", "d", "--eval-steps", "1", "--eval-split", "dev"],
        ["'dev' (--eval-split, of --eval-dataset)", "found"],
    ),
    "answer longer than the model": (None, ["run.yaml", "--max-new-tokens", "1000"], ["1024", "tokens"]),
    "missing templates": (None, ["run.yaml", "--prompts", "nowhere.yaml"], ["nowhere.yaml: no such file"]),
    "wrong template": (
        lambda p: (p / "prompts.yaml").write_text("question: Q\n"),
        ["run.yaml", "--prompts", "prompts.yaml"],
        ["prompts.yaml", "'question'", "{question}"],
    ),
    "missing model": (None, ["run.yaml", "--model", "./nowhere"], ["nowhere"]),
    "model folder without tokenizer": (
        lambda p: [path.unlink() for path in (p / "model").glob("*token*")],
        ["run.yaml"],
        ["model", "tokenizer"],
    ),
    "broken tokenizer": (lambda p: (p / "model/tokenizer.json").write_text("{}"), ["run.yaml"], ["model", "tokenizer"]),
    "no chat template": (lambda p: (p / "model/chat_template.jinja").unlink(), ["run.yaml"], ["model", "chat template"]),
    "broken chat template": (
        lambda p: (p / "model/chat_template.jinja").write_text("{% for %}"),
        ["run.yaml"],
        ["model", "chat template"],
    ),
    "model folder without weights": (lambda p: (p / "model/model.safetensors").unlink(), ["run.yaml"], ["model", "load"]),
    "missing weight": (lambda p: drop_weight(p / "model"), ["run.yaml"], ["model", "lacks 1 weights", "up_proj"]),
    "cut weights": (lambda p: cut(p / "model/model.safetensors"), ["run.yaml"], ["model", "load"]),
    "weights of another shape": (
        lambda p: edit_json(p / "model/config.json", intermediate_size=32),
        ["run.yaml"],
        ["model", "load"],
    ),
    "unknown architecture": (lambda p: edit_json(p / "model/config.json", model_type="nix"), ["run.yaml"], ["model", "nix"]),
    "no language model": (
        lambda p: edit_json(p / "model/config.json", model_type="vit", architectures=["ViTModel"]),
        ["run.yaml"],
        ["model", "load"],
    ),
    "missing encoder": (None, ["run.yaml", "--rank-profile-with", "./nowhere"], ["nowhere"]),
    "output folder holds a run": (finished_run, ["run.yaml"], ["out", "already holds", "--resume"]),
    "output folder is a file": (lambda p: (p / "out").write_text("mine"), ["run.yaml"], ["out"]),
    "unwritable output folder": (None, ["run.yaml", "--output-dir", "/proc/out"], ["/proc/out"]),
    "resume without folder": (None, ["run.yaml", "--resume"], ["out", "no run to resume"]),
    "resume of what is no run": (finished_run, ["run.yaml", "--resume"], ["out", "no run to resume"]),
    "resume with other settings": (
        lambda p: checkpoint(p, seed=3, learning_rate=1.0),
        ["run.yaml", "--resume"],
        ["out", "seed was 3, is 0", "learning_rate was 1.0"],
    ),
    "resume from a broken checkpoint": (checkpoint, ["run.yaml", "--resume"], ["none of its 1 checkpoints is whole"]),
    "unknown tracker": (None, ["run.yaml", "--log-with", "paper"], ["paper"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_ends_in_one_line_and_status_2_and_changes_no_file(name, place, capfd):
    spoil, argv, words = WRONG[name]
    if spoil:
        spoil(place)
    before = contents(place)
    assert grasp(*argv) == 2
    printed = capfd.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and printed.endswith("\n"), printed
    assert all(word in printed for word in words), printed
    assert contents(place) == before


def test_a_missing_package_is_told_once(place, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    assert grasp("run.yaml", "--lora-rank", "2") == 2
    printed = capfd.readouterr()
    assert printed.err == "error: --lora-rank needs the package peft: pip install peft\n" and "peft" not in printed.out


def real(place, *argv, **settings):
    command = [sys.executable, str(ROOT / "grasp.py"), *argv]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, **settings)


def test_a_real_process_says_one_line_too(place):
    before = contents(place)
    ended = real(place, "run.yaml", "--epoch", "3")
    assert (ended.returncode, ended.stdout) == (2, "") and "'epochs'" in ended.stderr
    assert re.fullmatch("error: .*\n", ended.stderr), ended.stderr
    assert contents(place) == before


def test_a_full_disk_ends_in_one_line_and_leaves_no_half_written_file(place):
    """Stood in for by a limit on the size of files: the weights and the optimizer's state are over it."""

    def small_files_only():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    before = contents(place)
    ended = real(place, "run.yaml", "--save-steps", "1", preexec_fn=small_files_only)
    last = ended.stderr.replace("\r", "\n").strip().split("\n")[-1]
    assert ended.returncode == 2 and re.match("error: out/checkpoint-1: cannot be written: ", last), ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.count("error: ") == 1
    after = contents(place)
    assert {name for name in after if name not in before} == {
        "out",
        *(f"out/{n}" for n in ("options.yaml", "data.json", "metrics.jsonl")),
    }
    assert {name: after[name] for name in before} == before


def test_a_good_run_ends_with_status_0_and_names_the_models_folder(place):
    ended = real(place, "run.yaml", "--learning_rate=1e-4")
    assert ended.returncode == 0, ended.stderr
    assert "4 rows, 4 used" in ended.stdout and "out/model" in ended.stdout
    assert yaml.safe_load((place / "out/options.yaml").read_text())["learning_rate"] == 1e-4


def test_help_names_every_option_with_its_default_and_choices(capsys):
    assert grasp("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in fields(GraspOptions):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert field.metadata["help"].split()[0] in shown and all(str(c) in shown for c in field.metadata["choices"] or ())
    assert "(default: 5e-06)" in shown and "CONFIG.yaml" in shown


def forbidden(*args):
    raise AssertionError("the model was fetched")


@pytest.mark.parametrize("argv, status, words", [(["--help"], 0, "--max-new-tokens"), (["--sede", "3"], 2, "'seed'")])
def test_the_demo_reads_its_options_before_it_fetches_the_model(argv, status, words, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "model", SimpleNamespace(fetch=forbidden))  # what demo/run.py imports
    assert script("demo/run.py", *argv) == status
    assert words in "".join(capfd.readouterr())


def test_help_on_the_demos_model_fetches_nothing(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", forbidden)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert script("demo/model.py", "--help") == 0
    assert "python demo/model.py" in capsys.readouterr().out


# --- Options ----------------------------------------------------------------------------------------------------------


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("learning_rate: 1e-3\nmax-new-tokens: 7\nresume: true\nseed: 4\nmodel: 007\nprompts: null\nconfig: 1\n")
    options = parse_options(GraspOptions, [str(path), "--seed", "5", "--batch_size=3", "--gradient-checkpointing", "false"])
    expected = dict(learning_rate=1e-3, max_new_tokens=7, resume=True, seed=5, batch_size=3, gradient_checkpointing=False)
    assert asdict(options) == {**asdict(GraspOptions()), **expected, "model": "7", "config": "1"}
    assert parse_options(GraspOptions, ["--resume", "--seed=2", str(path)]).resume is True
    assert parse_options(GraspOptions, []) == GraspOptions()


def test_values_that_begin_with_dashes_or_hold_underscores_arrive_as_they_are(tmp_path):
    options = parse_options(GraspOptions, ["--output-dir=my_dir", "--dataset", "a_b/c_d", "--model=-x"])
    assert (options.output_dir, options.dataset, options.model) == ("my_dir", "a_b/c_d", "-x")


def test_every_default_is_within_its_own_bounds():
    for field in fields(GraspOptions):
        if field.metadata["low"] is not None:
            assert field.metadata["low"] <= field.default <= (field.metadata["high"] or float("inf")), field.name
            for beyond in (field.metadata["low"] - 1, field.metadata["high"] and field.metadata["high"] + 1):
                if beyond is not None:
                    with pytest.raises(InputError, match=field.name.replace("_", "-")):
                        parse_options(GraspOptions, [f"--{field.name}={beyond}"])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_file(path, "new \ud800")
    assert path.read_text() == "old"
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        write_file(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_file(path, "new")
    assert path.read_text() == "new"

"""Stopping: killed or told to stop at any moment, with torn checkpoints lying about, a run ends as one left alone."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, kill_and_continue, toy_rows, write_rows
from safetensors.torch import load_file
from test_training import assert_same_bits, metrics, weights

import grasp
from checkpoint import checkpoints
from command_line import InputError
from grasp import train

WAYS = {
    "bfloat16": dict(dtype="bfloat16", optimizer="adamw_8bit"),
    "float32": dict(dtype="float32", optimizer="adamw"),
    "lora": dict(dtype="bfloat16", lora_rank=2, optimizer="adamw_8bit"),
    "ema": dict(dtype="bfloat16", teacher="ema", ema_decay=0.5, optimizer="adamw"),
}


def files_of(folder: Path) -> dict:
    """Every file of a run by name, without what names its place and what the clock says."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in ("options.yaml", "metrics.jsonl", "index.html"):
            found[name] = path.read_bytes()
    return found | {"metrics": metrics(folder)}


def assert_same_files(one: Path, other: Path):
    one, other = files_of(one), files_of(other)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


@pytest.mark.parametrize("way, number", [(way, signal.SIGKILL) for way in WAYS] + [("bfloat16", signal.SIGTERM)])
def test_a_run_stopped_ten_times_and_resumed_ends_with_the_files_of_one_left_alone(way, number, options, tmp_path):
    settings = options(
        **WAYS[way],
        max_steps=60,
        max_new_tokens=24,
        learning_rate=1e-3,
        save_steps=3,
        eval_steps=7,
        eval_rows=2,
        sample_steps=20,
    )

    def of(name):
        folder = tmp_path / name
        return dataclasses.replace(settings, output_dir=str(folder), resume=(folder / "options.yaml").exists())

    moments = kill_and_continue(train, of, kills=10, signals=[number])
    print(moments)
    assert_same_files(tmp_path / "killed", tmp_path / "undisturbed")
    assert len(files_of(tmp_path / "killed")) > 15 and (tmp_path / "killed" / "best").exists()


# --- Torn checkpoints -------------------------------------------------------------------------------------------------


def remove(checkpoint, name):
    (checkpoint / name).unlink()


def cut(checkpoint, name):
    data = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(data[: len(data) // 2])


def empty(checkpoint, name):
    (checkpoint / name).write_bytes(b"")


def half_renamed(checkpoint, name):
    checkpoint.rename(checkpoint.with_name(checkpoint.name + ".tmp"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "config.json", "files.json"])
@pytest.mark.parametrize("tear", [remove, cut, empty, half_renamed])
def test_a_torn_checkpoint_is_passed_over_with_a_line(tear, name, options, tmp_path, monkeypatch, capsys):
    settings = options(max_steps=3, save_steps=1, save_limit=0)
    folder = train(settings).parent
    whole = weights(folder / "model")
    shutil.rmtree(folder / "model")
    tear(folder / "checkpoint-3", name)
    loaded, real = [], grasp.load_model
    monkeypatch.setattr(grasp, "load_model", lambda path, *rest: loaded.append(Path(path).name) or real(path, *rest))
    train(dataclasses.replace(settings, resume=True))
    assert loaded[0] == "checkpoint-2"
    assert "checkpoint-3" in (said := capsys.readouterr().err) and "passed over" in said
    assert all((weight == whole[name]).all() for name, weight in weights(folder / "model").items())


def test_without_a_whole_checkpoint_left_it_is_one_line(options):
    settings = options(max_steps=2, save_steps=1, save_limit=0)
    folder = train(settings).parent
    shutil.rmtree(folder / "model")
    for _, path in checkpoints(folder):
        cut(path, "optimizer.pt")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="none of its 2 checkpoints is whole") as error:
        train(dataclasses.replace(settings, resume=True))
    assert "\n" not in str(error.value) and (folder / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_while_its_first_file_was_written_starts_again(options, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "options.yaml.tmp").write_text("mod")
    train(options(max_steps=1))


def test_a_run_is_not_resumed_on_other_rows(options, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", toy_rows(8))
    settings = options(dataset=str(data), max_steps=2, save_steps=1)
    train(settings)
    rows = toy_rows(8)
    rows[3]["rubric_aspects"][0]["aspect"] = "something else"
    write_rows(data, rows)
    with pytest.raises(InputError, match="cannot be resumed with other settings: rows was"):
        train(dataclasses.replace(settings, resume=True))


# --- Signals ----------------------------------------------------------------------------------------------------------


def start(settings):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(settings).items()]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "grasp.py"), *flags], **pipes, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    file = Path(settings.output_dir) / "metrics.jsonl"
    while not (file.exists() and "\n" in file.read_text()):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(number, options, tmp_path):
    settings = options(max_steps=500, max_new_tokens=16, save_steps=0)
    process = start(settings)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in err
    ((step, folder),) = checkpoints(tmp_path / "out")
    assert metrics(tmp_path / "out")[-1]["step"] == step
    assert f"stopped after step {step} of 500; give the same command with --resume to go on" in out
    assert "once more to stop at once" in err
    total = dataclasses.replace(settings, max_steps=step + 2)
    text = (tmp_path / "out" / "options.yaml").read_text().replace("max_steps: 500", f"max_steps: {step + 2}")
    (tmp_path / "out" / "options.yaml").write_text(text)
    train(dataclasses.replace(total, resume=True))
    assert [line["step"] for line in metrics(tmp_path / "out")] == list(range(1, step + 3))
    assert checkpoints(tmp_path / "out") == []  # it was not one that was asked for


def test_a_second_signal_ends_it_at_once(options):
    process = start(options(max_steps=500, batch_size=64, max_new_tokens=700, generation_batch_size=64, seed=3))
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


# --- What is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit, expected", [(0, [1, 2, 3, 4, 5]), (1, [5]), (2, [4, 5])])
def test_the_newest_checkpoints_are_kept(limit, expected, options, tmp_path):
    train(options(max_steps=5, save_steps=1, save_limit=limit))
    assert [step for step, _ in checkpoints(tmp_path / "out")] == expected


def test_the_best_weights_on_held_out_rows_are_kept_apart(options, tmp_path, monkeypatch):
    """Figures that are best after step 3 on any machine: on some, the last step's own would be."""
    real, measured = grasp.measure, iter([0.1, 0.9, 0.8, 0.5, 0.6, 0.7, 0.5])  # from before the first step on
    monkeypatch.setattr(grasp, "measure", lambda *settings: real(*settings) | {"reverse_kl": next(measured)})
    folder = train(options(max_steps=6, eval_steps=1, eval_rows=4, save_steps=1, save_limit=0, learning_rate=3e-2)).parent
    found = [(line["eval_reverse_kl"], line["step"]) for line in metrics(folder) if "eval_reverse_kl" in line and line["step"]]
    assert_same_bits(folder / "best", folder / f"checkpoint-{min(found)[1]}")
    assert min(found)[1] == 3 and next(measured, None) is None


def test_rollouts_are_kept_token_by_token(options, tmp_path):
    settings = options(max_steps=3, sample_steps=2, learning_rate=1e-2, dtype="float32", max_new_tokens=12)
    folder = train(settings).parent
    names = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert names == ["step-000000.json", "step-000002.json", "step-000003.json"]
    for name in names:
        found = json.loads((folder / "rollouts" / name).read_text())
        assert len(found["rows"]) == grasp.SAMPLE_ROWS and found["step"] == int(name[5:11])
    last = found["rows"][0]
    tokenizer, templates = grasp.load_tokenizer(settings.model), grasp.load_templates()
    _, held_out, _ = grasp.load_data(settings, tokenizer, templates)
    example = next(example for example in held_out if example["id"] == last["id"])
    ids = [token["id"] for token in last["tokens"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == last["text"]
    student, teacher = grasp.load_model(str(folder / "model"), "float32"), grasp.load_model(settings.model, "float32")
    hidden = (
        (m, grasp.completion_hidden(m, [example[role]], [ids])) for m, role in ((student, "student"), (teacher, "teacher"))
    )
    p, q = (grasp.head_logits(model, one).softmax(-1) for model, one in hidden)
    for position, token in enumerate(last["tokens"]):
        divergence = (p[position] * (p[position] / q[position]).log()).sum()
        assert token["divergence"] == pytest.approx(divergence.item(), abs=1e-4)
        assert token["student"] == pytest.approx(p[position, ids[position]].item(), abs=1e-4)
        assert token["teacher"] == pytest.approx(q[position, ids[position]].item(), abs=1e-4)
        assert token["favourite"] == tokenizer.decode([q[position].argmax().item()])
        assert token["favourite_probability"] == pytest.approx(q[position].max().item(), abs=1e-4)


def test_held_out_rows_that_are_trained_on_are_refused(options, data_folder):
    with pytest.raises(InputError, match="12 held-out rows are training rows, 'q0' say; see --eval-dataset"):
        train(options(dataset=str(data_folder / "train.jsonl"), eval_steps=1))


def test_an_adapters_checkpoint_holds_the_adapters_alone(options, tmp_path):
    folder = train(options(lora_rank=2, max_steps=1, save_steps=1)).parent
    stored = load_file(folder / "checkpoint-1" / "adapter.safetensors")
    assert stored and all("lora" in name for name in stored)
    assert not (folder / "checkpoint-1" / "model.safetensors").exists()


def test_what_stops_left_between_is_gone_when_a_finished_run_is_resumed(options, tmp_path):
    """A stop's own checkpoint, whole or torn, if the process was killed before it could tidy up."""
    settings = options(max_steps=2, save_steps=2, output_dir=str(tmp_path / "out"))
    grasp.train(settings)
    shutil.copytree(tmp_path / "out" / "checkpoint-2", tmp_path / "out" / "checkpoint-1")
    (tmp_path / "out" / "checkpoint-1.tmp").mkdir()
    grasp.train(dataclasses.replace(settings, resume=True))
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]

"""Whole runs of the tiny model: what they leave behind, that they learn, and that a killed one ends as an unbroken one."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
import yaml
from conftest import ROOT, make_model, make_tokenizer, toy_rows, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import command_line
import evaluate
import grasp
import lamp_qa
import rtv
from command_line import InputError
from grasp import batch_at, train

DTYPES = ["float32", "bfloat16"]
FIGURES = {  # issue 2, "The loop", and 4.17 of the design
    "step",
    "loss",
    "divergence_p50",
    "divergence_p95",
    "divergence_p99",
    "top_share",
    "entropy",
    "agreement",
    "length",
    "truncated",
    "leaks",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "peak_memory_gb",
}
TIMING = {"tokens_per_second", "seconds", "peak_memory_gb"}


def metrics(folder, timing=False):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if timing or name not in TIMING} for line in lines]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same_bits(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_leaves_a_model_that_loads_its_card_and_all_figures(dtype, options, model_folder):
    settings = options(dtype=dtype, eval_steps=2, eval_rows=3, learning_rate=1e-3, save_steps=3)
    folder = train(settings)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == getattr(torch, dtype)
    before = AutoModelForCausalLM.from_pretrained(model_folder, dtype=model.dtype)
    assert all((old != new).any() for old, new in zip(before.parameters(), model.parameters()) if old.ndim > 1)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model_folder).chat_template
    found = metrics(folder.parent, timing=True)
    steps, held_out = [line for line in found if "loss" in line], [line for line in found if "eval_reverse_kl" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4] and [line["step"] for line in held_out] == [0, 2, 4]
    for line in steps:
        assert FIGURES <= line.keys() and all(math.isfinite(value) for value in line.values())
        assert 0 <= line["divergence_p50"] <= line["divergence_p95"] <= line["divergence_p99"]
        assert line["loss"] > 0 and 0 < line["entropy"] < math.log(400) and line["grad_norm"] > 0
        assert 1 <= line["length"] <= 6 and all(0 <= line[name] <= 1 for name in ("agreement", "truncated", "leaks"))
    assert all({"eval_length", "eval_leaks", "eval_entropy", "eval_truncated"} <= line.keys() for line in held_out)
    card = (folder / "README.md").read_text()
    for word in ["2609.35262", "tiny-llama", "12 of 12 rows", "learning_rate: 0.001", f"{held_out[-1]['eval_reverse_kl']:.4f}"]:
        assert word in card
    assert str(model_folder) not in card and str(folder.parent) not in card  # nothing of the machine
    assert yaml.safe_load((folder.parent / "options.yaml").read_text()) == dataclasses.asdict(settings)
    account = json.loads((folder.parent / "data.json").read_text())
    assert account["train"]["rows"] == account["train"]["used"] == 12 and account["held_out"]["used"] == 6
    files = {path.name for path in folder.parent.iterdir()}
    assert files == {"model", "best", "checkpoint-3", "metrics.jsonl", "options.yaml", "data.json", "index.html"}


@pytest.mark.parametrize("way", [dict(dtype="float32"), dict(dtype="bfloat16"), dict(lora_rank=8, learning_rate=1e-2)])
def test_the_student_learns_what_the_rubrics_have_in_common(way, options, tmp_path):
    """The loss falls, and more so the reverse KL of fresh rollouts to other users' questions."""
    for split, start in (("train", 0), ("validation", 100)):
        rows = [{**row, "rubric_aspects": [{"aspect": "tea and bread"}]} for row in toy_rows(12, start)]
        write_rows(tmp_path / f"data/{split}.jsonl", rows)
    settings = dict(batch_size=6, micro_batch_tokens=4096, max_steps=30, learning_rate=3e-3, eval_steps=30, eval_rows=6)
    lines = metrics(train(options(dataset=str(tmp_path / "data"), **settings | way)).parent)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    first, last = (line["eval_reverse_kl"] for line in lines if "eval_reverse_kl" in line)
    assert last < 0.75 * first


def test_the_loss_is_the_mean_over_all_tokens_of_the_steps_rollouts(options, monkeypatch):
    """Against the slow way: the rollouts of step 1, scored one row at a time by the initial weights."""
    rollouts, real = [], grasp.sample_completions
    monkeypatch.setattr(
        grasp,
        "sample_completions",
        lambda model, prompts, *a, **k: rollouts.append((prompts, real(model, prompts, *a, **k))) or rollouts[-1][1],
    )
    settings = options(dtype="float32", max_steps=1)
    folder = train(settings)
    model, tokenizer = (kind.from_pretrained(settings.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    examples, _ = lamp_qa.load_examples(settings, settings.dataset, "train", tokenizer, lamp_qa.load_templates())
    ((prompts, completions),) = rollouts
    by_prompt = {tuple(example["student"]): example for example in examples}
    values = []
    for prompt, completion in zip(prompts, completions):
        pair = (prompt, by_prompt[tuple(prompt)]["teacher"])
        with torch.no_grad():
            logits = [model(torch.tensor([p + completion])).logits[0, len(p) - 1 : -1] for p in pair]
        values.append(grasp.token_divergence(*logits))
    assert metrics(folder.parent)[0]["loss"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)
    assert metrics(folder.parent)[0]["length"] == pytest.approx(sum(map(len, completions)) / 4)


def test_sampling_and_scoring_see_the_same_whole_prompts(options, monkeypatch):
    """Trap 6: nothing is cut, neither for one nor for the other."""
    seen = {"sampled": [], "scored": []}
    for name, kind in (("sample_completions", "sampled"), ("completion_hidden", "scored")):
        real = getattr(grasp, name)
        monkeypatch.setattr(
            grasp,
            name,
            lambda m, prompts, *a, real=real, kind=kind, **k: seen[kind].extend(prompts) or real(m, prompts, *a, **k),
        )
    settings = options(max_steps=3)
    train(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    examples, _ = lamp_qa.load_examples(settings, settings.dataset, "train", tokenizer, lamp_qa.load_templates())
    assert sorted(seen["sampled"]) == sorted(e["student"] for e in examples)  # three steps of four are one epoch
    assert sorted(seen["scored"]) == sorted(e[role] for e in examples for role in ("student", "teacher"))


def train_until_killed(settings, monkeypatch, name, number):
    """Train, and die when grasp's function `name` is called for the `number`th time."""
    real, calls = getattr(grasp, name), []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(grasp, name, killed)
    with pytest.raises(KeyboardInterrupt):
        train(settings)
    monkeypatch.undo()


@pytest.mark.parametrize(
    "dtype, optimizer", [("float32", "adamw"), ("bfloat16", "adamw"), ("bfloat16", "adamw_8bit"), ("float32", "adamw_8bit")]
)
def test_a_run_that_was_killed_and_resumed_ends_with_the_weights_of_an_unbroken_one(
    dtype, optimizer, options, tmp_path, monkeypatch
):
    """Trap 12 too: a teacher loaded from the checkpoint would give other weights."""
    common = dict(dtype=dtype, optimizer=optimizer, max_steps=6, learning_rate=3e-3, eval_steps=3, eval_rows=2, save_steps=2)
    whole = train(options(**common, output_dir=str(tmp_path / "whole")))
    settings = options(**common, output_dir=str(tmp_path / "killed"))
    train_until_killed(settings, monkeypatch, "score", 8)  # in step 6: five steps and two measurements before it
    killed = tmp_path / "killed"
    assert not (killed / "model").exists() and {p.name for p in killed.glob("check*")} == {"checkpoint-2", "checkpoint-4"}
    assert [line["step"] for line in metrics(killed) if "loss" in line] == [1, 2, 3, 4, 5]
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # cut short by the kill
    (killed / "checkpoint-6.tmp").mkdir()  # and so was this one
    loaded, real = [], grasp.load_model
    monkeypatch.setattr(grasp, "load_model", lambda path, *rest: loaded.append(path) or real(path, *rest))
    resumed = train(dataclasses.replace(settings, resume=True))
    assert loaded == [str(killed / "checkpoint-4"), settings.model]
    assert_same_bits(resumed, whole)
    assert metrics(killed) == metrics(tmp_path / "whole")
    assert (resumed / "README.md").read_text() == (whole / "README.md").read_text()


def test_a_run_killed_before_its_first_checkpoint_is_resumed_from_the_start(options, tmp_path, monkeypatch):
    whole = train(options(max_steps=3, save_steps=0, output_dir=str(tmp_path / "whole")))
    settings = options(max_steps=3, save_steps=0, output_dir=str(tmp_path / "killed"))
    train_until_killed(settings, monkeypatch, "update", 2)
    resumed = train(dataclasses.replace(settings, resume=True))
    assert_same_bits(resumed, whole)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_a_finished_run_that_is_resumed_stays_as_it_is(options):
    settings = options(save_steps=2)
    folder = train(settings)
    before, lines = weights(folder), metrics(folder.parent, timing=True)
    assert train(dataclasses.replace(settings, resume=True)) == folder
    assert all(torch.equal(weight, before[name]) for name, weight in weights(folder).items())
    assert metrics(folder.parent, timing=True) == lines


@pytest.mark.parametrize(
    "name, value", [("seed", 9), ("learning_rate", 1.0), ("max_steps", 9), ("dtype", "float32"), ("divergence", "jsd")]
)
def test_a_run_is_not_resumed_with_settings_that_change_its_outcome(name, value, options, tmp_path):
    settings = options(max_steps=1, save_steps=1)
    train(settings)
    before = weights(tmp_path / "out/model"), (tmp_path / "out/metrics.jsonl").read_text()
    with pytest.raises(InputError, match=f"{name} was {getattr(settings, name)!r}, is {value!r}"):
        train(dataclasses.replace(settings, resume=True, **{name: value}))
    assert (tmp_path / "out/metrics.jsonl").read_text() == before[1]


def test_a_run_may_be_moved_and_resumed_with_other_memory_settings(options, tmp_path):
    settings = options(max_steps=2, save_steps=1)
    train(settings)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    changed = dict(
        output_dir=str(tmp_path / "moved"), micro_batch_tokens=1, generation_batch_size=1, gradient_checkpointing=False
    )
    train(dataclasses.replace(settings, resume=True, save_steps=0, **changed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(dtype, options, tmp_path):
    runs = []
    for i, seed in enumerate((0, 0, 1)):
        torch.manual_seed(i)  # the global state must not matter
        runs.append(train(options(dtype=dtype, learning_rate=1e-3, seed=seed, output_dir=str(tmp_path / str(i)))))
    assert_same_bits(runs[0], runs[1])
    assert metrics(runs[0].parent) == metrics(runs[1].parent)
    assert metrics(runs[0].parent)[0]["loss"] != metrics(runs[2].parent)[0]["loss"]


def test_memory_settings_do_not_change_what_is_learned(options, tmp_path):
    """Micro-batches, sub-batches of rollouts and recomputed activations: the same figures to rounding."""
    found = []
    for i, (size, checkpointing) in enumerate([(4, True), (1, False)]):
        folder = options(dtype="float32", optimizer="adamw", micro_batch_tokens=size * 512, generation_batch_size=size)
        found.append(
            train(dataclasses.replace(folder, gradient_checkpointing=checkpointing, output_dir=str(tmp_path / str(i))))
        )
    for one, other in zip(*(metrics(folder.parent) for folder in found)):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)


def test_the_teacher_is_the_frozen_initial_model_in_every_step(options, monkeypatch, model_folder):
    """Trap 12."""
    initial, real, steps = AutoModelForCausalLM.from_pretrained(model_folder), grasp.score, []

    def score(student, teacher, *rest):
        assert not teacher.training and not any(weight.requires_grad for weight in teacher.parameters())
        assert all(torch.equal(*pair) for pair in zip(teacher.parameters(), initial.parameters()))
        steps.append(any(not torch.equal(*pair) for pair in zip(student.parameters(), initial.parameters())))
        return real(student, teacher, *rest)

    monkeypatch.setattr(grasp, "score", score)
    train(options(dtype="float32", learning_rate=1e-2))
    assert steps == [False, True, True, True]  # the student moves on


def test_each_step_rounds_and_samples_by_seeds_of_its_own_which_a_second_run_repeats(options, monkeypatch, tmp_path):
    seeds, updating, sampling = [], grasp.update, grasp.sample_completions
    monkeypatch.setattr(grasp, "update", lambda *a: seeds.append(a[-1]) or updating(*a))
    monkeypatch.setattr(grasp, "sample_completions", lambda *a, **k: seeds.extend(a[4]) or sampling(*a, **k))
    for name in ("one", "other"):
        train(options(output_dir=str(tmp_path / name)))
    assert len(set(seeds[:20])) == 20 and seeds[20:] == seeds[:20]  # four rows and one rounding in each of four steps


def test_recited_privileged_words_are_reported_as_leaks(options, monkeypatch):
    """Trap 18: here every second rollout recites its own rubric, and one in the held-out rows."""
    settings = options(max_steps=1, max_new_tokens=400, eval_steps=1, eval_rows=2)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    blocks = {}
    for split in ("train", "validation"):
        examples, _ = lamp_qa.load_examples(settings, settings.dataset, split, tokenizer, lamp_qa.load_templates())
        blocks |= {tuple(e["student"]): (e["privileged"], e["prompt"]) for e in examples}

    def recite(model, prompts, *rest, **settings):
        texts = [blocks[tuple(p)][0 if i % 2 == 0 else 1] for i, p in enumerate(prompts)]  # the prompt itself is no leak
        return [tokenizer(text)["input_ids"] + [0] for text in texts]

    monkeypatch.setattr(grasp, "sample_completions", recite)
    lines = metrics(train(settings).parent)
    assert [line.get("leaks", line.get("eval_leaks")) for line in lines] == [0.5, 0.5, 0.5]
    assert [line.get("truncated", line.get("eval_truncated")) for line in lines] == [0.0] * 3


def test_rows_that_leak_into_the_profile_are_left_out_of_the_run_and_listed(options, tmp_path, capsys):
    """Trap 16."""
    rows = toy_rows(6)
    rows[4]["profile"][0]["text"] = rows[4]["narrative"]
    settings = options(dataset=str(write_rows(tmp_path / "rows.jsonl", rows)), max_steps=1, max_dropped=0.2)
    train(settings)
    account = json.loads((tmp_path / "out/data.json").read_text())["train"]
    assert account["left_out"] == {"privileged text in the profile": ["q4"]} and account["used"] == 5
    assert "left out, privileged text in the profile: 1 (q4)" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["gemma2", "qwen3", "gpt2"])
def test_other_families_train(family, options, tmp_path):
    make_model(family).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    folder = train(options(model=str(tmp_path / "model"), max_steps=2, learning_rate=1e-3))
    assert all(math.isfinite(line["loss"]) for line in metrics(folder.parent))
    AutoModelForCausalLM.from_pretrained(folder)


def test_dropout_is_off_and_soft_capped_attention_is_kept(tmp_path):
    """The policy that is scored is the one that sampled; sdpa would leave Gemma-2's attention soft-capping out."""
    make_model("gemma2", attention_dropout=0.5).save_pretrained(tmp_path / "gemma2")
    model = grasp.load_model(str(tmp_path / "gemma2"), "float32").train()
    ids = torch.arange(3, 40)[None]
    expected = make_model("gemma2")(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_epochs_are_counted_in_rows(options):
    folder = train(options(max_steps=0, epochs=2, batch_size=5))  # 12 rows
    assert [line["step"] for line in metrics(folder.parent)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("size, rows", [(4, 12), (5, 12), (7, 3)])
def test_batches_go_through_all_rows_once_an_epoch_in_a_new_order_each(size, rows):
    found = [row for step in range(3 * rows) for row in batch_at(step, size, rows, seed=0)]
    epochs = [found[i : i + rows] for i in range(0, len(found), rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs) and len({tuple(e) for e in epochs}) > 1
    assert batch_at(2, size, rows, seed=0) == batch_at(2, size, rows, seed=0) != batch_at(2, size, rows, seed=1)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(tmp_path, tokenizer, monkeypatch):
    model, folder = make_model(), tmp_path / "checkpoint-1"
    checkpoint.save_model(folder, model, tokenizer)
    before = weights(folder)
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda *a: (_ for _ in ()).throw(RuntimeError("disk full")))
    with pytest.raises(InputError, match="checkpoint-1: cannot be written: disk full"):
        checkpoint.save_model(folder, make_model(seed=1), tokenizer)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(folder).items())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_dry_run_shows_what_memory_it_takes_and_writes_nothing(options, tmp_path, capsys):
    train(options(dry_run=True))
    printed = capsys.readouterr().out
    assert "| student weights |" in printed and "it fits in" in printed
    assert not (tmp_path / "out").exists()


def test_out_of_memory_is_one_line_that_names_the_flags_that_help(options, monkeypatch):
    monkeypatch.setattr(grasp, "score", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(InputError, match="out of memory; .*--") as error:
        train(options(gradient_checkpointing=False, micro_batch_tokens=4096, generation_batch_size=32))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_one_of_its_script(path):
    kinds = {"rtv": rtv.RtvOptions, "evaluate": evaluate.EvaluateOptions}
    kind = next((kind for name, kind in kinds.items() if name in path.stem), grasp.GraspOptions)
    options = command_line.parse_options(kind, [str(path)])
    if kind is grasp.GraspOptions:
        grasp.check_parts(options)
        assert options.model and options.dataset and options.output_dir

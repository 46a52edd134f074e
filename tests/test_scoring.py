"""Scores and gradients do not depend on which rows are scored together, and rest on the very tokens that were sampled."""

import dataclasses

import pytest
import torch
from conftest import make_model
from test_divergence import assert_same_gradients

import grasp
from grasp import GraspOptions, completion_hidden, head_logits, score, token_divergence

OPTIONS = GraspOptions(micro_batch_tokens=256)


def make_batch(count=8, seed=0):
    """Examples with prompts of 3 to 30 tokens and completions of 1 to 20; id 0 (pad, EOS, end of turn) is in all of them."""
    draw = torch.Generator().manual_seed(seed)

    def ids(length):
        return torch.randint(1, 400, (length,), generator=draw).tolist()

    examples, completions = [], []
    for i in range(count):
        prompt = ids(3 + 27 * i // count)
        prompt[1] = 0  # an end-of-turn marker inside of the prompt
        examples.append({"student": prompt, "teacher": prompt[:2] + ids(7) + prompt[2:]})
        completions.append(ids((1, 20, 3, 13, 2, 8, 1, 17)[i % 8] - 1) + [0])
    return examples, completions


def score_alone(student, teacher, example, completion):
    """Per-token reverse KL of one row without padding, from the models' own forward."""
    logits = []
    for model, prompt in ((student, example["student"]), (teacher, example["teacher"])):
        with torch.no_grad():
            logits.append(model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1])
    return token_divergence(*logits)


def left_padded_logits(model, prompts, completions):
    """Logits that predict the completions' tokens, by a forward that is padded left, with position ids made by hand."""
    rows = [prompt + completion for prompt, completion in zip(prompts, completions)]
    width = max(map(len, rows))
    ids = torch.tensor([[7] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    places = torch.tensor([[0] * (width - len(row)) + list(range(len(row))) for row in rows])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=places).logits
    return [of_row[-len(completion) - 1 : -1] for of_row, completion in zip(logits, completions)]


@pytest.mark.parametrize("micro_batch_tokens", [1, 100, 1000])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_a_rows_scores_are_those_it_has_alone_in_any_company(family, micro_batch_tokens):
    """Traps 1, 2 (masks by position: ids equal to pad count everywhere, the last EOS included) and 3 (shift)."""
    student, teacher = make_model(family), make_model(family, seed=1)
    examples, completions = make_batch()
    options = dataclasses.replace(OPTIONS, micro_batch_tokens=micro_batch_tokens)
    with torch.no_grad():
        per_row = score(student, teacher, examples, completions, 1, options)
    for example, completion, statistics in zip(examples, completions, per_row):
        expected = score_alone(student, teacher, example, completion)
        assert statistics.shape == (3, len(completion))
        torch.testing.assert_close(statistics[0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_scores_are_those_of_a_left_padded_forward(family):
    """Trap 4."""
    student, teacher = make_model(family), make_model(family, seed=1)
    examples, completions = make_batch()
    with torch.no_grad():
        per_row = score(student, teacher, examples, completions, 1, OPTIONS)
    left = [
        left_padded_logits(model, [example[role] for example in examples], completions)
        for model, role in ((student, "student"), (teacher, "teacher"))
    ]
    for statistics, student_logits, teacher_logits in zip(per_row, *left):
        expected = token_divergence(student_logits, teacher_logits)
        torch.testing.assert_close(statistics[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_hidden_states_predict_each_completion_token_from_the_tokens_before_it():
    """Trap 3: position i predicts token i + 1, so the first one comes from the prompt alone and the last one is never fed."""
    model = make_model()
    examples, completions = make_batch()
    prompts = [example["student"] for example in examples]
    logits = head_logits(model, completion_hidden(model, prompts, completions))
    expected = [model(torch.tensor([p + c[:i]])).logits[0, -1] for p, c in zip(prompts, completions) for i in range(len(c))]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-4)
    altered = [completion[:-1] + [399] for completion in completions]
    torch.testing.assert_close(head_logits(model, completion_hidden(model, prompts, altered)), logits)


@pytest.mark.parametrize("family", ["qwen2", "tied"])
def test_the_steps_gradient_is_the_same_for_every_micro_batch(family):
    """Trap 11: one mean over all tokens of the batch, not a mean of the micro-batches' means."""
    examples, completions = make_batch()
    tokens = sum(map(len, completions))
    teacher, models = make_model(family, seed=1), {}
    for size in (1, 60, 120, 1000):
        models[size] = make_model(family).train()
        score(models[size], teacher, examples, completions, tokens, dataclasses.replace(OPTIONS, micro_batch_tokens=size))
        assert_same_gradients(models[size], models[1])
    plain = make_model(family)
    values = []
    for example, completion in zip(examples, completions):
        pair = [(plain, example["student"]), (teacher, example["teacher"])]
        values.append(token_divergence(*(m(torch.tensor([p + completion])).logits[0, len(p) - 1 : -1] for m, p in pair)))
    torch.cat(values).mean().backward()
    assert_same_gradients(models[1000], plain)


def test_the_step_over_two_halves_adds_up_to_the_step_over_the_whole():
    """Trap 11, for processes: each divides by the tokens of all of them."""
    examples, completions = make_batch()
    tokens = sum(map(len, completions))
    whole, halves, teacher = make_model(), make_model(), make_model(seed=1)
    score(whole, teacher, examples, completions, tokens, OPTIONS)
    for part in (slice(0, 3), slice(3, 8)):
        score(halves, teacher, examples[part], completions[part], tokens, OPTIONS)
    assert_same_gradients(halves, whole)


def test_gradient_checkpointing_changes_neither_scores_nor_gradients():
    examples, completions = make_batch()
    models, found = [make_model().train() for _ in range(2)], []
    models[1].gradient_checkpointing_enable({"use_reentrant": False})
    for model in models:
        found.append(torch.cat(score(model, make_model(seed=1), examples, completions, 50, OPTIONS), 1))
    torch.testing.assert_close(*found)
    assert_same_gradients(*models)


def test_the_teacher_makes_no_graph_and_gets_no_gradient(monkeypatch):
    """Trap 12: also where its weights would take one."""
    made, real = [], grasp.completion_hidden
    monkeypatch.setattr(
        grasp, "completion_hidden", lambda model, *rest: made.append((model, real(model, *rest))) or made[-1][1]
    )
    student, teacher = make_model().train(), make_model(seed=1)
    assert all(weight.requires_grad for weight in teacher.parameters())
    examples, completions = make_batch()
    score(student, teacher, examples, completions, 50, OPTIONS)
    assert [hidden.requires_grad for model, hidden in made] == [model is student for model, _ in made]
    assert all(weight.grad is None for weight in teacher.parameters())
    assert all(weight.grad is not None for weight in student.parameters())


def test_every_completion_token_has_a_gradient_and_the_last_eos_too():
    """Trap 1: where the first EOS is not scored, the student never learns to stop."""
    student, teacher = make_model(), make_model(seed=1)
    examples, completions = make_batch()
    for example, completion in zip(examples, completions):
        (statistics,) = score(student, teacher, [example], [completion], 1, OPTIONS)
        assert completion[-1] == 0 and (statistics[0] > 1e-3).all()
    student.zero_grad()
    score(student, teacher, [examples[0]], [[0]], 1, OPTIONS)
    assert student.get_output_embeddings().weight.grad.abs().sum() > 0


def test_only_measuring_leaves_no_gradient():
    student, teacher = make_model().train(), make_model(seed=1)
    with torch.no_grad():
        score(student, teacher, *make_batch(), 1, OPTIONS)
    assert all(weight.grad is None for weight in student.parameters())

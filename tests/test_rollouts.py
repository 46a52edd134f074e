"""Rollouts come from the student's full distribution, row by row as if each were alone, and end where they should."""

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from transformers import GenerationConfig

import grasp
from grasp import pick, sample_completions, seed_for

PROMPTS = [
    [5, 6, 7],
    [9, 0, 11, 12, 0, 13, 14, 15],
    [20],
    [21, 22, 0, 24, 25],
    [26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36],
    [2, 3],
]
SEEDS = [11, 12, 13, 14, 15, 16]
NEVER = 400  # a stop id outside of the vocabulary


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    assert expected.min() > 4  # else the statistic is no chi-square
    return ((counts - expected) ** 2 / expected).sum().item()


def greedy_alone(model, prompt, steps, stop=()):
    """The likeliest next token, again and again, by the whole sequence each time: no cache, no padding."""
    ids = list(prompt)
    for _ in range(steps):
        ids.append(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8)])
def test_pick_draws_from_the_distribution_it_should(temperature, top_p):
    logits = torch.tensor([0.3, 1.2, -0.4, 0.9, 0.0, 2.0, -1.0, 0.5])
    expected = (logits.double() / temperature).softmax(-1)
    if top_p < 1:  # the smallest set of the likeliest with at least this mass
        ranked = sorted(range(8), key=lambda i: -expected[i])
        kept = next(ranked[:n] for n in range(1, 9) if expected[ranked[:n]].sum() >= top_p)
        assert 1 < len(kept) < 8
        expected = torch.tensor([float(expected[i]) if i in kept else 0.0 for i in range(8)]).double()
        expected /= expected.sum()
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = pick(logits.expand(20_000, 8), uniform, temperature, top_p).bincount(minlength=8)
    assert (counts[expected == 0] == 0).all()
    assert chi_square(counts[expected > 0], expected[expected > 0]) < 29.9  # the 0.01 % tail with 7 degrees of freedom


def test_pick_never_draws_an_impossible_token_and_is_greedy_at_temperature_0():
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf"), 1.0, -float("inf")]])
    edges = torch.tensor([0.0, 1e-12, 1 / (1 + torch.e), 0.5, 1 - 2**-53], dtype=torch.float64)
    assert {pick(logits, u[None]).item() for u in edges} == {1, 3}
    assert [pick(logits, u[None], temperature=0).item() for u in edges] == [3] * 5
    assert [pick(logits, u[None], top_p=0.5).item() for u in edges] == [3] * 5
    assert pick(torch.zeros(1, 4), torch.tensor([0.9], dtype=torch.float64), top_p=1e-9).numel() == 1


def test_completions_are_drawn_from_the_models_full_distribution():
    model = make_model(vocab_size=6, initializer_range=0.05, bos_token_id=0)
    prompt, count = [1, 2, 3], 6_000
    drawn = torch.tensor(sample_completions(model, [prompt] * count, [NEVER], 2, range(count), batch_size=1_000))
    first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    second = model(torch.tensor([[*prompt, i] for i in range(6)])).logits[:, -1].double().softmax(-1)
    counts = (drawn[:, 0] * 6 + drawn[:, 1]).bincount(minlength=36)
    assert chi_square(counts, (first[:, None] * second).flatten()) < 73.4  # the 0.01 % tail with 35 degrees of freedom
    uniform = torch.full((36,), 1 / 36).double()
    assert chi_square(counts, uniform) > 73.4  # so the statistic can tell


@pytest.mark.parametrize(
    "hostile",
    [
        dict(do_sample=True, top_k=1, temperature=0.01, top_p=0.01),
        dict(repetition_penalty=50.0, no_repeat_ngram_size=1, suppress_tokens=list(range(1, 200)), bad_words_ids=[[5]]),
        dict(max_length=2, max_new_tokens=1, min_length=30, num_beams=3, use_cache=False, forced_eos_token_id=9),
    ],
)
def test_the_checkpoints_generation_config_plays_no_part(hostile):
    """Trap 7: Qwen2.5's top-k, top-p and repetition penalty would make rollouts off-policy."""
    model = make_model()
    plain = sample_completions(model, PROMPTS, [0], 12, SEEDS)
    model.generation_config = GenerationConfig(**hostile)
    assert sample_completions(model, PROMPTS, [0], 12, SEEDS) == plain
    assert max(map(len, plain)) == 12 and len({tuple(row) for row in plain}) == len(plain)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "cohere"])
def test_greedy_ids_in_a_padded_batch_are_those_of_each_prompt_alone(family):
    """Traps 2 and 4: marker ids keep their attention, positions count from the first real token (GPT-2 has absolute ones)."""
    model = make_model(family)
    found = sample_completions(model, PROMPTS, [NEVER], 10, SEEDS, temperature=0)
    assert found == [greedy_alone(model, prompt, 10) for prompt in PROMPTS]


def test_greedy_ids_are_those_of_generate():
    model = make_model(initializer_range=0.5)
    settings = dict(max_new_tokens=20, do_sample=False, eos_token_id=[0, 7, 300], pad_token_id=0)
    for prompt, found in zip(PROMPTS, sample_completions(model, PROMPTS, [0, 7, 300], 20, SEEDS, temperature=0)):
        ids = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
        assert ids[0, len(prompt) :].tolist() == found


@pytest.mark.parametrize("stop", [[0], list(range(0, 400, 9)), [398, 3, 5, 7, 0]])
def test_a_completion_ends_with_its_first_stop_id_or_at_the_limit(stop):
    """Trap 1: the end-of-turn id itself is kept, though it is the pad id too; nothing follows it."""
    prompts = [PROMPTS[i % 6] for i in range(60)]
    found = sample_completions(make_model(initializer_range=0.02), prompts, stop, 25, range(60))
    for completion in found:
        assert 1 <= len(completion) <= 25
        assert not set(completion[:-1]) & set(stop)
        assert completion[-1] in stop or len(completion) == 25
    assert any(completion[-1] in stop for completion in found)
    unbounded = sample_completions(make_model(initializer_range=0.02), prompts, [NEVER], 25, range(60))
    assert all(long[: len(short)] == short for long, short in zip(unbounded, found))


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_a_row_depends_on_its_seed_and_prompt_alone(family):
    """In any batch size and order, also where rows that ended were let go after 16 steps."""
    model, stop = make_model(family), list(range(0, 400, 25))
    together = sample_completions(model, PROMPTS, stop, 40, SEEDS)
    assert sorted(map(len, together))[0] < 16 < sorted(map(len, together))[-1]  # so rows were let go, and others went on
    for size in (1, 2, 4):
        assert sample_completions(model, PROMPTS, stop, 40, SEEDS, batch_size=size) == together
    order = [3, 0, 5, 1, 4, 2]
    shuffled = sample_completions(model, [PROMPTS[i] for i in order], stop, 40, [SEEDS[i] for i in order])
    assert shuffled == [together[i] for i in order]
    assert sample_completions(model, PROMPTS, stop, 40, [seed + 1 for seed in SEEDS]) != together


def test_letting_go_of_ended_rows_changes_nothing(monkeypatch):
    model, stop = make_model(), list(range(0, 400, 25))
    together = sample_completions(model, PROMPTS, stop, 40, SEEDS)
    kept, real = [], grasp.DynamicCache.batch_select_indices
    monkeypatch.setattr(
        grasp.DynamicCache, "batch_select_indices", lambda self, rows: kept.append(len(rows)) or real(self, rows)
    )
    assert sample_completions(model, PROMPTS, stop, 40, SEEDS) == together and kept
    endless = sample_completions(model, PROMPTS, [NEVER], 40, SEEDS)  # nothing is let go here
    assert all(long[: len(short)] == short for long, short in zip(endless, together))


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_cache_is_used_under_gradient_checkpointing_in_train_mode_and_the_mode_is_restored(family):
    """Trap 14: there, transformers switches the cache off without an error; newer ones not under no_grad, but for GPT-2."""
    model, widths, modes = make_model(family).train(), [], []
    plain = sample_completions(make_model(family), PROMPTS, [NEVER], 8, SEEDS)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.transformer.h[0] if family == "gpt2" else model.model.layers[0]
    layer.register_forward_pre_hook(lambda layer, inputs: widths.append(inputs[0].shape[1]) or modes.append(layer.training))
    assert sample_completions(model, PROMPTS, [NEVER], 8, SEEDS) == plain
    assert widths == [max(map(len, PROMPTS))] + [1] * 7 and not any(modes)
    assert model.training and all(layer.training for layer in model.modules())
    model.eval()
    sample_completions(model, PROMPTS, [NEVER], 1, SEEDS)
    assert not model.training


def test_rollouts_make_no_graph_and_leave_the_global_random_state_alone():
    model = make_model()
    before = torch.random.get_rng_state()
    sample_completions(model, PROMPTS, [0], 4, SEEDS)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(weight.grad is None for weight in model.parameters())


def test_seeds_depend_on_each_of_their_parts():
    seeds = {seed_for(a, b, c) for a in range(5) for b in range(5) for c in range(5)} | {seed_for(12), seed_for(1, 2)}
    assert len(seeds) == 127 and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for(0, 3, 1) == seed_for(0, 3, 1)


def test_the_models_scores_are_the_distribution_that_was_sampled_from():
    """Temperature 1 through the cache and the scoring forward: one distribution, so rollouts are on-policy."""
    model = make_model("gemma2")
    (found,) = sample_completions(model, [PROMPTS[1]], [NEVER], 12, [3])
    uniform = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits = grasp.head_logits(model, grasp.completion_hidden(model, [PROMPTS[1]], [found]))
    assert pick(logits, uniform).tolist() == found
    below = F.softmax(logits.double(), -1).cumsum(-1)
    assert all(below[i, t] >= uniform[i] - 1e-5 for i, t in enumerate(found))

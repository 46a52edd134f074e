"""The divergence against a slow float64 reference; the chunked path against the obvious one, for every family of heads."""

import math

import pytest
import torch
from conftest import FAMILIES, make_model
from transformers import OPTConfig, OPTForCausalLM

import grasp
from command_line import InputError
from grasp import GraspOptions, completion_hidden, divergence_backward, head_logits, token_divergence

KINDS = ["reverse_kl", "forward_kl", "jsd"]


def reference(student, teacher, kind, beta=0.5, temperature=1.0):
    """One token's divergence from two lists of logits: Python floats, one entry at a time, the definitions as written."""

    def log_softmax(logits):
        top = max(logits) / temperature
        log_sum = top + math.log(math.fsum(math.exp(x / temperature - top) for x in logits))
        return [x / temperature - log_sum for x in logits]

    def kl(log_a, log_b):
        return math.fsum(math.exp(a) * (a - b) for a, b in zip(log_a, log_b) if a > -math.inf)

    p, q = log_softmax(student), log_softmax(teacher)
    if kind == "reverse_kl":
        return kl(p, q)
    if kind == "forward_kl":
        return kl(q, p)
    mixed = [beta * math.exp(b) + (1 - beta) * math.exp(a) for a, b in zip(p, q)]
    m = [math.log(x) if x > 0 else -math.inf for x in mixed]
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def cases():
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 11, dtype=torch.float64, generator=draw) * 3 for _ in range(2))
    peaked = [torch.zeros(6, 11, dtype=torch.float64).scatter(1, torch.arange(6)[:, None] + i, 50.0 + 20 * i) for i in (0, 1)]
    masked = [logits.clone() for logits in (student, teacher)]
    for logits in masked:
        logits[:, [2, 7]] = -math.inf
    return {
        "ordinary": (student, teacher),
        "masked": masked,
        "peaked apart": peaked,
        "peaked alike": (student + peaked[0], teacher + peaked[0]),
        "one peaked": (student, peaked[1]),
        "far from 0": (student + 1e4, teacher - 1e4),
    }


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind, beta", [("reverse_kl", 0.5), ("forward_kl", 0.5), *(("jsd", b) for b in (0.1, 0.5, 0.9))])
def test_every_kind_agrees_with_a_float64_reference(case, kind, beta, temperature):
    student, teacher = cases()[case]
    expected = [reference(s, t, kind, beta, temperature) for s, t in zip(student.tolist(), teacher.tolist())]
    found = token_divergence(student, teacher, kind, beta, temperature)
    assert found.shape == (6,) and found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-13)
    assert max(expected) > 1e-6 or case == "peaked alike"


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_zero_for_equal_and_positive_for_different_distributions(kind):
    student, teacher = cases()["ordinary"]
    assert token_divergence(student, student + 5, kind).abs().max() < 1e-12
    assert token_divergence(student, teacher, kind).min() > 1e-3


def test_reverse_and_forward_kl_are_each_other_with_the_sides_swapped():
    student, teacher = cases()["ordinary"]
    torch.testing.assert_close(
        token_divergence(student, teacher, "reverse_kl"), token_divergence(teacher, student, "forward_kl")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_finite_and_right_where_the_vocabulary_is_masked(kind):
    student, teacher = (logits.clone() for logits in cases()["masked"])
    student.requires_grad_()
    token_divergence(student, teacher, kind).sum().backward()
    assert student.grad.isfinite().all() and (student.grad[:, [2, 7]] == 0).all()
    kept = [i for i in range(11) if i not in (2, 7)]
    alone = student.detach()[:, kept].requires_grad_()
    token_divergence(alone, teacher[:, kept], kind).sum().backward()
    torch.testing.assert_close(student.grad[:, kept], alone.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_agrees_with_finite_differences(kind):
    student, teacher = cases()["ordinary"]
    assert torch.autograd.gradcheck(lambda s: token_divergence(s, teacher, kind, 0.3, 1.7), student.requires_grad_())


def test_the_cap_cuts_off_values_and_their_gradient_and_touches_no_others():
    student, teacher = cases()["ordinary"]
    plain = token_divergence(student, teacher)
    cap = plain.median().item()
    over = plain > cap
    assert 0 < over.sum() < len(over)
    student = student.clone().requires_grad_()
    capped = token_divergence(student, teacher, cap=cap)
    assert (capped[over] == cap).all() and (capped[~over] == plain[~over]).all()
    capped.sum().backward()
    assert (student.grad[over] == 0).all() and (student.grad[plain < cap].abs().amax(-1) > 0).all()


def test_an_unknown_kind_is_a_value_error_that_names_it():
    with pytest.raises(ValueError, match="'reverse_lk'"):
        token_divergence(torch.zeros(1, 2), torch.zeros(1, 2), "reverse_lk")


@pytest.mark.parametrize("family", FAMILIES)
def test_head_logits_are_the_models_own_for_every_family(family):
    """Trap 10: soft-capping, logit scales and a head's bias must not be skipped."""
    model, ids = make_model(family), torch.arange(3, 24)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state[0]
        own = model(input_ids=ids).logits[0]
        torch.testing.assert_close(head_logits(model, hidden), own)
        torch.testing.assert_close(model(input_ids=ids).logits[0], own, rtol=0, atol=0)  # the decoder is back in its place
    bare = hidden @ model.get_output_embeddings().weight.T
    assert torch.allclose(bare, own, atol=1e-4) == (family not in ("gemma2", "granite", "cohere", "phi"))


def test_a_family_whose_decoder_cannot_step_aside_is_refused():
    """OPT's own forward goes past its base model: better no logits than those of another input."""
    sizes = dict(vocab_size=400, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2)
    model = OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4)).eval()
    with pytest.raises(InputError, match="opt"):
        head_logits(model, model.base_model(input_ids=torch.arange(3, 24)[None]).last_hidden_state[0])


PROMPTS = [[5, 6, 7], [9, 8, 0, 12, 0, 30, 31, 32, 40], [11, 12, 13, 14, 15]]
PRIVILEGED = [p[:2] + [60, 61, 62, 63] + p[2:] for p in PROMPTS]
COMPLETIONS = [[20, 21, 0], [22], [30, 31, 0, 33, 34, 35, 36]]


def plain_backward(student, teacher, options):
    """The obvious way: one row at a time, unpadded, all logits at once, one backward pass."""
    total = sum(map(len, COMPLETIONS))
    values = []
    for prompt, privileged, completion in zip(PROMPTS, PRIVILEGED, COMPLETIONS):
        logits = student(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        with torch.no_grad():
            teacher_logits = teacher(input_ids=torch.tensor([privileged + completion])).logits[0, len(privileged) - 1 : -1]
        kind, beta = options.divergence, options.jsd_beta
        values.append(token_divergence(logits, teacher_logits, kind, beta, options.divergence_temperature))
    (torch.cat(values).sum() / total).backward()
    return torch.cat(values).detach()


def assert_same_gradients(model, other, tolerance=1e-4):
    """Every parameter's gradient within `tolerance` of its size (or of a thousandth of the whole, if it is that small)."""
    whole = torch.cat([p.grad.flatten() for p in other.parameters()]).norm()
    assert whole > 0
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters()):
        difference, size = (mine.grad - theirs.grad).norm(), theirs.grad.norm()
        assert difference <= tolerance * max(size, 1e-3 * whole), f"{name}: {difference:.2e} of {size:.2e}"


@pytest.mark.parametrize("chunk, few", [(3, 3), (3, 2), (1000, 2), (1000, 1000)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_chunked_loss_and_every_gradient_agree_with_the_plain_form(family, chunk, few, monkeypatch):
    """Traps 3 (shift), 10 (heads) and 11 (one mean over all tokens)."""
    monkeypatch.setattr(grasp, "chunk_tokens", lambda vocabulary: chunk)
    monkeypatch.setattr(grasp, "divergence_tokens", lambda vocabulary, device_type: few)
    student, same, teacher = make_model(family), make_model(family), make_model(family, seed=1).requires_grad_(False)
    options = GraspOptions()
    expected = plain_backward(same, teacher, options)
    hidden, teacher_hidden = (
        completion_hidden(student, PROMPTS, COMPLETIONS),
        completion_hidden(teacher, PRIVILEGED, COMPLETIONS),
    )
    statistics = divergence_backward(student, hidden, teacher, teacher_hidden, len(expected), options)
    assert statistics[0].double().tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
    assert_same_gradients(student, same)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_the_chunked_loss_agrees_with_the_plain_form_for_the_other_kinds(kind, monkeypatch):
    monkeypatch.setattr(grasp, "chunk_tokens", lambda vocabulary: 3)
    student, same, teacher = make_model(), make_model(), make_model(seed=1)
    options = GraspOptions(divergence=kind, jsd_beta=0.2, divergence_temperature=1.5)
    expected = plain_backward(same, teacher, options)
    hidden = completion_hidden(student, PROMPTS, COMPLETIONS)
    with torch.no_grad():
        teacher_hidden = completion_hidden(teacher, PRIVILEGED, COMPLETIONS)
    statistics = divergence_backward(student, hidden, teacher, teacher_hidden, len(expected), options)
    assert statistics[0].double().tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
    assert_same_gradients(student, same)


def test_the_chunks_hold_at_most_sixteen_million_numbers_or_256_tokens_and_the_divergence_at_least_one():
    assert [grasp.chunk_tokens(size) for size in (2**14, 49_152, 151_936)] == [1024, 341, 256]
    assert [grasp.divergence_tokens(151_936, kind) for kind in ("cuda", "cpu")] == [110, 3]
    assert grasp.divergence_tokens(2**25, "cpu") == 1


def test_entropy_and_agreement_come_with_the_divergence_and_only_measuring_leaves_no_gradient():
    student, teacher = make_model(), make_model(seed=1)
    with torch.no_grad():
        hidden, teacher_hidden = (
            completion_hidden(student, PROMPTS, COMPLETIONS),
            completion_hidden(teacher, PRIVILEGED, COMPLETIONS),
        )
        p, q = head_logits(student, hidden).double(), head_logits(teacher, teacher_hidden)
        _, entropy, agreement = divergence_backward(student, hidden, teacher, teacher_hidden, 1, GraspOptions())
        _, _, same = divergence_backward(student, hidden, student, hidden, 1, GraspOptions())
    torch.testing.assert_close(entropy.double(), torch.distributions.Categorical(logits=p).entropy(), rtol=1e-5, atol=1e-5)
    assert agreement.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist() and same.tolist() == [1.0] * len(p)
    assert all(weight.grad is None for weight in [*student.parameters(), *teacher.parameters()])

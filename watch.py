"""What a training run shows of itself: the figures of a step, warnings of known collapses, and tokens one by one.

There is nothing to run: `grasp.py` imports it. On-policy self-distillation is known to collapse after some hundred steps,
its signal shrunk to a few tokens of style, its answers growing or shrinking. These figures are chosen to show that.
"""

import torch
from accelerate.utils import gather_object

from lamp_qa import leaks

WINDOW = 10  # steps at the beginning and at the end that are compared


def summarize(per_row, completions, examples, stop, tokenizer) -> dict[str, float]:
    """The figures of a batch of rollouts over all processes; `per_row` holds (3, tokens) as `grasp.score` gives them."""
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    leaked = [leaks(text, example["privileged"], example["prompt"]) for text, example in zip(texts, examples)]
    cut = [completion[-1] not in stop for completion in completions]
    rows = gather_object(list(zip(torch.cat(per_row, 1).cpu().split([len(c) for c in completions], 1), leaked, cut)))
    divergence, entropy, agreement = torch.cat([row[0] for row in rows], 1).double()
    few = max(1, len(divergence) // 100)
    return {
        "loss": divergence.mean().item(),
        **{f"divergence_p{q}": divergence.quantile(q / 100).item() for q in (50, 95, 99)},
        "top_share": (divergence.topk(few).values.sum() / divergence.sum().clamp(min=1e-9)).item(),
        "entropy": entropy.mean().item(),
        "agreement": agreement.mean().item(),
        "length": len(divergence) / len(rows),
        "truncated": sum(row[2] for row in rows) / len(rows),
        "leaks": sum(row[1] for row in rows) / len(rows),
    }


def collapse(metrics: list[dict]) -> dict[str, str]:
    """Which known collapses the metrics of a run show, by name: its last steps against its first."""
    steps = [line for line in metrics if "loss" in line]
    if len(steps) < 2 * WINDOW:
        return {}

    def means(name):
        return (sum(line[name] for line in part) / WINDOW for part in (steps[:WINDOW], steps[-WINDOW:]))

    found = {}
    for name in ("length", "entropy"):
        first, last = means(name)
        if last < first / 2:
            found[f"{name} falls"] = f"{name} has fallen from {first:.3g} to {last:.3g}"
        if last > first * 1.5 and name == "length":
            found[f"{name} rises"] = f"{name} has risen from {first:.3g} to {last:.3g}"
    first, last = means("top_share")
    if last > 0.5:
        found["few tokens"] = f"1 % of the tokens carry {last:.0%} of the divergence; --divergence-cap bounds a token's share"
    return found


def describe_rollout(example: dict, completion: list[int], logits, divergence, tokenizer) -> dict:
    """A rollout token by token, for rollouts/ and its page: `logits` are student's and teacher's (N, V), `divergence` (N,)."""
    student, teacher = (one.float().softmax(-1) for one in logits)
    ids = torch.tensor(completion, device=student.device)[:, None]
    best = teacher.max(-1)
    columns = [divergence, student.gather(1, ids)[:, 0], teacher.gather(1, ids)[:, 0], best.values]
    names = ("divergence", "student", "teacher", "favourite_probability")
    figures = [dict(zip(names, (round(value, 6) for value in row))) for row in torch.stack(columns, 1).tolist()]
    words = zip(completion, tokenizer.batch_decode(ids), tokenizer.batch_decode(best.indices[:, None]), figures)
    row = example["row"]
    return {
        "id": example["id"],
        "config": example["config"],
        "question": row["question"],
        "posts": row["profile"],
        "rubric": row["rubric_aspects"],
        "text": tokenizer.decode(completion, skip_special_tokens=True),
        "tokens": [{"id": token, "text": text, "favourite": wanted, **more} for token, text, wanted, more in words],
    }

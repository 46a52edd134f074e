"""GRASP: rubric-aware on-policy self-distillation for personalization (arXiv 2609.35262), in one file.

One model plays two parts. The student answers a question knowing the user's past posts. The teacher, a frozen copy of
the initial weights, is also shown the rubric: the aspects this user expects of the answer. One optimizer step:

  1. rollout     the student samples an answer y to each prompt x, from its full distribution        sample_completions
  2. scoring     student on [x | y] and teacher on [x, rubric | y], at the same token ids y          completion_hidden
  3. divergence  mean over all tokens of the batch of KL(student || teacher), full vocabulary        divergence_backward
  4. update      one AdamW step with 8-bit state, weights rounded stochastically to bfloat16         update

so the student comes to cover what its user cares about without seeing a rubric when it is used.

    python grasp.py configs/demo.yaml                                    # minutes on a CPU; see demo/run.py
    python grasp.py configs/lamp_qa_24gb.yaml --output-dir runs/mine     # flags win over the file, the file over defaults
    python grasp.py configs/lamp_qa_24gb.yaml --resume
    python grasp.py --help

Data and prompts are in `lamp_qa.py`. To try a variant, change `token_divergence`, a template, or `load_teacher`.
"""

import contextlib
import dataclasses
import json
import math
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from checkpoint import (
    add_adapter,
    check_positions,
    describe_model,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    load_tokenizer,
    model_card,
    peak_memory_gb,
    read_metrics,
    remove_old,
    return_memory,
    save_model,
    switch_adapters,
    trainable,
    with_adapter,
)
from command_line import InputError, first_line, option, parse_options, run, until_signal, write_file, write_lines
from lamp_qa import describe, load_data, load_templates, stop_ids
from sharding import add_up_gradients, clip_gradients, launched_to_split, local, piece, split, whole, whole_first
from view import write_run_page
from watch import collapse, describe_rollout, summarize

SAMPLE_ROWS = 4  # held-out rows whose rollouts are kept token by token

# --- Options --------------------------------------------------------------------------------------------------------


@dataclass
class GraspOptions:
    model: str = option("", "chat model to train: a local folder or a hub id", section="Model and data")
    dataset: str = option("", "LaMP-QA rows: a .json or .jsonl file, a folder of SPLIT.json[l], or a hub id")
    config: str = option("", "only this one of the data set's configs (default: all)")
    split: str = option("train", "split to train on")
    eval_dataset: str = option("", "held-out rows (default: the same data set)")
    eval_split: str = option("validation", "split of the held-out rows")
    output_dir: str = option("", "folder for the trained model, checkpoints and metrics; must be new unless --resume")
    num_contexts: int = option(10, "how many of the user's posts the prompts show", low=0, section="Prompts")
    rank_profile_with: str = option("", "encoder that ranks the posts by nearness to the question (default: as they stand)")
    privileged: str = option("aspects", "what only the teacher sees", choices=("aspects", "narrative", "both"))
    answer_format: str = option("json", "how answers are written; json is LaMP-QA's", choices=("json", "text"))
    prompts: str = option("", "YAML or JSON file of templates that replace ours (see TEMPLATES in lamp_qa.py)")
    max_prompt_tokens: int = option(6144, "rows whose longer prompt has more tokens are left out, never cut", low=1)
    max_dropped: float = option(0.05, "stop if a larger share of the rows has to be left out", low=0, high=1)
    batch_size: int = option(32, "prompts per optimizer step, all processes together", low=1, section="Rollouts")
    max_new_tokens: int = option(512, "longest rollout", low=1)
    generation_batch_size: int = option(32, "prompts sampled side by side on one device", low=1)
    teacher: str = option(
        "frozen", "the initial weights, the live student, or its average", choices=("frozen", "live", "ema"), section="Teacher"
    )
    ema_decay: float = option(0.999, "how much of itself the average keeps in a step", low=0, high=1)
    teacher_bits: int = option(16, "of a frozen teacher's weights; 16: as --dtype says", choices=(16, 8, 4))
    divergence: str = option("reverse_kl", "per token", choices=("reverse_kl", "forward_kl", "jsd"), section="Divergence")
    jsd_beta: float = option(0.5, "weight of the teacher in the mixture of jsd", low=0.001, high=0.999)
    divergence_temperature: float = option(1.0, "both sides' logits are divided by this", low=0.01)
    divergence_cap: float = option(0.0, "nats at which a token's divergence is cut off, with its gradient; 0: never", low=0)
    learning_rate: float = option(5e-6, "peak, after a linear warm-up and before a cosine to 0", low=0, section="Update")
    warmup_ratio: float = option(0.1, "share of the steps that warm up", low=0, high=1)
    weight_decay: float = option(0.1, "on matrices; norms and biases have none", low=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm", low=0.0001)
    lora_rank: int = option(0, "train adapters of this rank (needs the package peft); 0: all weights", low=0)
    base_bits: int = option(16, "of the weights under the adapters", choices=(16, 8, 4))
    merge_adapter: bool = option(True, "save a whole model in the end; false: the adapters alone, on the unchanged model")
    optimizer: str = option("adamw_8bit", "AdamW and its state", choices=("adamw_8bit", "paged_adamw_8bit", "adamw"))
    dtype: str = option("bfloat16", "of weights; bfloat16 is rounded stochastically", choices=("bfloat16", "float32"))
    epochs: int = option(1, "passes over the data", low=1)
    max_steps: int = option(0, "optimizer steps, instead of --epochs; 0: as many as those take", low=0)
    micro_batch_tokens: int = option(8192, "rows x longest row of a forward and backward pass; at least one row", low=1)
    shard: bool = option(False, "several processes split the decoder layers between them (torch's fully_shard, as ZeRO-3)")
    gradient_checkpointing: bool = option(True, "recompute activations in the backward pass: less memory, more time")
    seed: int = option(0, "of data order, rollouts and rounding", low=0)
    eval_steps: int = option(0, "steps between measurements on held-out rows; 0: never", low=0, section="Run")
    eval_rows: int = option(64, "how many held-out rows to measure on", low=1)
    sample_steps: int = option(0, "steps between held-out rollouts that are kept token by token; 0: never", low=0)
    save_steps: int = option(200, "steps between checkpoints; 0: only the final model", low=0)
    save_limit: int = option(2, "how many checkpoints are kept, the newest; 0: all", low=0)
    dry_run: bool = option(False, "only show what memory the run would need, and what would make it fit")
    resume: bool = option(False, "go on from the last checkpoint in --output-dir")
    log_with: str = option("", "a tracker that Accelerate knows: tensorboard, wandb, ...")


# --- The two parts ----------------------------------------------------------------------------------------------------


def check_parts(options: GraspOptions):
    """Raises InputError for options of student and teacher that do not go together."""
    small, moving = options.teacher_bits < 16, options.teacher != "frozen"
    if small and (moving or options.lora_rank):
        raise InputError(
            "--teacher-bits needs a frozen teacher of its own, without --lora-rank (there --base-bits holds for both)"
        )
    if options.base_bits < 16 and not options.lora_rank:
        raise InputError("--base-bits needs --lora-rank: weights of 8 or 4 bits cannot be trained themselves")
    if options.shard and options.base_bits < 16:
        raise InputError("--shard goes with weights of 16 bits; with --base-bits each process holds them whole")
    if options.teacher == "ema" and options.lora_rank:
        raise InputError("--teacher ema goes with training all weights, not with --lora-rank")


def load_student(options: GraspOptions, checkpoint, device):
    """The student to go on from `checkpoint`, or from the initial weights: all of them are trained, or adapters on them."""
    if options.lora_rank:
        base = load_model(options.model, options.dtype, device, options.base_bits)
        student = add_adapter(base, options.lora_rank, seed_for(options.seed, "adapter"))
    else:
        student = load_model(str(checkpoint or options.model), options.dtype, device)
    return (split(student, device.type) if options.shard else student).train()


def load_teacher(options: GraspOptions, student, checkpoint, device):
    """The teacher: the initial weights, frozen (GRASP); or the live student itself; or the student's moving average.

    A frozen teacher is always loaded from `options.model`, also when a run is resumed. LoRA needs no second copy: its frozen
    teacher is the student with the adapters off, see `teaching`.
    """
    if options.teacher == "live" or options.lora_rank:
        return student
    path = checkpoint / "teacher" if checkpoint and options.teacher == "ema" else options.model
    teacher = load_model(str(path), options.dtype, device, options.teacher_bits).eval().requires_grad_(False)
    return split(teacher, device.type) if options.shard and options.teacher_bits == 16 else teacher


@contextlib.contextmanager
def teaching(teacher, options: GraspOptions):
    """Within it the teacher's weights are in place, and no graph is built."""
    adapters_off = options.lora_rank and options.teacher == "frozen"
    if adapters_off:
        switch_adapters(teacher, False)
    with torch.no_grad():
        yield
    if adapters_off:
        switch_adapters(teacher, True)


# --- 1. Rollout -------------------------------------------------------------------------------------------------------


def seed_for(*parts) -> int:
    """A seed that depends on all of `parts` and on nothing else, so that any step can be redone alone."""
    return random.Random("/".join(map(str, parts))).getrandbits(63)


def sample_completions(
    model, prompts, stop, max_new_tokens, seeds, temperature=1.0, top_p=1.0, batch_size=32
) -> list[list[int]]:
    """Sample a completion to each prompt (lists of token ids): the sampled ids up to and with the first one in `stop`.

    Row i depends on seeds[i] and its own prompt alone, not on its neighbours. The model's generation_config plays no part,
    so temperature 1 and top_p 1 sample from the full distribution; temperature 0 is greedy. Prompts of similar length are
    sampled together, `batch_size` at a time, in eval mode: in train mode, gradient checkpointing switches the cache off.
    """
    training = model.training
    model.eval()
    completions = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = [prompts[i] for i in rows], stop, max_new_tokens, [seeds[i] for i in rows], temperature, top_p
        for row, sampled in zip(rows, sample_batch(model, *batch)):
            end = next((i + 1 for i, token in enumerate(sampled) if token in stop), len(sampled))
            completions[row] = sampled[:end]
    model.train(training)
    return completions


@torch.no_grad()
def sample_batch(model, prompts, stop, max_new_tokens, seeds, temperature, top_p) -> list[list[int]]:
    """One padded batch of `sample_completions`; rows may run on behind their first stop id."""
    width, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)  # (B, T), padded left
    # by position: comparing ids with the pad id would also hide an end-of-turn token that serves as pad (SmolLM2)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    uniform = [torch.rand(max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in seeds]
    uniform = torch.stack(uniform).to(device)  # (B, max_new_tokens)
    stop = torch.tensor(sorted(stop), device=device)
    sampled = torch.full((len(prompts), max_new_tokens), int(stop[0]), device=device)
    running = torch.arange(len(prompts), device=device)
    cache = DynamicCache(config=model.config)
    for step in range(max_new_tokens):
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "cache": cache}
        logits = model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]  # (B, V)
        ids = pick(logits, uniform[running, step], temperature, top_p)[:, None]  # (B, 1)
        sampled[running, step] = ids[:, 0]
        mask = F.pad(mask, (0, 1), value=1)
        positions = positions[:, -1:] + 1
        if step % 16 == 15:  # let go of the rows that have ended; rarely, since asking makes the host wait for the device
            alive = ~torch.isin(sampled[running, : step + 1], stop).any(-1)
            keep = alive.nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) < len(running):
                cache.batch_select_indices(keep)
                running, ids, mask, positions = running[keep], ids[keep], mask[keep], positions[keep]
    return sampled.tolist()


def pick(logits, uniform, temperature=1.0, top_p=1.0):
    """Next token ids (B,) for logits (B, V), by inverting the cumulative distribution at `uniform` (B,) in [0, 1)."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:  # the smallest set of most likely tokens with at least this mass
        ranked, order = probabilities.sort(-1, descending=True)
        ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ranked)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)


# --- 2. Scoring -------------------------------------------------------------------------------------------------------


def completion_hidden(model, prompts, completions):
    """The decoder's hidden states from which the completions' tokens are predicted: (N, H), N tokens, row after row.

    `prompts` and `completions` are lists of token ids. Position i predicts token i + 1, so the first completion token is
    predicted at the prompt's last position and the last completion token need not be fed at all.
    """
    sequences = [prompt + completion[:-1] for prompt, completion in zip(prompts, completions)]
    width = max(map(len, sequences))
    # (B, T), padded right: positions count from 0, and no token attends to what comes after it, so that no mask is needed
    ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences], device=model.device)
    places = [  # of the predicting positions, in the flattened batch
        row * width + position
        for row, (prompt, sequence) in enumerate(zip(prompts, sequences))
        for position in range(len(prompt) - 1, len(sequence))
    ]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
    return hidden.flatten(0, 1)[torch.tensor(places, device=hidden.device)]


def head_logits(model, hidden):
    """Logits (N, V) of hidden states (N, H), by the model's own forward with its decoder stepping aside.

    Whatever a family does behind its decoder is thereby done here: soft-capping (Gemma-2), logit scales (Granite, Cohere),
    a head bias. A bare matrix product would skip it without a word.
    """
    decoder, head = model.base_model, model.get_output_embeddings()
    decoder.forward = lambda *args, **kwargs: Decoded(last_hidden_state=hidden[None])
    if type(head) is nn.Linear:
        head.forward = lambda hidden: HeadLinear.apply(hidden, head.weight, head.bias)
    try:
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=hidden.device)).logits[0]
    finally:
        decoder.__dict__.pop("forward"), head.__dict__.pop("forward", None)
    if len(logits) != len(hidden):  # OPT's forward goes past its base model
        raise InputError(f"models of type {model.config.model_type} cannot be trained: their decoder cannot step aside")
    return logits


class Decoded(BaseModelOutputWithPast):
    def __getattr__(self, name):  # what families pass on besides (router_logits, cross_attentions) is not there
        return None


class HeadLinear(torch.autograd.Function):
    """The head's matrix product, its weight gradient added in place: else each chunk would make a (V, H) matrix anew."""

    @staticmethod
    def forward(ctx, hidden, weight, bias):
        ctx.save_for_backward(hidden, weight, bias)
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad.addmm_(flat.T, hidden.flatten(0, -2))
        return grad @ weight, None, flat.sum(0) if bias is not None and bias.requires_grad else None


# --- 3. Divergence ----------------------------------------------------------------------------------------------------


def token_divergence(
    student_logits, teacher_logits, kind="reverse_kl", beta=0.5, temperature=1.0, cap=0.0, dtype=torch.float64
):
    """Divergence of the next-token distributions per token, over the full vocabulary: (N, V) and (N, V) to (N,), in nats.

    With p the student and q the teacher: reverse_kl is KL(p || q) (GRASP, section 3), forward_kl is KL(q || p), and jsd is
    beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD, arXiv 2306.13649, equation 1). Tokens with
    logit -inf on both sides count for nothing. Values over `cap` (if not 0) are cut to it and have no gradient. Computed
    in `dtype`; training passes float32. Raises ValueError for another kind.
    """
    floor = max(-1e30, torch.finfo(student_logits.dtype).min)  # as good as -inf, but inf - inf is not a number
    logits = (side.clamp(min=floor).to(dtype) for side in (student_logits, teacher_logits))
    log_p, log_q = ((one if temperature == 1 else one / temperature).log_softmax(-1) for one in logits)
    if kind == "reverse_kl":
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    elif kind == "forward_kl":
        divergence = (log_q.exp() * (log_q - log_p)).sum(-1)
    elif kind == "jsd":
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        divergence = beta * (log_q.exp() * (log_q - log_m)).sum(-1) + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)
    else:
        raise ValueError(f"kind is {kind!r}, expected 'reverse_kl', 'forward_kl' or 'jsd'")
    return divergence.clamp(max=cap) if cap else divergence


def chunk_tokens(vocabulary: int) -> int:
    """How many tokens' logits exist at a time: each time, the head's weights are read anew, and fewer would not be worth it."""
    return max(256, 2**24 // vocabulary)


def divergence_tokens(vocabulary: int, device_type: str) -> int:
    """For how many of them the divergence is computed at a time: on a CPU its many passes stay in the cache."""
    return max(1, (2**24 if device_type == "cuda" else 2**19) // vocabulary)


def divergence_backward(student, hidden, teacher, teacher_hidden, num_tokens, options):
    """Add the gradient of sum(token_divergence) / num_tokens to the student's weights; hidden states are (N, H) each.

    The (N, V) logits never exist: each chunk of tokens goes through head and divergence and straight back to its hidden
    states, whose gradient then runs through the decoder once. With `hidden` from no_grad, nothing is added to anything.
    Returns (3, N), without graph: per token the divergence and the student's entropy in nats, and whether both favour the
    same next token.
    """
    learn, vocabulary = hidden.requires_grad, student.config.get_text_config().vocab_size
    settings = options.divergence, options.jsd_beta, options.divergence_temperature, options.divergence_cap, torch.float32
    chunk, few = chunk_tokens(vocabulary), divergence_tokens(vocabulary, hidden.device.type)
    gradient, statistics = torch.empty_like(hidden), hidden.new_empty(3, len(hidden), dtype=torch.float32)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        part = hidden[rows].detach().requires_grad_(learn)
        with torch.set_grad_enabled(learn):
            student_logits = head_logits(student, part)  # (C, V)
        with torch.no_grad():
            teacher_logits = head_logits(teacher, teacher_hidden[rows])
        for first in range(0, len(part), few):
            some = slice(first, first + few)
            logits, teacher_part = student_logits[some].detach().requires_grad_(learn), teacher_logits[some]
            with torch.set_grad_enabled(learn):
                divergence = token_divergence(logits, teacher_part, *settings)
            with torch.no_grad():
                log_p = logits.float().log_softmax(-1)
                entropy = -torch.linalg.vecdot(log_p.exp(), log_p.clamp_(min=-1e30))
                favourite = logits.max(-1, keepdim=True).indices
                agreement = teacher_part.gather(-1, favourite)[:, 0] == teacher_part.amax(-1)
                statistics[:, rows][:, some] = torch.stack([divergence.detach(), entropy, agreement.float()])
            if learn:  # the gradient takes the place of the teacher's logits, which have served
                teacher_part.copy_(torch.autograd.grad(divergence.sum() / num_tokens, logits)[0])
        if learn:
            student_logits.backward(teacher_logits)
            gradient[rows] = part.grad
    if learn:
        hidden.backward(gradient)
    return statistics


# --- 4. Update --------------------------------------------------------------------------------------------------------

SLICE = 2**22  # weights updated at a time; the float32 copy of no more than these exists


def build_optimizer(model, options: GraspOptions):
    """AdamW over the model's weights, and the slices through which `update` shows them to it.

    The optimizer holds float32 stand-ins, one for each slice of each weight, which are empty except while `update` works on
    them: so any optimizer can round stochastically, no float32 copy of a bfloat16 model exists, and a weight that processes
    split is here what this one holds. Returns (optimizer, [(weight, slice of the flattened weight, stand-in)]).
    """
    import bitsandbytes as bnb

    slices, groups = [], {True: [], False: []}
    names = {weight: name for name, weight in trainable(model).items()}
    for weight in whole_first(names):
        for start in range(0, local(weight.data).numel(), SLICE):
            stand_in = nn.Parameter(torch.empty(0, dtype=torch.float32, device=weight.device))
            slices.append((weight, slice(start, start + SLICE), stand_in))
            groups[weight.ndim > 1].append((piece(names[weight], weight, start, SLICE), stand_in))
    decays = {True: options.weight_decay, False: 0.0}  # norms and biases have none
    groups = [{"params": groups[matrix], "weight_decay": decay} for matrix, decay in decays.items() if groups[matrix]]
    build = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=options.learning_rate, fused=True),
        "adamw_8bit": lambda: bnb.optim.AdamW8bit(groups, lr=options.learning_rate),
        "paged_adamw_8bit": lambda: bnb.optim.PagedAdamW8bit(groups, lr=options.learning_rate),
    }
    return build[options.optimizer](), slices


def update(optimizer, slices, learning_rate: float, seed: int):
    """One optimizer step at this learning rate; gradients are freed. `seed` is that of the rounding."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    generator = torch.Generator(slices[0][0].device).manual_seed(seed)
    for weight, part, stand_in in slices:  # the other stand-ins have no gradient, so each step updates this one alone
        if weight.grad is None:
            continue
        stored = local(weight.data).view(-1)[part]
        stand_in.data, stand_in.grad = stored.float(), local(weight.grad).reshape(-1)[part].float()
        optimizer.step()  # of float32 weights the stand-in is the slice itself, not a copy
        if stored.dtype != torch.float32:
            stochastic_round_(stored, stand_in.data, generator)
        stand_in.data, stand_in.grad = torch.empty(0, device=weight.device), None
    for weight, _, _ in slices:
        weight.grad = None


def stochastic_round_(target, values, generator):
    """Write float32 `values` into the bfloat16 `target`, each to one of its two neighbours so that the mean is right.

    A bfloat16 is the upper half of a float32: adding 16 random bits to the lower half carries into the upper one with
    the probability of what is cut off. Round-to-nearest would lose every update under 2^-9 of its weight: at a learning
    rate of 5e-6 that is nearly all of them, and no error says so. Overwrites `values`.
    """
    bits, no_number = values.flatten().view(torch.int32), values.isnan()
    noise = torch.empty((bits.numel() + 3) // 4, dtype=torch.int64, device=bits.device)
    noise.random_(-(2**63), None, generator=generator)  # 64 random bits serve four weights
    bits += noise.view(torch.int16)[: bits.numel()]
    bits += 2**15  # the noise is signed
    bits &= -(2**16)
    target.copy_(bits.view(torch.float32).view_as(target)).masked_fill_(no_number, math.nan)  # the bits may have overflown


@torch.no_grad()
def follow(teacher, student, decay: float, seed: int):
    """Move an averaging teacher: decay * teacher + (1 - decay) * student; bfloat16 is rounded stochastically here, too."""
    generator = torch.Generator(next(student.parameters()).device).manual_seed(seed)
    for old, new in zip(whole_first(teacher.parameters()), whole_first(student.parameters())):
        old, new = local(old), local(new)
        for start in range(0, old.numel(), SLICE):
            part = slice(start, start + SLICE)
            stored = old.view(-1)[part]
            moved = torch.lerp(stored.float(), new.view(-1)[part].float(), 1 - decay)
            stored.copy_(moved) if old.dtype == torch.float32 else stochastic_round_(stored, moved, generator)


def learning_rate_at(step: int, total: int, options: GraspOptions) -> float:
    """Linear warm-up to the peak, then a cosine to 0; `step` counts from 0."""
    warmup = math.ceil(options.warmup_ratio * total)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


# --- The loop ---------------------------------------------------------------------------------------------------------


def micro_batches(lengths: list[int], budget: int, least: int = 1) -> list[list[int]]:
    """Rows of similar length together, so that rows x longest stays within `budget` tokens; a longer row stands alone.

    There are at least `least` of them, if there are as many rows.
    """
    batches = []
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[row] <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    while len(batches) < min(least, len(lengths)):
        largest = max(batches, key=len)
        batches.append([largest.pop() for _ in range(len(largest) // 2)])
    return batches


def score(student, teacher, examples, completions, num_tokens, options) -> list[torch.Tensor]:
    """Steps 2 and 3 for these rollouts, a micro-batch at a time; under no_grad it only measures.

    Returns per row what `divergence_backward` gives per token: (3, tokens of the completion). The loss is the mean over
    `num_tokens`, all tokens of the optimizer batch: micro-batches and processes only add up, whatever their sizes.
    """
    per_row = [None] * len(examples)
    lengths = [max(len(e["student"]), len(e["teacher"])) + len(c) for e, c in zip(examples, completions)]
    batches = micro_batches(lengths, options.micro_batch_tokens)
    if options.shard and torch.is_grad_enabled():  # processes gather layers together, so each has as many micro-batches
        batches = micro_batches(lengths, options.micro_batch_tokens, max(gather_object([len(batches)])))
    for rows in batches:
        sampled = [completions[i] for i in rows]
        with teaching(teacher, options):
            teacher_hidden = completion_hidden(teacher, [examples[i]["teacher"] for i in rows], sampled)  # (N, H)
        student_hidden = completion_hidden(student, [examples[i]["student"] for i in rows], sampled)  # (N, H)
        statistics = divergence_backward(student, student_hidden, teacher, teacher_hidden, num_tokens, options)
        for i, of_row in zip(rows, statistics.split([len(completion) for completion in sampled], dim=1)):
            per_row[i] = of_row
    return per_row


@torch.no_grad()
def measure(student, teacher, examples, stop, tokenizer, options, rank=0, world=1) -> dict[str, float]:
    """Reverse KL, length, leakage and the rest on held-out rows, with fresh rollouts and the same seeds each time."""
    plain = dataclasses.replace(options, divergence="reverse_kl", divergence_temperature=1.0, divergence_cap=0.0)
    slots = range(rank, len(examples), world)
    mine = [examples[slot] for slot in slots]
    seeds = [seed_for(options.seed, "held-out", slot) for slot in slots]
    prompts = [example["student"] for example in mine]
    batch_size = options.generation_batch_size
    completions = sample_completions(student, prompts, stop, options.max_new_tokens, seeds, batch_size=batch_size)
    per_row = score(student, teacher, mine, completions, 1, plain)
    figures = summarize(per_row, completions, mine, stop, tokenizer)
    return {"reverse_kl" if name == "loss" else name: value for name, value in figures.items()}


@torch.no_grad()
def inspect(student, teacher, examples, stop, tokenizer, options) -> list[dict]:
    """Fresh rollouts to these rows, as `measure` samples them, token by token: what did the teacher think of each?"""
    seeds = [seed_for(options.seed, "held-out", slot) for slot in range(len(examples))]
    prompts = [example["student"] for example in examples]
    rollouts = sample_completions(student, prompts, stop, options.max_new_tokens, seeds, batch_size=len(prompts))
    rows = []
    for example, completion in zip(examples, rollouts):
        with teaching(teacher, options):
            teacher_logits = head_logits(teacher, completion_hidden(teacher, [example["teacher"]], [completion]))
        logits = head_logits(student, completion_hidden(student, [example["student"]], [completion])), teacher_logits
        rows.append(describe_rollout(example, completion, logits, token_divergence(*logits, dtype=torch.float32), tokenizer))
    return rows


def batch_at(step: int, size: int, rows: int, seed: int) -> list[int]:
    """Which rows make up a step's batch: `size` in a row of an endless sequence of shuffled epochs."""
    places = range(step * size, (step + 1) * size)
    orders = {
        epoch: random.Random(seed_for(seed, "epoch", epoch)).sample(range(rows), rows)
        for epoch in {place // rows for place in places}
    }
    return [orders[place // rows][place % rows] for place in places]


def train(options: GraspOptions) -> Path:
    """Train by GRASP as `options` say; returns the folder of the trained model, OUTPUT_DIR/model.

    Ctrl-C and SIGTERM finish the running step, save a checkpoint and end the process with the status that shells expect.
    """
    from memory import advising, forecast  # which runs the functions of this file itself

    check_parts(options)
    folder = Path(options.output_dir)
    if folder.exists() and any(path.suffix != ".tmp" for path in folder.iterdir()) and not options.resume:
        raise InputError(f"{folder}: already holds files; choose another --output-dir, or go on with --resume")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        accelerator = Accelerator(log_with=options.log_with or None, project_dir=options.output_dir)
    except ValueError as error:
        raise InputError(f"--log-with is {options.log_with!r}: {first_line(error)}") from error
    rank, world = accelerator.process_index, accelerator.num_processes
    say, main = accelerator.print, accelerator.is_main_process
    if launched_to_split(accelerator) and options.base_bits == 16:
        say("launched with FSDP or DeepSpeed: layers are split as by --shard, with any optimizer; other settings play no part")
        options = dataclasses.replace(options, shard=True)
    options = dataclasses.replace(options, shard=options.shard and world > 1)
    together = accelerator if options.shard else None  # a checkpoint of a split model takes all processes
    if options.batch_size % world:
        raise InputError(f"--batch-size is {options.batch_size}, expected a multiple of the {world} processes")

    templates, tokenizer = load_templates(options.prompts), load_tokenizer(options.model)
    with accelerator.main_process_first():  # the others then find what `datasets` cached
        examples, held_out, account = load_data(options, tokenizer, templates)
    start, checkpoint = latest_checkpoint(folder, options, account) if options.resume else (0, None)
    say(*map(describe, account.values()), sep="\n")
    if options.resume and (folder / "model").exists():
        if main:
            remove_old(folder, options, finished=True)
        say(f"the run is finished: its model is in {folder / 'model'}; for people: {write_run_page(folder)}")
        return folder / "model"
    longest = [max(len(example[role]) for example in examples + held_out) for role in ("student", "teacher")]
    check_positions(options.model, max(longest) + options.max_new_tokens)
    say(forecast(options, *longest, accelerator.device, world))
    if options.dry_run:
        return folder
    student = load_student(options, checkpoint, accelerator.device)
    teacher = load_teacher(options, student, checkpoint, accelerator.device)
    stop = stop_ids(student, tokenizer)
    if options.gradient_checkpointing:
        student.activation_checkpointing_enable({"use_reentrant": False})
    optimizer, slices = build_optimizer(student, options)
    if checkpoint:
        load_checkpoint(checkpoint, student, optimizer, together)
    total = options.max_steps or math.ceil(options.epochs * len(examples) / options.batch_size)
    say(f"{total} steps of {options.batch_size} prompts, {describe_model(student)}, on {accelerator.device.type}")
    metrics = [line for line in read_metrics(folder) if line["step"] <= start] if start else []
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        settings = dataclasses.asdict(options) | {"resume": False}  # the same file, whether the run was stopped or not
        write_file(folder / "options.yaml", yaml.safe_dump(settings, sort_keys=False))
        write_file(folder / "data.json", json.dumps(account, indent=1))
        write_lines(folder / "metrics.jsonl", metrics)
    if options.log_with:
        accelerator.init_trackers("grasp", config=dataclasses.asdict(options))

    def log(figures: dict, step: int, prefix: str = ""):
        figures = {prefix + name: value for name, value in figures.items()}
        metrics.append({"step": step, **figures})
        if main:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics[-1]) + "\n")
        accelerator.log(figures, step=step)

    def look(step: int):
        """What held-out rows show after this step: figures, the best weights so far, a few rollouts token by token."""
        intervals = options.eval_steps, options.sample_steps
        measuring, sampling = (bool(every) and (step % every == 0 or step == total) for every in intervals)
        with whole(student, teacher) if measuring or sampling else contextlib.nullcontext():
            if measuring:
                before = [line["eval_reverse_kl"] for line in metrics if "eval_reverse_kl" in line and line["step"]]
                figures = measure(student, teacher, held_out[: options.eval_rows], stop, tokenizer, options, rank, world)
                log(figures, step, "eval_")
                if main and step and figures["reverse_kl"] < min(before, default=math.inf):
                    save(folder / "best")
            if main and sampling:
                rows = inspect(student, teacher, held_out[:SAMPLE_ROWS], stop, tokenizer, options)
                (folder / "rollouts").mkdir(exist_ok=True)
                write_file(folder / "rollouts" / f"step-{step:06}.json", json.dumps({"step": step, "rows": rows}))

    def save(place: Path, card: str = ""):
        saved = student
        if options.lora_rank:
            saved = with_adapter(load_model(options.model, options.dtype), student, options.lora_rank, options.merge_adapter)
        save_model(place, saved, tokenizer, card=card)

    if not start:
        if options.eval_steps or options.sample_steps:
            say("looking at held-out rows before the first step")
        look(0)
    warned = set(collapse(metrics))
    bar = tqdm(range(start, total), initial=start, total=total, disable=not main)
    with until_signal() as signals, advising(options, *longest, accelerator.device, world):
        for step in bar:
            began = time.perf_counter()
            batch = batch_at(step, options.batch_size, len(examples), options.seed)
            slots = range(rank, options.batch_size, world)  # this process's share
            mine = [examples[batch[slot]] for slot in slots]

            # 1. The student answers, seeing profile and question.
            seeds = [seed_for(options.seed, step, slot) for slot in slots]
            prompts = [example["student"] for example in mine]
            batch_size = options.generation_batch_size
            with whole(student):
                completions = sample_completions(student, prompts, stop, options.max_new_tokens, seeds, batch_size=batch_size)
            num_tokens = sum(gather_object([sum(map(len, completions))]))

            # 2. and 3. Teacher and student score these very tokens; the reverse KL's gradient adds up in the student.
            per_row = score(student, teacher, mine, completions, num_tokens, options)

            # 4. One optimizer step.
            add_up_gradients(trainable(student).values(), accelerator)
            norm = clip_gradients(trainable(student).values(), options.max_grad_norm)
            if not norm.isfinite():
                raise InputError(f"step {step + 1}: the gradient is not finite; start again with a lower --learning-rate")
            rate = learning_rate_at(step, total, options)
            update(optimizer, slices, rate, seed_for(options.seed, step, "rounding"))
            if options.teacher == "ema":
                follow(teacher, student, options.ema_decay, seed_for(options.seed, step, "teacher"))

            return_memory(accelerator.device)
            figures = summarize(per_row, completions, mine, stop, tokenizer)
            seconds = time.perf_counter() - began
            figures |= {"grad_norm": norm.item(), "learning_rate": rate, "tokens_per_second": num_tokens / seconds}
            log({**figures, "seconds": seconds, "peak_memory_gb": peak_memory_gb(accelerator.device)}, step + 1)
            progress = f"{options.divergence} {figures['loss']:.4f}, length {figures['length']:.0f}"
            bar.set_postfix_str(f"{progress}, {num_tokens / seconds:.0f} tok/s")
            found = {name: text for name, text in collapse(metrics).items() if name not in warned}
            for text in found.values() if main else ():
                bar.write(f"warning, step {step + 1}: {text}")
            warned |= found.keys()
            look(step + 1)
            stopping = any(gather_object([bool(signals)])) and step + 1 < total
            due = options.save_steps and (step + 1) % options.save_steps == 0
            if (stopping or due) and (main or options.shard):
                moving = teacher if options.teacher == "ema" else None
                with whole(student, moving or student):
                    save_model(folder / f"checkpoint-{step + 1}", student, tokenizer, optimizer, moving, accelerator=together)
                if main:
                    remove_old(folder, options)
            if stopping:
                bar.close()
                say(f"stopped after step {step + 1} of {total}; give the same command with --resume to go on")
                raise SystemExit(128 + (signals or [signal.SIGTERM])[0])
    with whole(student):
        if main:
            save(folder / "model", model_card(options, account, metrics))
    if main:
        remove_old(folder, options, finished=True)
        page = write_run_page(folder)
        say(f"the trained model is in {folder / 'model'}; for people: {page}")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return folder / "model"


if __name__ == "__main__":
    run(lambda argv: train(parse_options(GraspOptions, argv, needed=("model", "dataset", "output_dir"))))

"""What memory a run needs, before it starts: each part in bytes, when it is alive, and what to change if it does not fit.

There is nothing to run: `python grasp.py CONFIG.yaml --dry-run` shows it. What stays (weights, gradients, optimizer state) is
counted from shapes. What comes and goes is counted by running the functions of `grasp.py` on tensors with shapes and no data
(torch's FakeTensorMode), so every model family is covered; what a kernel allocates inside itself is not seen.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import math
import os
import weakref
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.pytorch_utils import Conv1D

from checkpoint import add_adapter, load_config, trainable
from command_line import InputError, first_line
from grasp import SLICE, chunk_tokens, divergence_backward, divergence_tokens, pick, teaching, token_divergence
from sharding import decoder_layers

CONTEXT = 2**29  # what a CUDA process takes besides its tensors: a rule of thumb
STAYS = ("student weights", "teacher", "optimizer state", "CUDA context")
PHASES = {  # what is alive in each besides what stays
    "reading the prompts": ("gathered student", "rollout cache", "rollout activations"),
    "sampling": ("gathered student", "rollout cache", "rollout logits"),
    "the teacher's scoring": ("gradients", "gathered layer", "teacher activations"),
    "the divergence": ("gradients", "activations", "loss chunk"),
    "the backward pass": ("gradients", "gathered layer", "activations", "a layer's backward"),
    "the update": ("gradients", "update slice"),
    "measuring": ("gathered student", "gathered teacher", "teacher activations"),
    "looking at rollouts": ("gathered student", "gathered teacher", "rollout looked at"),
}


class Tally(TorchDispatchMode):
    """Within it, `now` counts the bytes of the tensors made so far and still alive, and `peak` the most there were."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.alive = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for made, tensors in ((False, (args, kwargs)), (True, out)):  # what an operation was given is not made by it
            for tensor in tree_leaves(tensors):
                if isinstance(tensor, torch.Tensor):
                    self.watch(tensor.untyped_storage(), made)
        return out

    def watch(self, storage, made):
        key, size = storage._cdata, storage.nbytes() if made else 0
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def forget(self, key, size):
        del self.alive[key]
        self.now -= size

    def during(self, work):
        """(what work() returns, bytes it left behind, bytes at its peak), both beyond what was there before."""
        before = self.peak = self.now
        result = work()
        return result, self.now - before, self.peak - before


def predict(config, options, longest_student: int, longest_teacher: int, device_type: str, world: int = 1) -> dict[str, int]:
    """Bytes of each part of a run with these options; PHASES says which of them are alive together.

    `config` is the model's; the two lengths are those of the longest prompts, in tokens. Counted for one of `world` processes
    in its worst case: the longest rows come together, and every rollout takes all of --max-new-tokens.
    """
    eager = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}  # as in load_model
    with torch.device("meta"):
        student = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=options.dtype, **eager)
    head = student.get_output_embeddings()
    linear = [module for module in student.modules() if type(module) in (nn.Linear, Conv1D) and module is not head]
    whole = sum(tensor.nbytes for tensor in [*student.parameters(), *student.buffers()])
    stored = {bits: whole - sum(m.weight.nbytes - packed_bytes(m, bits) for m in linear) for bits in (16, 8, 4)}
    unpacked = max((module.weight.nbytes for module in linear), default=0)  # of a layer in 8 or 4 bits, while it works
    by_student, by_teacher = (unpacked if bits < 16 else 0 for bits in (options.base_bits, options.teacher_bits))
    if options.lora_rank:
        add_adapter(student, options.lora_rank, 0)
    with FakeTensorMode(), Tally() as tally:
        to_fake(student)
        weights = list(trainable(student).values())
        for weight in weights:  # from the second micro-batch on they are there
            weight.grad = torch.zeros_like(weight)
        layers = [  # the weights that --shard splits: all but adapters
            [weight for weight in layer.parameters() if not (options.lora_rank and weight.requires_grad)]
            for layer in (decoder_layers(student) if options.shard else ())
        ]
        held = {weight: -(-len(weight) // world) * (weight.numel() // len(weight)) for layer in layers for weight in layer}
        elsewhere = sum((weight.numel() - size) * weight.itemsize for weight, size in held.items())
        gradients = sum(weight.nbytes for weight in weights)
        sizes = [(held.get(weight, weight.numel()), weight.dtype) for weight in weights]  # of what is updated here
        has_copy = options.teacher != "live" and not options.lora_rank
        in_8_bit = options.optimizer != "adamw" and max(size for size, _ in sizes) >= 4096
        copy_elsewhere = elsewhere if options.teacher_bits == 16 else 0
        tables = 2 * 256 * 4 if in_8_bit else 0  # what an 8-bit number of the optimizer's state stands for
        cache, reading, sampling = rollout_bytes(tally, student, options, longest_student)
        scoring, kept, backward = scoring_bytes(tally, student, options, longest_student, longest_teacher)
        return {
            "student weights": stored[options.base_bits] + (gradients if options.lora_rank else 0) - elsewhere,
            "teacher": stored[options.teacher_bits] - copy_elsewhere if has_copy else 0,
            "optimizer state": sum(state_bytes(size, options.optimizer) for size, _ in sizes) + tables,
            "CUDA context": CONTEXT if device_type == "cuda" else 0,
            "gradients": gradients if options.lora_rank else gradients - elsewhere,
            "gathered student": elsewhere,
            "gathered teacher": copy_elsewhere if has_copy else 0,
            "gathered layer": 4 * max((sum(w.nbytes for w in layer) for layer in layers), default=0),  # gradient, copies
            "rollout cache": cache,
            "rollout activations": max(0, reading + by_student - cache),
            "rollout logits": sampling + by_student,
            "teacher activations": scoring + max(by_student, by_teacher),
            "activations": kept,
            "a layer's backward": backward + by_student,
            "loss chunk": loss_bytes(tally, student, options, device_type),
            "update slice": max(update_bytes(*weight, options.optimizer, device_type) for weight in sizes),
            "rollout looked at": look_bytes(tally, student, options) if options.sample_steps else 0,
        }


def to_fake(model):
    """Replace the tensors of a model on the meta device by fake ones on the CPU; what was tied stays tied."""
    made = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in made:
                    fake = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if name in module._parameters else fake
                own[name] = made.get(id(tensor))


def packed_bytes(module, bits: int) -> int:
    """Bytes of a linear layer's matrix as bitsandbytes stores it."""
    size, outputs = module.weight.numel(), module.nf if type(module) is Conv1D else module.out_features
    if bits == 8:  # and a float32 scale for each output
        return size + 4 * outputs
    if bits == 4:  # and a float32 scale for every 64 weights, and a table of 16 float32 values
        return math.ceil(size / 2) + 4 * math.ceil(size / 64) + 16 * 4
    return module.weight.nbytes


def pieces(size: int) -> list[int]:
    """In what pieces `update` passes a weight of so many elements to the optimizer."""
    return [min(SLICE, size - start) for start in range(0, size, SLICE)]


def state_bytes(size: int, optimizer: str) -> int:
    if optimizer == "adamw":  # two float32 numbers, and a counter for each tensor
        return sum(8 * piece + 4 for piece in pieces(size))
    # two 8-bit numbers, and two float32 scales for every 256; tensors under 4,096 stay in float32
    return sum(8 * piece if piece < 4096 else 2 * piece + 8 * math.ceil(piece / 256) for piece in pieces(size))


def update_bytes(size: int, dtype, optimizer: str, device_type: str) -> int:
    """What `update` takes for the largest piece of a weight, beyond weight, gradient and state."""
    piece, on_cpu = max(pieces(size), default=0), device_type == "cpu"
    optimizing = 20 * piece if on_cpu and optimizer != "adamw" else 0  # five float32 copies in bitsandbytes' CPU kernel
    if dtype == torch.float32:
        return optimizing
    rounding = piece + 2 * piece + (4 * piece if on_cpu else 0)  # is NaN, noise, and on the CPU the noise as int32
    return 8 * piece + max(optimizing, rounding)  # float32 weights and gradient


def inputs(rows: int, width: int, seen: int = 0) -> dict:
    """A batch with padding if it has several rows; a row alone needs no mask, and attention then takes less memory."""
    mask = torch.ones(rows, seen + width, dtype=torch.long) if rows > 1 else None
    return {"input_ids": torch.zeros(rows, width, dtype=torch.long), "attention_mask": mask}


@torch.no_grad()
def rollout_bytes(tally, model, options, longest: int) -> tuple[int, int, int]:
    """The cache at the end of `sample_batch`; the peak of reading the prompts; what the last token takes besides the cache."""
    together = max(options.batch_size, options.eval_rows if options.eval_steps else 0)
    rows = min(options.generation_batch_size, together)
    model.eval()

    def read(width):
        cache = DynamicCache(config=model.config)
        model(**inputs(rows, width), cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    def sample():
        batch = inputs(rows, 1, longest + options.max_new_tokens - 2)
        logits = model(**batch, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return pick(logits, torch.zeros(rows, dtype=torch.float64))

    reading = tally.during(lambda: read(longest))[2]
    cache, size, _ = tally.during(lambda: read(longest + options.max_new_tokens - 2))
    return size, reading, tally.during(sample)[2]


def scoring_bytes(tally, model, options, longest_student: int, longest_teacher: int) -> tuple[int, int, int]:
    """Of the largest micro-batch: the teacher's peak; what the student's forward keeps; what comes and goes beyond that."""
    longest, budget = max(longest_student, longest_teacher) + options.max_new_tokens, options.micro_batch_tokens
    rows = max(1, min(math.ceil(budget / longest), options.batch_size))
    width = min(longest, budget // rows) if rows > 1 else longest

    def hidden(prompt):
        length = min(width, prompt + options.max_new_tokens) - 1  # the last token is not fed
        ids = torch.zeros(rows, length, dtype=torch.long)
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        return states[torch.zeros(rows * min(length, options.max_new_tokens), dtype=torch.long)]  # (N, H)

    with teaching(model.eval(), options):
        scoring = tally.during(lambda: hidden(longest_teacher))[2]
    model.train()
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    states, kept, forward = tally.during(lambda: hidden(longest_student))
    backward = tally.during(lambda: states.backward(torch.zeros_like(states)))[2]
    return (
        scoring,
        kept + 2 * states.nbytes,
        max(forward - kept, backward),
    )  # the teacher's states, the gradient of the student's


def loss_bytes(tally, model, options, device_type: str) -> int:
    """Peak of `divergence_backward` beyond its arguments."""
    text = model.config.get_text_config()
    hidden = torch.zeros(chunk_tokens(text.vocab_size), text.hidden_size, dtype=model.dtype, requires_grad=True)
    peak = tally.during(lambda: divergence_backward(model, hidden, model, hidden.detach(), 1, options))[2]
    if device_type == "cpu":
        return peak
    few = divergence_tokens(text.vocab_size, device_type)  # more of them than on the CPU
    student = torch.zeros(few, text.vocab_size, dtype=model.dtype, requires_grad=True)
    settings = options.divergence, options.jsd_beta, options.divergence_temperature, options.divergence_cap, torch.float32

    def at_once():
        divergence = token_divergence(student, student.detach(), *settings)
        return torch.autograd.grad(divergence.sum(), student)

    logits = len(hidden) * text.vocab_size * student.itemsize
    return max(peak, 3 * logits + tally.during(at_once)[2])  # both logits and their gradient


@torch.no_grad()
def look_bytes(tally, model, options) -> int:
    """Peak of `inspect`, which takes the divergence of a whole rollout at once."""
    logits = torch.zeros(options.max_new_tokens, model.config.get_text_config().vocab_size, dtype=model.dtype)
    return 2 * logits.nbytes + tally.during(lambda: token_divergence(logits, logits, dtype=torch.float32))[2]


def peak(parts: dict[str, int]) -> tuple[int, str]:
    """(bytes, phase) at which the parts that are alive together take the most."""
    stays = sum(parts[name] for name in STAYS)
    totals = {phase: stays + sum(parts[name] for name in names) for phase, names in PHASES.items()}
    return max((total, phase) for phase, total in totals.items())


def gb(size: int) -> str:
    return f"{size / 2**30:.2f} GB"


def as_table(parts: dict[str, int], available: int) -> str:
    """The parts as a small Markdown table with the peak, and whether `available` bytes are enough."""
    lines = ["| part | memory | when |", "| --- | --- | --- |"]
    for name, size in parts.items():
        when = "always" if name in STAYS else ", ".join(phase for phase, names in PHASES.items() if name in names)
        lines += [f"| {name} | {gb(size)} | {when} |"] if size else []
    total, phase = peak(parts)
    verdict = f"it fits in {gb(available)}" if total <= available else f"{gb(total - available)} more than {gb(available)}"
    return "\n".join([*lines, f"| peak | {gb(total)} | {phase}: {verdict} |"])


def advice(
    config, options, longest_student: int, longest_teacher: int, device_type: str, available: int, world: int = 1
) -> list[str]:
    """The flags that bring the peak down until it fits, least painful first, a line each with the peak that is then left."""
    lines, longest = [], max(longest_student, longest_teacher) + options.max_new_tokens
    total, phase = peak(predict(config, options, longest_student, longest_teacher, device_type, world))
    while total > available:
        for change in cures(options, phase, longest, world):
            tried = dataclasses.replace(options, **change)
            if tried == options:
                continue
            after = peak(predict(config, tried, longest_student, longest_teacher, device_type, world))
            if after[0] < total:
                new = {name: value for name, value in change.items() if getattr(options, name) != value}
                flags = " ".join(f"--{name.replace('_', '-')} {str(value).lower()}" for name, value in new.items())
                lines.append(f"{flags}: {gb(after[0])}, {after[1]}")
                options, (total, phase) = tried, after
                break
        else:
            return [*lines, f"even so it does not fit: {gb(total - available)} are missing, {phase}"]
    return [*lines, f"so it fits in {gb(available)}"] if lines else []


def cures(options, phase: str, longest: int, world: int = 1):
    """Changes of options that may help if the peak is in this phase."""
    if world > 1 and options.base_bits == 16:
        yield {"shard": True}
    if phase in ("reading the prompts", "sampling"):
        yield {"generation_batch_size": max(1, options.generation_batch_size // 4)}
    else:
        yield {"micro_batch_tokens": min(options.micro_batch_tokens, longest)}
        yield {"gradient_checkpointing": True}
    if options.teacher == "frozen" and not options.lora_rank:
        yield {"teacher_bits": 4}
    if options.optimizer == "adamw":
        yield {"optimizer": "adamw_8bit"}
    if options.teacher != "ema" and importlib.util.find_spec("peft"):
        yield {"lora_rank": options.lora_rank or 16, "teacher_bits": 16}
    if options.lora_rank:
        yield {"base_bits": 4}


def available_memory(device) -> int:
    """Bytes of the device's memory: the card's, or the machine's within the container's limit."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(machine, int(text)) if text.isdigit() else machine


def forecast(options, longest_student: int, longest_teacher: int, device, world: int = 1) -> str:
    """What `grasp.py` shows before it starts: the table, and advice if the device is too small for the run."""
    sizes = options, longest_student, longest_teacher, device.type
    config, available = load_config(options.model), available_memory(device)
    try:
        parts = predict(config, *sizes, world)
    except InputError:  # the run itself would fail on it, too
        raise
    except Exception as error:  # the models of a new family may not run without data; the run itself may well
        return f"the memory it needs cannot be foretold for this model: {first_line(error)}"
    lines = [as_table(parts, available)]
    if peak(parts)[0] > available:
        lines += ["it would fit with, one after the other:", *advice(config, *sizes, available, world)]
    return "\n".join(lines)


@contextlib.contextmanager
def advising(options, longest_student: int, longest_teacher: int, device, world: int = 1):
    """Within it, a device that runs out of memory ends in one line: the flags that would bring the peak down."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        config, sizes = load_config(options.model), (options, longest_student, longest_teacher, device.type)
        foretold = peak(predict(config, *sizes, world))[0]  # which may have been too low
        room = min(available_memory(device), int(0.9 * foretold))
        flags = "; ".join(advice(config, *sizes, room, world))
        raise InputError(f"out of memory; go on with --resume and, one after the other: {flags}") from error

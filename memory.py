"""What memory a run needs, before it starts: each part in bytes, when it is alive, and what to change if it does not fit.

There is nothing to run: `python grasp.py CONFIG.yaml --dry-run` shows it. What stays (weights, gradients, optimizer state) is
counted from shapes. What comes and goes is counted by running the functions of `grasp.py` on tensors with shapes and no data
(torch's FakeTensorMode), so every model family is covered; what a kernel allocates inside itself is not seen.
"""

import copy
import dataclasses
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

from checkpoint import add_adapter, trainable
from grasp import SLICE, chunk_tokens, divergence_backward, pick, token_divergence

CONTEXT = 2**29  # what a CUDA process takes besides its tensors: a rule of thumb
STAYS = ("student weights", "teacher", "optimizer state", "CUDA context")
PHASES = {  # what is alive in each besides what stays
    "reading the prompts": ("rollout cache", "rollout activations"),
    "sampling": ("rollout cache", "rollout logits"),
    "the teacher's scoring": ("gradients", "teacher activations"),
    "the divergence": ("gradients", "activations", "loss chunk"),
    "the backward pass": ("gradients", "activations", "a layer's backward"),
    "the update": ("gradients", "update slice"),
    "looking at rollouts": ("rollout looked at",),
}


def predict(config, options, longest_student: int, longest_teacher: int, device_type: str) -> dict[str, int]:
    """Bytes of each part of a run with these options; PHASES says which of them are alive together.

    `config` is the model's; the two lengths are those of the longest prompts, in tokens. Counted for one process in its worst
    case: the longest rows come together, and every rollout takes all of --max-new-tokens.
    """
    with FakeTensorMode():
        student = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=options.dtype, **attention(config))
        head = student.get_output_embeddings()
        layers = [m.weight for m in student.modules() if type(m) is nn.Linear and m is not head]
        saved = {bits: sum(weight.nbytes - quantized_bytes(weight, bits) for weight in layers) for bits in (16, 8, 4)}
        weights = sum(tensor.nbytes for tensor in [*student.parameters(), *student.buffers()])
        if options.lora_rank:
            add_adapter(student, options.lora_rank, 0)
        for weight in trainable(student).values():
            weight.grad = torch.zeros_like(weight)
        adapters = sum(weight.nbytes for weight in trainable(student).values()) if options.lora_rank else 0
        own_teacher = options.teacher != "live" and not options.lora_rank
        parts = {
            "student weights": weights - saved[options.base_bits] + adapters,
            "teacher": weights - saved[options.teacher_bits] if own_teacher else 0,
            "optimizer state": optimizer_bytes(trainable(student).values(), options.optimizer),
            "CUDA context": CONTEXT if device_type == "cuda" else 0,
            "gradients": sum(weight.nbytes for weight in trainable(student).values()),
            **rollout_bytes(student, options, longest_student),
            **scoring_bytes(
                student, options, longest_student + options.max_new_tokens, longest_teacher + options.max_new_tokens
            ),
            "loss chunk": loss_bytes(config, options, device_type),
            "update slice": update_bytes(trainable(student).values(), options, device_type),
            "rollout looked at": ...,
        }
        largest = max((weight.nbytes for weight in layers), default=0)  # a layer of 8 or 4 bits is unpacked when it is used
        ...
    return parts

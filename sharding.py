"""Several processes that split a model between them: torch's fully_shard, which is FSDP2 and does what ZeRO-3 does.

There is nothing to run: `grasp.py --shard` uses it. The decoder layers are split, of student and teacher alike, with their
gradients and optimizer state; each is gathered while it runs. Embeddings, head and adapters stay whole on every process, which
adds up their gradients as without --shard: so the divergence, chunk by chunk, needs no other process.
"""

import contextlib
import os
from copy import deepcopy

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor
from transformers.integrations import unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer  # the base class of decoder layers


def launched_to_split(accelerator) -> bool:
    """Was the run launched with FSDP or DeepSpeed? Only `split` may act on it: not transformers, as it loads models."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    unset_hf_deepspeed_config()
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def decoder_layers(model) -> list:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def split(model, device_type: str):
    """Leave each process its part of every weight in the decoder layers; gradients are added up, not averaged."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    weights = list(model.parameters())
    adapters = {w for w in weights if w.requires_grad} if any(not w.requires_grad for w in weights) else set()
    layers = decoder_layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)  # else it would be a weighted sum, which gloo does not have
    share_comm_ctx(layers)
    return model


@contextlib.contextmanager
def whole(*models):
    """Within it every process has all weights of the models, and can run them alone and as long as it likes."""
    layers = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    for layer in layers:
        layer.set_reshard_after_forward(False)
        layer.unshard()
    yield
    for layer in layers:
        layer.set_reshard_after_forward(True)
        layer.reshard()


def local(tensor):
    """What this process holds of a weight or gradient: its part, or all of it; shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_first(weights) -> list:
    """Those that every process has whole, then the split ones: processes draw the same noise only as long as sizes agree."""
    return sorted(weights, key=lambda weight: isinstance(weight, DTensor))


def piece(name: str, weight, start: int, size: int) -> str:
    """NAME:FIRST:END, where in the whole weight, flattened, lie `size` numbers from `start` on of what this process holds."""
    begin = 0
    if isinstance(weight, DTensor):  # whole rows, as many for each process, and fewer or none for the last ones
        rows = -(-len(weight) // dist.get_world_size())
        begin = min(dist.get_rank() * rows, len(weight)) * weight.stride(0)
    return f"{name}:{begin + start}:{begin + min(start + size, local(weight.data).numel())}"


def recut(saved: list[dict], optimizer) -> dict:
    """The state_dict of an optimizer whose `piece`s of the weights are others than those of the processes that `saved`.

    Of pieces that differ, 8-bit numbers are read and written anew: their blocks begin elsewhere.
    """
    held = {}  # by name of the weight: {(first, end): state}; what all processes hold is there once
    for one in saved:
        for group in one["param_groups"]:
            for place, index in zip(group["param_names"], group["params"]):
                name, first, end = place.rsplit(":", 2)
                state = {}
                for key, value in one["state"].get(index, {}).items():  # bitsandbytes wraps some of it once more
                    state |= value if isinstance(value, dict) else {key: value}
                held.setdefault(name, {})[int(first), int(end)] = state
    new = optimizer.state_dict()
    for group in new["param_groups"]:
        for place, index in zip(group["param_names"], group["params"]):
            name, first, end = place.rsplit(":", 2)
            if state := assemble(held[name], int(first), int(end), getattr(optimizer, "name2qmap", None)):
                new["state"][index] = state
    return new


def assemble(pieces: dict, first: int, end: int, tables) -> dict:
    """The optimizer's state of the numbers from `first` to `end` of a weight; with `tables`, bitsandbytes' 8-bit state."""
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    if (first, end) in pieces:
        return pieces[first, end]
    parts = sorted(place for place in pieces if place[0] < end and first < place[1])
    if not all(pieces[part] for part in parts):  # a weight that never had a gradient has no state
        return {}
    state = {"step": deepcopy(pieces[parts[0]]["step"])}  # which is updated in place
    for number, key in enumerate(("state1", "state2") if tables else ("exp_avg", "exp_avg_sq"), 1):
        values = []
        for begin, stop in parts:
            value, old = pieces[begin, stop][key], pieces[begin, stop]
            if value.dtype == torch.uint8:
                absmax, table = old[f"absmax{number}"], old[f"qmap{number}"]
                value = dequantize_blockwise(value, absmax=absmax, code=table, blocksize=256)
            values.append(value[max(first - begin, 0) : end - begin])
        state[key] = torch.cat(values)
        if tables and end - first >= 4096:  # smaller ones bitsandbytes keeps in float32
            table = tables["dynamic" if number == 1 else "udynamic"]
            state[key], quantized = quantize_blockwise(state[key], code=table, blocksize=256)
            state |= {f"absmax{number}": quantized.absmax, f"qmap{number}": table}
    return state


def tensors(model) -> dict:
    """The weights and buffers to be saved, by name, as they are now; state_dict() would split them again."""
    found = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def add_up_gradients(weights, accelerator):
    """Sum the gradients of whole weights over all processes; those of split ones were summed in the backward pass."""
    for weight in weights if accelerator.num_processes > 1 else ():
        if not isinstance(weight, DTensor):  # an expert that no token of this process saw has no gradient
            weight.grad = accelerator.reduce(torch.zeros_like(weight) if weight.grad is None else weight.grad, "sum")


@torch.no_grad()
def clip_gradients(weights, max_norm: float):
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm there was, over all processes."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = nn.utils.get_total_norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    if parts := [local(gradient) for gradient in gradients if isinstance(gradient, DTensor)]:
        squared = nn.utils.get_total_norm(parts).float() ** 2
        dist.all_reduce(squared)
        norm = (norm.float() ** 2 + squared).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(scale)
    return norm

"""Models from and to disk: loading, checkpoints that are whole or not there, and what a run leaves beside them."""

import ctypes
import dataclasses
import json
import logging
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from command_line import InputError, first_line, read_yaml
from sharding import recut, tensors

# bitsandbytes misses 4-bit kernels on import, and in 8 bit tells of a cast at every matrix product
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# on a CPU, torch's libraries keep kernels of 1,024 shapes, in two caches: with lengths that vary, memory would grow for
# hundreds of steps; read at the first product. A shape pays off within a pass, whose layers share it
for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(name, "64")

# options that may differ when a run is resumed: they change where, how fast and how often, not what comes out
FREE = {"resume", "dry_run", "save_steps", "save_limit", "sample_steps", "log_with", "output_dir", "merge_adapter"}
FREE |= {"generation_batch_size", "micro_batch_tokens", "gradient_checkpointing", "shard"}


# --- Models -----------------------------------------------------------------------------------------------------------


def load_model(path: str, dtype: str, device="cpu", bits: int = 16):
    """The causal language model at a local folder or hub id, every weight found in safetensors, no dropout.

    With 8 or 4 `bits`, bitsandbytes holds the matrices of its layers in so many (4: nf4, QLoRA, arXiv 2305.14314); `dtype` is
    then that of the rest and of the arithmetic. Raises InputError for what cannot be loaded or lacks weights.
    """
    settings = {}
    if bits < 16:
        small = {"load_in_8bit": bits == 8, "load_in_4bit": bits == 4, "bnb_4bit_quant_type": "nf4"}
        quantization = BitsAndBytesConfig(**small, bnb_4bit_compute_dtype=getattr(torch, dtype))
        settings = {"quantization_config": quantization, "device_map": {"": device}}
    config = load_config(path)
    try:
        # sdpa has no soft-capping of attention logits (Gemma-2), and leaves it out without a word
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        settings |= dict(config=config, dtype=dtype, attn_implementation=attention, use_safetensors=True)
        model, info = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **settings, output_loading_info=True)
    except Exception as error:
        raise InputError(f"{path}: cannot load the model: {first_line(error)}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise InputError(f"{path}: the checkpoint lacks {len(missing)} weights: {', '.join(missing[:3])}")
    return model if bits < 16 else model.to(device)


def load_config(path: str):
    """The model's config, without dropout: the policy that is scored has to be the one that sampled."""
    check_path(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)  # unset, it asks, and a piped "yes" runs code
    except Exception as error:
        raise InputError(f"{path}: cannot load the model: {first_line(error)}") from error
    for name in vars(config):
        if name.endswith(("dropout", "pdrop", "dropout_prob")):
            setattr(config, name, 0.0)
    return config


def check_positions(path: str, longest: int):
    """Raises InputError if the longest prompt with the longest answer, in tokens, is more than the model has positions."""
    limit = getattr(load_config(path).get_text_config(), "max_position_embeddings", longest)
    if longest > limit > 0:
        advice = "lower --max-new-tokens, --num-contexts or --max-prompt-tokens"
        raise InputError(f"{path}: prompt and answer take up to {longest} tokens, the model {limit}; {advice}")


def check_path(path: str):
    """Raises InputError for a folder that is not there, rather than looking for a mistyped one on the hub for a minute."""
    no_id = path.startswith((".", "/", "~")) or path.count("/") > 1  # the hub's are NAME or OWNER/NAME
    if not Path(path).exists() and (no_id or "/" in path and Path(path).parent.is_dir()):
        raise InputError(f"{path}: no such folder")


def load_tokenizer(path: str):
    check_path(path)
    if not Path(path).exists():  # a tokenizer is loaded first of a model; with the network down, this takes a minute
        print(f"no folder {path} here: looking for it on the hub", file=sys.stderr)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"{path}: cannot load the tokenizer: {first_line(error)}") from error


def adapter_settings(rank: int):
    """LoRA (arXiv 2106.09685) on every linear layer but the head; updates are scaled by alpha / rank = 2."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise InputError("--lora-rank needs the package peft: pip install peft") from error
    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def add_adapter(model, rank: int, seed: int):
    """Freeze the model and put new adapters into it, in float32: they are small, and small updates are not lost in them."""
    settings = adapter_settings(rank)
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    for module in model.modules():  # on some CPUs a first use in eval mode repacks 4-bit weights, which loses the gradient
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model)
    for weight in trainable(model).values():
        weight.data = weight.data.float()
    return model


def switch_adapters(model, on: bool):
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(on)


def trainable(model) -> dict:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def with_adapter(base, adapted, rank: int, merge: bool):
    """`base`, a fresh copy of the unquantized model, with the trained adapters of `adapted` beside or added to its weights."""
    from peft import get_peft_model

    model = get_peft_model(base, adapter_settings(rank))
    model.load_state_dict({f"base_model.model.{name}": weight for name, weight in trainable(adapted).items()}, strict=False)
    return model.merge_and_unload() if merge else model


# --- Folders that are whole or not there ------------------------------------------------------------------------------


def save_model(folder: Path, model, tokenizer, optimizer=None, teacher=None, card: str = "", accelerator=None):
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load; a checkpoint if an optimizer is given.

    A checkpoint holds what a run needs to go on: the trained weights (of LoRA only the adapters), the optimizer's state, and
    the teacher's weights if it moves. All is written beside its place and then renamed, with a list of the files and their
    sizes, which tells a whole checkpoint from a torn one. Where processes split the model, each calls this, with `accelerator`
    and the weights gathered, and writes its part of the optimizer's state; the first one writes all else. Raises InputError
    if it cannot be written, a full disk say.
    """
    beside = folder.with_name(folder.name + ".tmp")
    main = not accelerator or accelerator.is_main_process
    try:
        if main:
            shutil.rmtree(beside, ignore_errors=True)
            if optimizer and len(trainable(model)) < len(list(model.parameters())):
                beside.mkdir(parents=True)
                save_file({name: weight.detach().contiguous() for name, weight in trainable(model).items()}, beside / ADAPTER)
            else:
                model.save_pretrained(beside, state_dict=tensors(model))
                tokenizer.save_pretrained(beside)
            if teacher:
                teacher.save_pretrained(beside / "teacher", state_dict=tensors(teacher))
            if card:
                (beside / "README.md").write_text(card, encoding="utf-8")
        if accelerator:
            accelerator.wait_for_everyone()
        if optimizer:
            torch.save(optimizer.state_dict(), beside / optimizer_file(accelerator))
        if accelerator:
            accelerator.wait_for_everyone()
        if main and optimizer:
            (beside / FILES).write_text(json.dumps(sizes(beside)))
    except Exception as error:  # a full disk comes as OSError, RuntimeError or SafetensorError, by who was writing
        shutil.rmtree(beside, ignore_errors=True)
        raise InputError(f"{folder}: cannot be written: {first_line(error)}") from error
    if main:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(beside, folder)


def optimizer_file(accelerator=None) -> str:
    return f"optimizer-{accelerator.process_index}-of-{accelerator.num_processes}.pt" if accelerator else "optimizer.pt"


ADAPTER, FILES = "adapter.safetensors", "files.json"  # in a checkpoint


def sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def is_whole(checkpoint: Path) -> bool:
    """Is every file there that was written, in its full size?"""
    try:
        expected, found = json.loads((checkpoint / FILES).read_text("utf-8")), sizes(checkpoint)
        return bool(expected) and all(found.get(name) == size for name, size in expected.items())
    except (OSError, ValueError, AttributeError):
        return False


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints of a run, oldest first, whole or not."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted((int(name[1]), path) for name, path in found if name)


def remove_old(folder: Path, options, finished: bool = False):
    """Remove all but the newest `options.save_limit` checkpoints (0: none), and what stops left between them, whole or not."""
    for path in folder.glob("checkpoint-*.tmp"):
        shutil.rmtree(path)
    found, every = checkpoints(folder), options.save_steps
    due = [path for step, path in found if every and step % every == 0]
    kept = due[-options.save_limit :] + ([] if finished else [found[-1][1]])
    for _, path in found:
        if path not in kept:
            shutil.rmtree(path)


def load_checkpoint(checkpoint: Path, model, optimizer, accelerator=None):
    """Put a checkpoint's optimizer state, and of LoRA its adapters, into a fresh model and optimizer; see `save_model`."""
    path = checkpoint / optimizer_file(accelerator)
    paths = [path] if path.exists() else sorted(checkpoint.glob("optimizer*.pt"))  # other processes' parts
    try:
        if (checkpoint / ADAPTER).exists():
            stored, weights = load_file(checkpoint / ADAPTER), trainable(model)
            for name, weight in weights.items():
                weight.data.copy_(stored[name])
        states = [torch.load(one, map_location="cpu", mmap=len(paths) > 1, weights_only=True) for one in paths]
        optimizer.load_state_dict(states[0] if path.exists() else recut(states, optimizer))
    except Exception as error:  # torch's own words would advise to unpickle it
        raise InputError(f"{checkpoint}: is no checkpoint of this run: {type(error).__name__}") from error


def changes(before: dict, now: dict, free) -> str:
    """Which settings are other ones than before, as text, "" if none; those named in `free` may differ."""
    changed = [name for name in now if name not in free and before.get(name) != now[name]]
    return "; ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in changed)


def latest_checkpoint(folder: Path, options, account: dict) -> tuple[int, Path | None]:
    """(step, folder) of the newest whole checkpoint; (0, None) for a run that was stopped before its first one.

    Raises InputError if there is no run in the folder, its settings or data were other ones, or no checkpoint is whole.
    """
    if not (folder / "options.yaml").exists():
        raise InputError(f"{folder}: no run to resume")
    before, now = read_yaml(str(folder / "options.yaml")), dataclasses.asdict(options)
    if (folder / "data.json").exists():
        now |= {"rows": account["train"]["hash"]}
        try:
            before |= {"rows": json.loads((folder / "data.json").read_text("utf-8"))["train"]["hash"]}
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{folder / 'data.json'}: is not what a run wrote: {type(error).__name__}") from error
    if changed := changes(before, now, FREE):
        raise InputError(f"{folder}: cannot be resumed with other settings: {changed}")
    found = checkpoints(folder)
    whole = [(step, path) for step, path in found if is_whole(path)]
    if found and not whole:
        raise InputError(f"{folder}: none of its {len(found)} checkpoints is whole; start again in another --output-dir")
    for path in [path for one, path in found if (one, path) not in whole] + sorted(folder.glob("checkpoint-*.tmp")):
        print(f"{path} is not whole and is passed over", file=sys.stderr)
    return max(whole, default=(0, None))


def read_metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, [] if there is none; a last line cut short by a kill does not count."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def model_card(options, account: dict, metrics: list[dict]) -> str:
    """README.md of the trained model: method, data, settings, measured numbers; nothing of the machine or its user."""
    base = Path(options.model).name if os.path.exists(options.model) else options.model
    train = account["train"]
    head = f"""---
base_model: {base}
library_name: transformers
tags: [grasp, personalization]
---

# {base}, trained by GRASP

Rubric-aware on-policy self-distillation (arXiv 2609.35262). The model answered questions knowing the users' past posts;
its frozen initial weights, shown what each user expects of the answer as well, scored the answers token by token; the
model moved towards them. It is used without a rubric: the user's posts and the question are its prompt.

Data: {Path(train["dataset"]).name}, split {train["split"]}, {train["used"]} of {train["rows"]} rows.

"""
    held_out = [line for line in metrics if "eval_reverse_kl" in line]
    if held_out:
        head += "On held-out rows (nats a token, tokens, share of answers that recite the rubric):\n\n"
        head += "| step | reverse KL to the teacher | length | leaks |\n| --- | --- | --- | --- |\n"
        for line in held_out:
            kl, length, leaks = line["eval_reverse_kl"], line["eval_length"], line["eval_leaks"]
            head += f"| {line['step']} | {kl:.4f} | {length:.0f} | {leaks:.3f} |\n"
    else:
        head += (
            f"Divergence in the last training step: {metrics[-1]['loss']:.4f} nats a token. No held-out rows were measured.\n"
        )
    paths = ("model", "dataset", "eval_dataset", "output_dir", "prompts", "rank_profile_with", "resume", "log_with")
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name not in paths}
    return f"{head}\nSettings:\n\n```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```\n"


def describe_model(model) -> str:
    trained = sum(weight.numel() for weight in trainable(model).values())
    return f"{model.config.model_type} with {trained / 1e6:.1f} M weights to train, in {model.dtype}"


def return_memory(device):
    """Give back what is free: glibc keeps freed pieces between others, and a long run on the CPU would slowly grow."""
    if device.type == "cpu" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def peak_memory_gb(device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB

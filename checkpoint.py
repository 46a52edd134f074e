"""Models from and to disk: loading, checkpoints that are whole or not there, and what a run leaves beside them."""

import dataclasses
import json
import os
import re
import resource
import shutil
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from command_line import InputError, first_line, read_yaml

# options that may differ when a run is resumed: they change where, how fast and how often, not what comes out
FREE = {"resume", "save_steps", "log_with", "output_dir", "generation_batch_size", "micro_batch_size", "gradient_checkpointing"}


def load_model(path: str, dtype: str, **settings):
    """The causal language model at a local folder or hub id, every weight found in safetensors, no dropout.

    `settings` go to from_pretrained. Raises InputError for what cannot be loaded or lacks weights.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        for name in vars(config):
            if name.endswith(("dropout", "pdrop", "dropout_prob")):  # the policy that is scored is the one that sampled
                setattr(config, name, 0.0)
        # sdpa has no soft-capping of attention logits (Gemma-2), and leaves it out without a word
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        settings |= dict(config=config, dtype=dtype, attn_implementation=attention, use_safetensors=True)
        model, info = AutoModelForCausalLM.from_pretrained(path, **settings, output_loading_info=True)
    except Exception as error:
        raise InputError(f"{path}: cannot load the model: {first_line(error)}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise InputError(f"{path}: the checkpoint lacks {len(missing)} weights: {', '.join(missing[:3])}")
    return model


def check_positions(model, longest: int):
    """Raises InputError if the longest prompt with the longest answer, in tokens, is more than the model has positions."""
    limit = getattr(model.config, "max_position_embeddings", longest)
    if longest > limit:
        raise InputError(f"prompt and answer take up to {longest} tokens, the model {limit}; lower --max-prompt-tokens")


def load_tokenizer(path: str):
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise InputError(f"{path}: cannot load the tokenizer: {first_line(error)}") from error


def save_model(folder: Path, model, tokenizer, optimizer=None, card: str = ""):
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load, with the optimizer's state if there is one.

    It is written beside its place and then renamed. Raises InputError if it cannot be written, a full disk say.
    """
    beside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        if optimizer:
            torch.save(optimizer.state_dict(), beside / "optimizer.pt")
        if card:
            (beside / "README.md").write_text(card, encoding="utf-8")
    except Exception as error:  # a full disk comes as OSError, RuntimeError or SafetensorError, by who was writing
        shutil.rmtree(beside, ignore_errors=True)
        raise InputError(f"{folder}: cannot be written: {first_line(error)}") from error
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def changes(before: dict, now: dict, free) -> str:
    """Which settings are other ones than before, as text, "" if none; those named in `free` may differ."""
    changed = [name for name in now if name not in free and before.get(name) != now[name]]
    return "; ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in changed)


def latest_checkpoint(folder: Path, options) -> tuple[int, Path | None]:
    """(step, folder) of the newest checkpoint; (0, None) for a run that was stopped before its first one.

    Raises InputError if there is no run in the folder or its settings were other ones.
    """
    if not (folder / "options.yaml").exists():
        raise InputError(f"{folder}: no run to resume")
    names = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    found = [(int(name[1]), path) for name, path in names if name]
    before, now = read_yaml(str(folder / "options.yaml")), dataclasses.asdict(options)
    if changed := changes(before, now, FREE):
        raise InputError(f"{folder}: cannot be resumed with other settings: {changed}")
    return max(found, default=(0, None))


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
    return f"{model.config.model_type} of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M weights in {model.dtype}"


def peak_memory_gb(device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB

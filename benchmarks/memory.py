"""Predicted against measured memory: one step of grasp.py at each of these sizes and settings, with random weights.

    python benchmarks/memory.py                   # small models on the CPU, real sizes on CUDA; then real ones by prediction
    python benchmarks/memory.py --only live llama # these settings
    python benchmarks/memory.py --only real       # real ones by prediction

Every setting runs in a process of its own. On the CPU, measured is the highest resident memory from the first rollout on less
that before the models were loaded; malloc is told to return memory at once (MALLOC_MMAP_THRESHOLD_), else what it keeps would
count. On CUDA it is the allocator's own peak. The tables go to benchmarks/README.md as printed.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grasp  # noqa: E402
import memory  # noqa: E402


def decoder(kind, vocabulary, hidden, intermediate, layers, heads, kv_heads, tied):
    sizes = dict(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers)
    more = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32768)
    return kind(**sizes, **more, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=0, pad_token_id=0)


MODELS = {
    "qwen2 of 93 M": lambda: decoder(Qwen2Config, 32_000, 768, 2048, 12, 12, 4, True),
    "qwen2 of 120 M, large vocabulary": lambda: decoder(Qwen2Config, 151_936, 640, 1792, 6, 10, 2, True),
    "llama of 246 M": lambda: decoder(LlamaConfig, 32_000, 1024, 2816, 16, 16, 4, False),
    "Qwen2.5-1.5B": lambda: decoder(Qwen2Config, 151_936, 1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": lambda: decoder(Qwen2Config, 151_936, 2048, 11_008, 36, 16, 2, True),
    "Qwen2.5-7B": lambda: decoder(Qwen2Config, 152_064, 3584, 18_944, 28, 28, 4, False),
}
SMALL, VOCABULARY, LLAMA, B15, B3, B7 = MODELS
ROWS = 4  # two micro-batches of two rows in the small settings
SHORT, LONG = (360, 420, 32), (6144, 6144, 512)  # tokens of the student's and the teacher's prompt, new tokens
LEAN = dict(micro_batch_tokens=1, generation_batch_size=1)  # a row at a time

# name: model, lengths, what differs from the default options
ON_CPU = {
    "default": (SMALL, SHORT, {}),
    "no checkpointing": (SMALL, SHORT, dict(gradient_checkpointing=False)),
    "a row at a time": (SMALL, SHORT, LEAN),
    "live": (SMALL, SHORT, dict(teacher="live", optimizer="adamw")),
    "float32": (SMALL, SHORT, dict(dtype="float32", optimizer="adamw")),
    "vocabulary": (VOCABULARY, SHORT, {}),
    "llama": (LLAMA, SHORT, {}),
    "teacher in 4 bit": (LLAMA, SHORT, dict(teacher_bits=4)),
    "teacher in 8 bit": (LLAMA, SHORT, dict(teacher_bits=8)),
    "LoRA": (LLAMA, SHORT, dict(lora_rank=16)),
    "LoRA on 8 bit": (LLAMA, SHORT, dict(lora_rank=16, base_bits=8)),
    "rollouts": (SMALL, (600, 640, 16), LEAN | dict(lora_rank=8, batch_size=12, generation_batch_size=12)),
}
REAL = {  # and the card's memory in GB
    "1.5B": (B15, LONG, LEAN, 16),
    "3B, teacher in 4 bit": (B3, LONG, LEAN | dict(teacher_bits=4), 24),
    "7B, LoRA on 4 bit": (B7, LONG, LEAN | dict(lora_rank=16, base_bits=4), 16),
}
ROOM = 0.95  # of a card: it reports a little less than its name says, and the allocator leaves gaps


def options_of(lengths, changes, folder=""):
    _, longest_teacher, new = lengths
    defaults = dict(batch_size=ROWS, micro_batch_tokens=2 * (longest_teacher + new), max_new_tokens=new)
    return grasp.GraspOptions(model=folder, **{**defaults, **changes})


def resident(name: str) -> int:
    """VmRSS, the memory the process holds, or VmHWM, the most it held, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(lengths, changes, folder: str, device: str) -> int:
    """Peak of one step in bytes: rollouts, scoring, update, by the functions that `grasp.py` calls in its loop."""
    import bitsandbytes  # noqa: F401  # loaded before, so that libraries do not count

    if "lora_rank" in changes:
        import peft  # noqa: F401
    options, before = options_of(lengths, changes, folder), resident("VmRSS")
    student = grasp.load_student(options, None, device)
    teacher = grasp.load_teacher(options, student, None, device)
    if options.gradient_checkpointing:
        student.activation_checkpointing_enable({"use_reentrant": False})
    optimizer, slices = grasp.build_optimizer(student, options)
    for weight in grasp.trainable(student).values():  # an update by nothing makes the optimizer's state, as after a first step
        weight.grad = torch.zeros_like(weight)
    grasp.update(optimizer, slices, 0.0, 0)
    draw = torch.Generator().manual_seed(0)
    rows = range(options.batch_size)  # of lengths that differ by a little, so that there is padding
    prompts = [torch.randint(100, 1000, (n - i,), generator=draw).tolist() for n in lengths[:2] for i in rows]
    examples = [{"student": a, "teacher": b} for a, b in zip(prompts, prompts[len(rows) :])]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    batch = [example["student"] for example in examples], [-1], options.max_new_tokens, list(rows)
    completions = grasp.sample_completions(student, *batch, batch_size=options.generation_batch_size)
    grasp.score(student, teacher, examples, completions, sum(map(len, completions)), options)
    grasp.clip_gradients(grasp.trainable(student).values(), options.max_grad_norm)
    grasp.update(optimizer, slices, 1e-5, 1)
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM") - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", help="names of settings, or real", default=[])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # the measured process itself: what, model folder
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {name: entry[:3] for name, entry in (REAL if device == "cuda" else ON_CPU).items()}
    if args.measure:
        name, folder = args.measure
        return print(json.dumps(measure(*settings[name][1:], folder, device)))

    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name() if device == "cuda" else machine
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "bitsandbytes")]
    print(f"One step ({machine}; {', '.join(versions)}; {datetime.date.today()}):\n")
    print("| setting | model | peak is in | predicted, GB | measured, GB | predicted / measured |\n|" + " --- |" * 6)
    for name, (model, lengths, changes) in settings.items():
        if args.only and name not in args.only:
            continue
        parts = memory.predict(MODELS[model](), options_of(lengths, changes), *lengths[:2], device) | {"CUDA context": 0}
        predicted, phase = memory.peak(parts)
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            dtype = getattr(torch, changes.get("dtype", "bfloat16"))
            with torch.device(device):
                AutoModelForCausalLM.from_config(MODELS[model](), dtype=dtype).save_pretrained(folder)
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
            command = [sys.executable, "-W", "ignore", __file__, "--measure", name, folder]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        sizes = f"{predicted / 2**30:.3f} | {measured / 2**30:.3f} | {predicted / measured:.2f}"
        print(f"| {name} | {model} | {phase} | {sizes} |", flush=True)

    if args.only and "real" not in args.only:
        return
    student, teacher, new = LONG
    print(
        f"\nPredicted for CUDA: prompts of {teacher} and {new} new tokens, scored a row at a time, and of 8, 4, 2 or 1 rollouts"
    )
    print(f"side by side the most that fit {ROOM:.0%} of the card.\n")
    print("| model | card, GB | peak, GB | peak is in | flags |\n| --- | --- | --- | --- | --- |")
    for model, lengths, changes, card in REAL.values():
        for side_by_side in (8, 4, 2, 1):
            settings = {"batch_size": 32, **changes, "generation_batch_size": side_by_side}
            options = options_of(lengths, settings)
            size, phase = memory.peak(memory.predict(MODELS[model](), options, student, teacher, "cuda"))
            if size <= ROOM * card * 2**30:
                break
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items() if name != "batch_size")
        print(f"| {model} | {card} | {size / 2**30:.2f} | {phase} | `{flags}` |", flush=True)


if __name__ == "__main__":
    main()

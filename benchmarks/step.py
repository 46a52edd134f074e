"""One optimizer step of grasp.py beside one of TRL's SDFTTrainer: seconds for the rollout and for the rest, and peak memory.

    pip install -r benchmarks/requirements.txt
    python benchmarks/step.py                        # the demo's model and rows; python demo/model.py fetches the model
    python benchmarks/step.py --model Qwen/Qwen2.5-0.5B-Instruct --new-tokens 256
    python benchmarks/step.py --random qwen2.5-1.5b  # random weights of that size, nothing fetched: for a GPU

Both sides take the same weights, dtype, rows in the same order, prompts (token by token: that is checked), number of new
tokens (nothing ends earlier) and torch's fused AdamW; TRL with full logits and reverse KL, and else as it comes. A second row
of TRL cuts the batch into the micro-batches that grasp.py has; a second row of grasp.py has 8-bit optimizer state. The rows
"as it comes" have each side's own precision, optimizer, micro-batches and checkpointing, which are not the same: TRL keeps
float32 weights and computes in bfloat16, grasp.py keeps bfloat16 weights and rounds them stochastically.

What is timed is `grasp.train` and `SDFTTrainer.train` themselves. Each side is a process that does steps when it is told. They
take turns of two, of which the second counts (memory that the system took back while a side waited may be slow to get anew: in
training nothing waits); the seconds are medians. Peak memory is the process's own: resident on a CPU, the allocator's on
CUDA. Ratios are to the better of TRL's rows, column by column; of rows as they come, to TRL's as it comes.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grasp  # noqa: E402
from lamp_qa import load_examples, load_templates, student_messages  # noqa: E402

CUDA = torch.cuda.is_available()
MARK = "step took: "  # what a side's process writes for us begins so; its libraries write other things
LLAMA = dict(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9)
QWEN = dict(vocab_size=151_936, num_key_value_heads=2)
SIZES = {  # of models people train; `tiny` is for trying the script itself
    "tiny": dict(
        vocab_size=600,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "smollm2-135m": dict(**LLAMA, num_key_value_heads=3),
    "qwen2.5-0.5b": dict(**QWEN, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "qwen2.5-1.5b": dict(**QWEN, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "qwen2.5-3b": dict(**QWEN, hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36, num_attention_heads=16),
}
PEAK_TFLOPS = {  # dense bfloat16 matrix products, from the makers' data sheets; the first name that fits counts
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10": 125,
    "RTX 6000 Ada": 364,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
AS_IT_COMES = "as it comes"
SIDES = {
    "grasp.py": "adamw",
    "grasp.py, 8-bit AdamW": "adamw_8bit",
    "grasp.py as it comes": AS_IT_COMES,
    "TRL": "whole batch",
    "TRL, micro-batches": "micro-batches",
    "TRL as it comes": AS_IT_COMES,
}


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


def random_model(size: str, folder: Path):
    """Write a Qwen2 chat model of one of the SIZES with random weights, and a tokenizer made from the demo's rows."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=min(8000, SIZES[size]["vocab_size"]), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train([str(ROOT / "demo" / "data" / "train.jsonl")], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = dict(bos_token_id=None, eos_token_id=2, pad_token_id=0)
    config = Qwen2Config(**SIZES[size], **ids, tie_word_embeddings=True, max_position_embeddings=32_768, dtype=torch.bfloat16)
    with torch.device("cuda" if CUDA else "cpu"):
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def grasp_options(args, **settings) -> grasp.GraspOptions:
    return grasp.GraspOptions(
        model=args.model,
        dataset=str(ROOT / "demo" / "data"),
        answer_format="text",
        batch_size=args.batch_size,
        generation_batch_size=args.batch_size,
        max_new_tokens=args.new_tokens,
        max_steps=2 * args.rounds + 1,  # two in a turn; the last one is never started
        learning_rate=1e-6,
        save_steps=0,
        **settings,
    )


def batches(args) -> tuple[list[dict], list[list[dict]]]:
    """(all examples, the batch of each step), as `grasp.train` takes them."""
    options = grasp_options(args)
    tokenizer = grasp.load_tokenizer(args.model)
    examples, _ = load_examples(options, options.dataset, "train", tokenizer, load_templates(options.prompts))
    rows = [grasp.batch_at(step, args.batch_size, len(examples), options.seed) for step in range(options.max_steps)]
    return examples, [[examples[i] for i in batch] for batch in rows]


def micro_batch_tokens(examples, rows: int, new_tokens: int) -> int:
    """The budget within which this many of the longest rows go through together."""
    return rows * (max(len(example[kind]) for example in examples for kind in ("student", "teacher")) + new_tokens)


# --- A side's process -------------------------------------------------------------------------------------------------


def turns(new_tokens: int):
    """What a side's process needs: start() waits for the word and starts the clock, rollout(f) is f with its time kept apart
    and its completions' lengths checked, stop() writes [rollout seconds, other seconds, peak GB]."""
    clock = {"rollout": 0.0}

    def now():
        if CUDA:
            torch.cuda.synchronize()
        return time.perf_counter()

    def start():
        if not sys.stdin.readline():  # nobody wants another step
            sys.stdout.flush()
            os._exit(0)  # without what the libraries do at the end of a run
        clock.update(began=now(), rollout=0.0)

    def rollout(function):
        def timed(*args, **settings):
            began = now()
            found = function(*args, **settings)
            clock["rollout"] += now() - began
            completions = found[1] if isinstance(found, tuple) else found
            if {len(completion) for completion in completions} != {new_tokens}:
                raise RuntimeError(f"expected completions of {new_tokens} tokens, found {[len(c) for c in completions]}")
            return found

        return timed

    def stop():
        total = now() - clock["began"]
        peak = grasp.peak_memory_gb(torch.device("cuda" if CUDA else "cpu"))
        print(MARK + json.dumps([clock["rollout"], total - clock["rollout"], peak]), flush=True)

    return start, rollout, stop


def grasp_side(args, optimizer: str, folder: str):
    """Run `grasp.train`, a step at a time: whatever its loop does in a step counts."""
    budget = micro_batch_tokens(batches(args)[0], args.micro_batch, args.new_tokens)
    same = {"dtype": args.dtype, "gradient_checkpointing": args.gradient_checkpointing}
    same |= {"optimizer": optimizer, "micro_batch_tokens": budget}
    options = grasp_options(args, output_dir=folder, **({} if optimizer == AS_IT_COMES else same))
    start, rollout, stop = turns(args.new_tokens)
    next_batch = grasp.batch_at

    def between_steps(step, *where):
        if step:
            stop()
        start()
        return next_batch(step, *where)

    grasp.batch_at = between_steps  # the first call of each step
    grasp.sample_completions = rollout(grasp.sample_completions)
    grasp.stop_ids = lambda *_: [-1]  # no token ends an answer
    grasp.train(options)


def trl_side(args, micro_batches: str, folder: str):
    """Run `SDFTTrainer.train` likewise."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    start, rollout, stop = turns(args.new_tokens)

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            start()

        def on_step_end(self, *_, **__):
            stop()

    examples, steps = batches(args)
    templates = load_templates()
    micro = args.micro_batch if micro_batches == "micro-batches" else args.batch_size
    options = grasp_options(args)
    same = {"model_init_kwargs": {"dtype": args.dtype}, "bf16": args.dtype == "bfloat16", "optim": "adamw_torch_fused"}
    same |= {"gradient_checkpointing": args.gradient_checkpointing}
    config = SDFTConfig(
        output_dir=folder,
        **({} if micro_batches == AS_IT_COMES else same),
        distillation_mode="full_logits",
        distillation_alpha=1.0,  # reverse KL
        teacher_prompt_template="{prompt}{privileged_context}",
        num_generations=1,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=args.batch_size // micro,
        max_prompt_length=None,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        shuffle_dataset=False,
        max_steps=options.max_steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=CUDA,
        use_cpu=not CUDA,
    )
    rows = [
        {"prompt": student_messages(e["row"], templates, "text"), "privileged_context": e["privileged"]}
        for batch in steps
        for e in batch
    ]
    tokenizer = grasp.load_tokenizer(args.model)
    tokenizer.padding_side = "left"
    trainer = SDFTTrainer(
        model=args.model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Turns()]
    )
    ours = {tuple(example[kind]) for example in examples for kind in ("student", "teacher")}
    encode = trainer._tokenize_prompts

    def same_prompts(prompts):
        found = encode(prompts)
        if not all(tuple(ids) in ours for ids in found):
            raise RuntimeError("TRL's prompts are not those of grasp.py")
        return found

    trainer._tokenize_prompts = same_prompts
    trainer._generate = rollout(trainer._generate)
    trainer.train()


# --- The parent -------------------------------------------------------------------------------------------------------


def training_flops(config, steps, new_tokens: int) -> float:
    """Floating-point operations of a step's training part, the mean over `steps`: matrix products and causal attention of the
    teacher's forward pass and of the student's forward and backward (twice the forward); nothing that is computed again."""
    width, kv = config.hidden_size, config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    layer = 2 * width * width + 2 * width * kv + 3 * width * config.intermediate_size  # weights in products
    total = 0
    for kind, passes in (("teacher", 1), ("student", 3)):
        for example in (example for batch in steps for example in batch):
            length = len(example[kind]) + new_tokens - 1
            total += passes * config.num_hidden_layers * (2 * layer * length + 2 * width * length**2)
            total += passes * 2 * width * config.vocab_size * new_tokens
    return total / len(steps)


def take_turns(args, sides) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Per side, one [rollout seconds, other seconds, peak GB] a round; and why a side failed, out of memory say."""
    running, found, failed = {}, {side: [] for side in sides}, {}
    with tempfile.TemporaryDirectory() as folder:
        for side in sides:
            command = [sys.executable, __file__, *args.argv, "--side", side]
            with open(Path(folder) / side, "w") as log:
                running[side] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace"
                )
        try:
            for _ in range(args.rounds):
                for side in [side for side in sides if side not in failed]:
                    with contextlib.suppress(BrokenPipeError):  # it is dead; its output ends without a figure
                        running[side].stdin.write("\n\n")
                        running[side].stdin.flush()
                    told = (line for line in iter(running[side].stdout.readline, "") if line.startswith(MARK))
                    lines = list(itertools.islice(told, 2))  # of two steps, the first of which does not count
                    if len(lines) < 2:
                        lines = (Path(folder) / side).read_text(errors="replace").strip().splitlines()
                        failed[side] = lines[-1] if lines else "no reason given"
                        del found[side]
                    else:
                        found[side].append(json.loads(lines[1][len(MARK) :]))
        finally:
            for process in running.values():
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                process.wait()
    return found, failed


def table(found: dict, tokens: int, flops: float, peak_tflops: float) -> str:
    """The Markdown table for what `take_turns` found."""
    lines = ["| | rollout, s | rest, s | step, s | peak memory, GB | time, of TRL | memory, of TRL | tokens/s |"]
    figures = {}
    for side, rounds in found.items():
        rollout, rest = (statistics.median(one[i] for one in rounds) for i in (0, 1))
        step = statistics.median(one[0] + one[1] for one in rounds)
        figures[side] = rollout, rest, step, max(one[2] for one in rounds)
    for side, (rollout, rest, step, gb) in figures.items():
        of_trl = (other for other in figures if other.startswith("TRL"))
        like = [figures[other] for other in of_trl if (AS_IT_COMES in other) == (AS_IT_COMES in side)]
        ratios = [f"{figure / min(one[i] for one in like):.2f}" if like else "" for i, figure in ((2, step), (3, gb))]
        cells = [side, f"{rollout:.2f}", f"{rest:.2f}", f"{step:.2f}", f"{gb:.2f}", *ratios, f"{tokens / step:.0f}"]
        cells += [f"{flops / rest / peak_tflops / 1e12:.3f}"] if peak_tflops else []
        lines.append(f"| {' | '.join(cells)} |")
    lines[0] += " share of peak in the rest |" if peak_tflops else ""
    lines.insert(1, "| --- " * (lines[0].count("|") - 1) + "|")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "demo" / "model"))
    parser.add_argument("--random", choices=SIZES, help="random weights of this size instead of a model")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4, help="rows per forward and backward pass")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--peak-tflops", type=float, help="of the machine, for its share; known for some cards")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # a side's process
    args = parser.parse_args()
    args.argv = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if args.side:
            return (trl_side if args.side.startswith("TRL") else grasp_side)(args, SIDES[args.side], folder)
        name = args.random or Path(args.model).name
        if args.random:
            random_model(args.random, Path(folder))
            args.model = folder
            args.argv += ["--model", folder]
        sides = [side for side in args.sides if has_trl() or not side.startswith("TRL")]
        config = AutoConfig.from_pretrained(args.model)
        examples, steps = batches(args)
        found, failed = take_turns(args, sides)
    device = torch.cuda.get_device_name() if CUDA else f"{platform.machine()}, {torch.get_num_threads()} threads"
    peak = args.peak_tflops or (next((t for name, t in PEAK_TFLOPS.items() if name in device), 0) if CUDA else 0)
    counted = steps[1::2]
    lengths = {kind: [len(e[kind]) for batch in counted for e in batch] for kind in ("student", "teacher")}
    spans = [f"{kind}'s prompts of {min(found)} to {max(found)} tokens" for kind, found in lengths.items()]
    print(f"{name}, {args.dtype}, {args.batch_size} prompts a step, {args.new_tokens} new tokens each; {', '.join(spans)}")
    print(f"micro-batches of {args.micro_batch}, gradient checkpointing {'on' if args.gradient_checkpointing else 'off'}")
    names = ("torch", "transformers", "trl", "bitsandbytes")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names if importlib.util.find_spec(name)]
    print(f"{device}; {', '.join(versions)}; median of {args.rounds} rounds, {datetime.date.today()}\n")
    print(table(found, args.batch_size * args.new_tokens, training_flops(config, counted, args.new_tokens), peak))
    if len(sides) < len(args.sides):
        print("\nTRL is not installed: its rows are left out")
    for side, reason in failed.items():
        print(f"\n{side}: not measured, {reason}")
    sys.exit(not found)


if __name__ == "__main__":
    main()

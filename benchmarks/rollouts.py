"""Rollouts side by side against one by one: the same 32 prompts of unequal length, the same sampler.

    python benchmarks/rollouts.py                    # with the demo's model; python demo/model.py fetches it
    python benchmarks/rollouts.py --model Qwen/Qwen2.5-0.5B-Instruct --new-tokens 64

Prints seconds for both and, in float32, in how many rows greedy decoding gives the same ids both ways. Where a row differs
it prints how far apart the two candidates' logits were: float addition in another order decides near-ties either way.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grasp import completion_hidden, head_logits, load_model, load_tokenizer, sample_completions  # noqa: E402
from lamp_qa import encode_chat, load_rows, load_templates, stop_ids, student_messages  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "demo" / "model"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    rows = load_rows(str(ROOT / "demo" / "data"), "train")[: args.prompts]
    prompts = [encode_chat(tokenizer, student_messages(r, load_templates(), "text", i % 7)) for i, r in enumerate(rows)]
    lengths = [len(prompt) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {args.new_tokens} new tokens each")
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {datetime.date.today()}\n")
    print("| dtype | one by one, s | together, s | times as fast | rows with the same greedy ids |")
    print("| --- | --- | --- | --- | --- |")
    for dtype in ("bfloat16", "float32"):
        model = load_model(args.model, dtype).eval()
        stop = stop_ids(model, tokenizer)
        seconds = {1: [], len(prompts): []}
        for _ in range(args.rounds):
            for size, runs in seconds.items():  # in turns
                began = time.perf_counter()
                # no stop id but one that is never sampled, so that both ways make the same number of tokens
                sample_completions(model, prompts, [-1], args.new_tokens, range(len(prompts)), batch_size=size)
                runs.append(time.perf_counter() - began)
        alone, together = (statistics.median(runs) for runs in seconds.values())
        greedy = [
            sample_completions(model, prompts, stop, args.new_tokens, range(len(prompts)), 0, batch_size=size)
            for size in seconds
        ]
        same = sum(a == b for a, b in zip(*greedy))
        print(f"| {dtype} | {alone:.2f} | {together:.2f} | {alone / together:.1f} | {same} of {len(prompts)} |")
        if dtype == "float32":
            for prompt, a, b in zip(prompts, *greedy):
                if a != b:
                    at = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
                    with torch.no_grad():
                        logits = head_logits(model, completion_hidden(model, [prompt], [a[: at + 1]]))[-1]
                    print(f"\nids differ at token {at}, whose logits differ by {abs(logits[a[at]] - logits[b[at]]).item():.2g}")


if __name__ == "__main__":
    main()

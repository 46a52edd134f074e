"""The chunked loss against the plain form: seconds and memory of forward and backward, at a real vocabulary's size.

    python benchmarks/loss.py                        # 2,048 tokens x 151,936, hidden 896, float32: about 14 GB of memory
    python benchmarks/loss.py --tokens 512 --vocabulary 49152 --hidden 576

Both forms take hidden states of student and teacher through a linear head and leave gradients in the student's head and
hidden states. Each runs in a process of its own, which reports how far its memory rose above what it held before; the two
take turns, and the figures are medians. The table goes to benchmarks/README.md as printed.
"""

import argparse
import datetime
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def resident_gb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**30


class Peak(threading.Thread):
    """Watches resident memory a thousand times a second; `.gb` is how far it rose."""

    def run(self):
        self.before = self.top = resident_gb()
        self.watching = True
        while self.watching:
            self.top = max(self.top, resident_gb())
            time.sleep(0.001)

    def stop(self) -> float:
        self.watching = False
        self.join()
        return self.top - self.before


def plain(student, hidden, teacher, teacher_hidden, options):
    """What one writes first: both logit matrices, log-softmax of each, the sum; autograd does the rest."""
    log_p = student.lm_head(hidden).float().log_softmax(-1)
    with torch.no_grad():
        log_q = teacher.lm_head(teacher_hidden).float().log_softmax(-1)
    (log_p.exp() * (log_p - log_q)).sum(-1).mean().backward()


def chunked(student, hidden, teacher, teacher_hidden, options):
    from grasp import divergence_backward

    divergence_backward(student, hidden, teacher, teacher_hidden, len(hidden), options)


def measure(form, tokens, vocabulary, width):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grasp import GraspOptions

    torch.manual_seed(0)
    sizes = dict(hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    config = Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=True, **sizes)
    student, teacher = Qwen2ForCausalLM(config), Qwen2ForCausalLM(config).requires_grad_(False)
    student.lm_head.weight.grad = torch.zeros_like(student.lm_head.weight)  # both forms find one, as in every later micro-batch
    hidden = torch.randn(tokens, width).requires_grad_()
    teacher_hidden = torch.randn(tokens, width)
    student.lm_head.weight.grad.normal_()  # touched, so that it counts as memory held before
    peak = Peak()
    peak.start()
    time.sleep(0.05)
    began = time.perf_counter()
    {"plain": plain, "chunked": chunked}[form](student, hidden * 1.0, teacher, teacher_hidden, GraspOptions())
    print(time.perf_counter() - began, peak.stop())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", choices=("plain", "chunked"), help=argparse.SUPPRESS)  # the measured process itself
    args = parser.parse_args()
    if args.form:
        return measure(args.form, args.tokens, args.vocabulary, args.hidden)
    found = {"plain": [], "chunked": []}
    for _ in range(args.rounds):
        for form, runs in found.items():
            command = [sys.executable, __file__, "--form", form]
            for name in ("tokens", "vocabulary", "hidden"):
                command += [f"--{name}", str(getattr(args, name))]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs.append([float(number) for number in out.split()[-2:]])
    medians = {form: [statistics.median(run[i] for run in runs) for i in (0, 1)] for form, runs in found.items()}
    print(f"{args.tokens} tokens x {args.vocabulary}, hidden {args.hidden}, float32; median of {args.rounds} runs, in turns")
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {datetime.date.today()}\n")
    print("| form | seconds | extra memory, GB | time, of plain | memory, of plain |\n| --- | --- | --- | --- | --- |")
    for form, (seconds, gb) in medians.items():
        ratios = f"{seconds / medians['plain'][0]:.2f} | {gb / medians['plain'][1]:.3f}"
        print(f"| {form} | {seconds:.2f} | {gb:.3f} | {ratios} |")


if __name__ == "__main__":
    main()

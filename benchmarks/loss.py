"""The chunked loss against what people would use instead: seconds and memory of forward and backward, at a real vocabulary.

    python benchmarks/loss.py                        # 2,048 tokens x 151,936, hidden 896, float32: about 14 GB of memory
    python benchmarks/loss.py --tokens 512 --vocabulary 49152 --hidden 576
    python benchmarks/loss.py --dtype bfloat16       # on a CUDA device, if there is one

The forms are: plain, both logit matrices and autograd; grasp.py's divergence_backward; TRL's chunked divergence, which its
DistillationTrainer uses; Liger's two, one of torch operations in chunks and one of Triton kernels (CUDA only). All take hidden
states of student and teacher through linear heads and leave the reverse KL's gradient in the student's head and hidden states.
Each runs in a process of its own, which reports how far its memory rose above what it held before; they take turns, and the
figures are medians. What is not installed or does not run here gets a line that says so.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
CUDA = torch.cuda.is_available()


def resident_gb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**30


class Peak(threading.Thread):
    """Watches resident memory a thousand times a second; `stop` says how far it rose, in GB."""

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


# Each form takes student, hidden (N, H), teacher, teacher_hidden (N, H) and adds the gradient of the mean over the N tokens.


def plain(student, hidden, teacher, teacher_hidden):
    """What one writes first: both logit matrices, log-softmax of each, the sum; autograd does the rest."""
    log_p = student.lm_head(hidden).float().log_softmax(-1)
    with torch.no_grad():
        log_q = teacher.lm_head(teacher_hidden).float().log_softmax(-1)
    (log_p.exp() * (log_p - log_q)).sum(-1).mean().backward()


def grasp(student, hidden, teacher, teacher_hidden):
    from grasp import GraspOptions, divergence_backward

    divergence_backward(student, hidden, teacher, teacher_hidden, len(hidden), GraspOptions())


def trl(student, hidden, teacher, teacher_hidden):
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    heads, mask = (student.lm_head.weight, teacher.lm_head.weight), torch.ones(1, len(hidden), device=hidden.device)
    _chunked_divergence_loss(hidden[None], teacher_hidden[None], *heads, mask, beta=1.0)[0].backward()


def liger_chunks(student, hidden, teacher, teacher_hidden):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=hidden.is_cuda)
    labels = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)  # of the hard loss, which has no weight
    loss(hidden, student.lm_head.weight, teacher_hidden, teacher.lm_head.weight, labels).backward()


def liger_kernels(student, hidden, teacher, teacher_hidden):
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    LigerFusedLinearJSD(jsd_beta=1.0)(hidden, student.lm_head.weight, teacher_hidden, teacher.lm_head.weight, None).backward()


FORMS = {
    "plain": plain,
    "grasp.py": grasp,
    "TRL chunked": trl,
    "Liger, chunks": liger_chunks,
    "Liger, kernels": liger_kernels,
}


def cannot_run(form: str) -> str:
    """Why a form cannot run here, "" if it can."""
    needed = {"TRL": ["trl"], "Liger": ["liger_kernel", "triton"]}.get(form.split()[0].strip(","), [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return "its kernels need CUDA" if form == "Liger, kernels" and not CUDA else ""


def two_heads(vocabulary: int, width: int, dtype=torch.float32):
    """(student, teacher): models of almost nothing but a head of vocabulary x width; the student's has a gradient already, as
    in every micro-batch but the first."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    config = Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=True, **sizes)
    student, teacher = (Qwen2ForCausalLM(config).to(dtype).to("cuda" if CUDA else "cpu") for _ in range(2))
    student.lm_head.weight.grad = torch.zeros_like(student.lm_head.weight).normal_()  # touched, so that it is held before
    return student, teacher.requires_grad_(False)


def measure(form: str, tokens: int, vocabulary: int, width: int, dtype) -> tuple[float, float]:
    """(seconds, extra GB) of one forward and backward pass; on CUDA of the second, since the first compiles kernels."""
    student, teacher = two_heads(vocabulary, width, dtype)
    hidden, teacher_hidden = torch.randn(2, tokens, width, dtype=dtype, device=student.device).unbind()
    hidden.requires_grad_()
    if not CUDA:
        FORMS[form](student, hidden[:2] * 1.0, teacher, teacher_hidden[:2])  # else what it imports would count
        peak = Peak()
        peak.start()
        time.sleep(0.05)
        began = time.perf_counter()
        FORMS[form](student, hidden * 1.0, teacher, teacher_hidden)
        return time.perf_counter() - began, peak.stop()
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        FORMS[form](student, hidden * 1.0, teacher, teacher_hidden)
        torch.cuda.synchronize()
        found = time.perf_counter() - began, (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)  # the measured process itself
    args = parser.parse_args()
    if args.form:
        return print(*measure(args.form, args.tokens, args.vocabulary, args.hidden, getattr(torch, args.dtype)))
    found, left_out = {form: [] for form in FORMS if not cannot_run(form)}, {}
    for _ in range(args.rounds):
        for form in list(found):
            command = [sys.executable, __file__, "--form", form]
            for name in ("tokens", "vocabulary", "hidden", "dtype"):
                command += [f"--{name}", str(getattr(args, name))]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:  # out of memory, say: the other forms' figures stand all the same
                left_out[form] = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                del found[form]
            else:
                found[form].append([float(number) for number in done.stdout.split()[-2:]])
    where = torch.cuda.get_device_name() if CUDA else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{args.tokens} tokens x {args.vocabulary}, hidden {args.hidden}, {args.dtype}; ", end="")
    print("one run of each" if args.rounds == 1 else f"median of {args.rounds} runs, in turns")
    versions = [f"torch {torch.__version__}"]
    for name, package in (("trl", "TRL"), ("liger_kernel", "Liger")):
        versions += [f"{package} {importlib.metadata.version(name)}"] if importlib.util.find_spec(name) else []
    print(f"{where}, {', '.join(versions)}, {datetime.date.today()}\n")
    print("| form | seconds | extra memory, GB | time, of plain | memory, of plain |\n| --- | --- | --- | --- | --- |")
    medians = {form: [statistics.median(run[i] for run in runs) for i in (0, 1)] for form, runs in found.items()}
    for form, (seconds, gb) in medians.items():
        of_plain = [x / y for x, y in zip((seconds, gb), medians["plain"])] if "plain" in medians else []
        ratios = f"{of_plain[0]:.2f} | {of_plain[1]:.3f}" if of_plain else "|"
        print(f"| {form} | {seconds:.{4 if CUDA else 2}f} | {gb:.3f} | {ratios} |")
    for form in FORMS:
        if reason := cannot_run(form) or left_out.get(form):
            print(f"\n{form}: not measured, {reason}")


if __name__ == "__main__":
    main()

"""How much faster is reading a judge's scores off the next-token distribution than having it write a JSON reply?

    python benchmarks/judge.py [MODEL]      # default: demo/model; prints a Markdown table

24 answers of 6 aspects each, made of the demo's test split, graded by the same model with the same batch size: once by
`score_probabilities`, which computes what an answer's aspects share once, and once by writing a greedy reply per aspect,
cut off after 24 tokens, which is enough for {"match_score": 2} in a fence.
"""

import datetime
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from grasp import load_model, load_tokenizer, sample_completions  # noqa: E402
from judges import judge_messages, reply_ids, score_probabilities  # noqa: E402
from lamp_qa import encode_chat, load_rows, load_templates, stop_ids  # noqa: E402
from replies import read_score  # noqa: E402

ANSWERS, ASPECTS, WORDS, AT_ONCE, REPLY = 24, 6, 300, 4, 24

path = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "demo" / "model")
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "bfloat16" if device == "cuda" else "float32"
tokenizer, model, templates = load_tokenizer(path), load_model(path, dtype).to(device).eval(), load_templates()
drop, begin, score_ids = reply_ids(tokenizer)
rows = load_rows(str(ROOT / "demo" / "data"), "test")
posts = " ".join(post for row in rows for post in row["profile"]).split()
aspects = [aspect for row in rows for aspect in row["rubric_aspects"]]
prompts = []  # per answer, one per aspect
for i, row in enumerate(rows[:ANSWERS]):
    answer = " ".join(posts[(i * WORDS + j) % len(posts)] for j in range(WORDS))
    row = {**row, "rubric_aspects": aspects[i * ASPECTS : (i + 1) * ASPECTS]}
    prompts.append([encode_chat(tokenizer, messages) for messages in judge_messages(row, answer, templates)])
    assert len(prompts[-1]) == ASPECTS
batches = [prompts[start : start + AT_ONCE] for start in range(0, ANSWERS, AT_ONCE)]


def read_off(batch):
    conversations = [[ids[: len(ids) - drop] + begin for ids in group] for group in batch]
    return torch.cat(score_probabilities(model, conversations, score_ids)).argmax(-1).tolist()


def written(batch):
    prompts = [ids for group in batch for ids in group]
    replies = sample_completions(model, prompts, stop, REPLY, [0] * len(prompts), temperature=0, batch_size=len(prompts))
    return [read_score(text) for text in tokenizer.batch_decode(replies, skip_special_tokens=True)]


stop = stop_ids(model, tokenizer)
seconds, work, scores = ({read_off: start(), written: start()} for start in (float, float, list))
read_off([group[:1] for group in batches[0]]), written([batches[0][0][:1]])  # warm up
for batch in batches:
    for way in (read_off, written):  # in turns, so that whatever else the machine does is shared out between them
        began, worked = time.perf_counter(), time.process_time()
        scores[way] += way(batch)
        seconds[way] += time.perf_counter() - began
        work[way] += time.process_time() - worked
    done = f"{len(scores[written])} aspects: {seconds[read_off]:.0f} s and {seconds[written]:.0f} s"
    print(done, end="\r", flush=True, file=sys.stderr)
kept = [(read, wrote) for read, wrote in zip(scores[read_off], scores[written]) if wrote is not None]
chip = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
name = "SmolLM2-135M-Instruct" if path.endswith("demo/model") else Path(path).name
print(f"{ANSWERS} answers of {WORDS} words, {ASPECTS} aspects each, {AT_ONCE} answers side by side, {name} in {dtype}")
print(f"({chip}, {os.cpu_count()} cores; torch {torch.__version__}, transformers {transformers.__version__}; ", end="")
print(f"{datetime.date.today()})\n\n| | seconds | CPU seconds | times as fast | by CPU seconds |\n{'| --- ' * 5}|")
for way, name in ((written, "a JSON reply written per aspect"), (read_off, "scores read off, shared part computed once")):
    print(f"| {name} | {seconds[way]:.1f} | {work[way]:.1f} ", end="")
    print(f"| {seconds[written] / seconds[way]:.1f} | {work[written] / work[way]:.1f} |")
same = sum(read == wrote for read, wrote in kept)
print(f"\n{len(kept)} of {ANSWERS * ASPECTS} written replies hold a score; {same} of these are the one that was read off.")

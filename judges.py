"""The judges: does an answer cover an aspect? A judge grades it 0 (no), 1 (in part) or 2 (fully).

judge([(row, answer), ...]) gives, for each row and each of its aspects, {"score": 0 | 1 | 2, "expected": float}, or None
where the call failed: that is never a score. `load_judge` knows three kinds; another one is another such function.
"""

import http.client
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import torch
from accelerate import PartialState
from transformers import DynamicCache

from command_line import InputError, first_line
from grasp import head_logits, load_model, load_tokenizer
from lamp_qa import encode_chat, load_templates, render
from replies import read_score

TRIES = 20  # a judge whose replies cannot be read is asked this often, hotter each time, before its call counts as failed
BREAKS, FIRST_WAIT = 8, 0.5  # a server that is down this often in one call is given up; seconds, doubled each time


def load_judge(spec: str, options):
    """The judge that `spec` names. Raises InputError if there is no such model or its template cannot hold a score."""
    if spec == "keywords":
        return lambda pairs: [[grade(keyword_grade(a, answer)) for a in row["rubric_aspects"]] for row, answer in pairs]
    templates = load_templates(options.prompts)
    return (server_judge if spec.startswith(("http://", "https://")) else local_judge)(spec, options, templates)


def grade(score: int, expected: float | None = None) -> dict:
    return {"score": score, "expected": float(score) if expected is None else round(expected, 6)}


STOP_WORDS = set(
    "a about all an and any are as at be been but by can do does for from has have how i if in into is it its more most my no "
    "not of off on or other our out over own s so some such than that the their them there these they this to up user was we "
    "what when where which who why will with without would you your".split()
)


def key_words(aspect_title: str) -> list[str]:
    """The content words of an aspect's title in lower case, possessive 's dropped; all its words if it has only others."""
    words = re.findall(r"\w+", re.sub(r"['’]s\b", "", aspect_title.lower()))
    return [word for word in words if word not in STOP_WORDS] or words


def keyword_grade(aspect: dict, answer: str) -> int:
    """2 if at least half of the key words of the aspect's title occur in the answer, by their stems, and 0 otherwise."""
    words, said = key_words(aspect["aspect"]), re.findall(r"\w+", answer.lower())
    found = sum(any(other.startswith(word[: max(4, len(word) - 3)]) for other in said) for word in words)
    return 2 if words and 2 * found >= len(words) else 0


def judge_messages(row: dict, answer: str, templates: dict) -> list[list[dict]]:
    """One conversation per aspect; all of them begin with the question, the asker's narrative and the answer."""
    texts = {"question": row["question"], "narrative": row["narrative"] or "(none)", "answer": answer}
    shared = templates["judge_answer"].format(**texts)
    system = {"role": "system", "content": templates["judge_system"].format()}
    aspects = [{key: value or "(not given)" for key, value in aspect.items()} for aspect in row["rubric_aspects"]]
    users = [shared + templates["judge_aspect"].format(**aspect) for aspect in aspects]
    return [[system, {"role": "user", "content": user}] for user in users]


def local_judge(path: str, options, templates: dict):
    """A chat model on this machine: no text is generated, the score is read off the next-token distribution."""
    tokenizer = load_tokenizer(path)
    drop, begin, score_ids = reply_ids(tokenizer)
    device = PartialState().device
    bits = {"8bit": 8, "4bit": 4}.get(options.judge_dtype, 16)
    model = load_model(path, "bfloat16" if bits < 16 else options.judge_dtype, device, bits).eval()
    limit = getattr(model.config, "max_position_embeddings", None)

    def judge(pairs):
        encoded = []
        for row, answer in pairs:
            ids = [encode_chat(tokenizer, messages) for messages in judge_messages(row, answer, templates)]
            encoded.append([one[: len(one) - drop] + begin for one in ids])
            if limit and (longest := max(map(len, encoded[-1]))) > limit:
                raise InputError(f"row {row['id']!r}: takes {longest} tokens to judge, and {path} knows {limit} at most")
        scored = [group.tolist() for group in score_probabilities(model, encoded, score_ids)]
        return [[grade(p.index(max(p)), p[1] + 2 * p[2]) if math.isfinite(sum(p)) else None for p in group] for group in scored]

    return judge


def reply_ids(tokenizer) -> tuple[int, list[int], list[int]]:
    """How a judge's reply goes on from a prompt: (ids to take off the prompt's end, ids up to the score, ids of 0, 1, 2).

    Found by tokenizing whole replies, since a tokenizer may join a digit with the space before it, or the reply's first
    character with the prompt's last. Raises InputError if the three scores do not differ in one token.
    """
    messages = [{"role": "user", "content": "Q"}]
    prompt, text = encode_chat(tokenizer, messages), render(tokenizer, messages)
    replies = [f'{text}{{"match_score": {score}}}' for score in range(3)]
    whole = [tokenizer(reply, add_special_tokens=False)["input_ids"] for reply in replies]
    same = os.path.commonprefix(whole)
    score_ids = [ids[len(same)] for ids in whole]
    if len(set(score_ids)) < 3:
        raise InputError(f"{tokenizer.name_or_path}: the scores 0, 1 and 2 are not told apart by one token; use another judge")
    kept = len(os.path.commonprefix([prompt, same]))
    return len(prompt) - kept, same[kept:], score_ids


@torch.no_grad()
def score_probabilities(model, conversations, score_ids) -> list[torch.Tensor]:
    """Probabilities of the scores 0, 1, 2 as the next token: for each answer (A, 3), one row per conversation about it.

    `conversations` holds, per answer, A lists of token ids. What those have in common is computed once: the beginning common
    to all answers, then those of the answers side by side, then every conversation's rest, each upon copies of the KV cache.
    """
    shared = [os.path.commonprefix(group)[: min(map(len, group)) - 1] for group in conversations]
    owner = torch.tensor([i for i, group in enumerate(conversations) for _ in group])
    rests = [ids[len(start) :] for start, group in zip(shared, conversations) for ids in group]
    decoder, cache = model.base_model, DynamicCache(config=model.config)

    def forward(rows, before, left):  # rows behind what `before` (B, T) masks: (hidden, mask with theirs, their own mask)
        width = max(map(len, rows))
        pads = [[0] * (width - len(ids)) for ids in rows]
        ids = torch.tensor([pad + ids if left else ids + pad for pad, ids in zip(pads, rows)])
        own = torch.tensor([pad + [1] * (width - len(pad)) if left else [1] * (width - len(pad)) + pad for pad in pads])
        mask, positions = torch.cat([before, own], 1), before.sum(-1, keepdim=True) + (own.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs = {key: value.to(model.device) for key, value in inputs.items()}
        return decoder(**inputs, cache=cache, use_cache=True).last_hidden_state, mask, own

    # padded left, and the rests right, so that every answer is in one piece; but padding behind the common beginning parts
    # it from the rest, which sliding windows would count as distance
    sliding = any(cache.is_sliding) and len(shared) > 1
    common = [] if sliding else os.path.commonprefix(shared)[: min(map(len, shared)) - 1]
    mask = torch.ones(1, 0, dtype=torch.long)
    if common:
        _, mask, _ = forward([common], mask, True)
        cache.batch_repeat_interleave(len(shared))
    _, mask, _ = forward([ids[len(common) :] for ids in shared], mask.expand(len(shared), -1), True)
    cache.batch_select_indices(owner.to(model.device))
    hidden, _, rest_mask = forward(rests, mask[owner], False)  # (N, R, H)
    last = hidden[torch.arange(len(rests)), rest_mask.sum(-1).to(hidden.device) - 1]  # (N, H)
    probabilities = head_logits(model, last)[:, score_ids].float().softmax(-1).cpu()  # (N, 3)
    return list(probabilities.split([len(group) for group in conversations]))


def server_judge(url: str, options, templates: dict):
    """An OpenAI-compatible server. Raises InputError if it refuses requests as such, or if a whole batch of calls fails."""
    url = url.rstrip("/") + "/v1" * (url.rstrip("/").count("/") == 2)
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"

    def ask(messages):
        return ask_server(f"{url}/chat/completions", headers, options.judge_model or "default", messages)

    def judge(pairs):
        conversations = [judge_messages(row, answer, templates) for row, answer in pairs]
        with ThreadPoolExecutor(options.judge_workers) as pool:
            replies = list(pool.map(ask, [messages for group in conversations for messages in group]))
        if replies and all(error for _, error in replies):
            raise InputError(f"{url}: the judge does not answer: {replies[-1][1]}; what is graded is kept, run again to go on")
        replies = iter(replies)
        return [[next(replies)[0] for _ in group] for group in conversations]

    return judge


def ask_server(url: str, headers: dict, model: str, messages: list[dict]) -> tuple[dict | None, str]:
    """One call: (grade or None, why the server gave no reply or ""). An unreadable reply is asked for again, 0.1 hotter."""
    marker = r"<(?=[|/｜]|start_of|end_of|s>|think)|\[(?=/?INST|\|)"  # a server would read chat markers in an answer as its own
    messages = [{**message, "content": re.sub(marker, r"\g<0> ", message["content"])} for message in messages]
    unreadable = breaks = 0
    while unreadable < TRIES and breaks < BREAKS:
        asked = {"model": model, "messages": messages, "temperature": min(1.0, 0.1 * unreadable), "max_tokens": 1024}
        status, got, body = post(url, headers, json.dumps(asked).encode())
        why = f"{status or 'no reply'} {body[:200].decode('utf-8', 'replace')!r}"
        if status in (401, 403, 404):
            raise InputError(f"{url}: the judge's server refuses (OPENAI_API_KEY, --judge-model): {why}")
        try:
            reply = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            hopeless = 400 <= status < 500 and status not in (408, 409, 425, 429)
            breaks = BREAKS if hopeless else breaks + 1
            after = got.get("Retry-After") or ""
            if breaks < BREAKS:
                time.sleep(min(60.0, float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else FIRST_WAIT * 2 ** (breaks - 1)))
            continue
        score = read_score(reply)
        if score is not None:
            return grade(score), ""
        unreadable += 1
    return None, why if breaks == BREAKS else ""


def post(url: str, headers: dict, content: bytes):
    """(status, headers, body) of what the server replies; (0, {}, what went wrong) if nothing whole came back."""
    try:
        try:
            response = urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=300)
        except urllib.error.HTTPError as error:  # has a reply, too
            response = error
        with response:
            return response.status, response.headers, response.read()
    except (OSError, http.client.HTTPException, ValueError) as error:  # refused, cut off, timed out, no such host, no URL
        return 0, {}, first_line(error).encode()

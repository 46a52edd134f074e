"""The judges: grades read off a model's distribution, asked of a server, or counted in key words."""

import json
import random
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from conftest import NO_SYSTEM, ROOT, make_model, make_tokenizer, toy_rows

import judges
from command_line import InputError
from grasp import load_model, load_tokenizer, sample_completions
from judges import judge_messages, key_words, keyword_grade, load_judge, reply_ids, score_probabilities
from lamp_qa import encode_chat, load_templates, stop_ids

# --- A local model ----------------------------------------------------------------------------------------------------


def judge_options(**settings):
    usual = dict(prompts="", judge_dtype="float32", judge_model="", judge_workers=8)
    return SimpleNamespace(**{**usual, **settings})


def plain_probabilities(model, ids, score_ids):
    """The obvious reference: one conversation, one forward pass, no cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1, score_ids].float().softmax(-1)


def random_conversations(generator, lengths, aspects):
    groups = []
    for length in lengths:
        start = [generator.randrange(1, 400) for _ in range(length)]
        groups.append([start + [generator.randrange(1, 400) for _ in range(generator.randint(1, 20))] for _ in range(aspects)])
    return groups


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "llama", "granite", "cohere", "tied"])
def test_shared_prefix_scores_equal_plain_forward_passes(family):
    model, generator = make_model(family), random.Random(1)
    groups = random_conversations(generator, [3, 200, 40, 7], 4)
    groups.append(groups[1][:1])  # an answer of a single aspect
    groups.append([groups[0][0], groups[0][0] + [5]])  # a conversation that is the beginning of another
    score_ids = [17, 18, 19]
    scored = score_probabilities(model, groups, score_ids)
    assert [len(group) for group in scored] == [len(group) for group in groups]
    for ours, group in zip(scored, groups):
        plain = torch.stack([plain_probabilities(model, ids, score_ids) for ids in group])
        assert (ours - plain).abs().max() < 1e-4
    spread = torch.cat(scored).std(0).max()
    assert spread > 1e-3  # or the comparison would say nothing


@pytest.mark.parametrize("settings", [dict(), dict(template=NO_SYSTEM, bos="<bos>")])
def test_judge_scores_are_those_of_whole_conversations(settings, tmp_path):
    tokenizer = make_tokenizer(**settings)
    model = make_model("gemma2" if settings else "qwen2", max_position_embeddings=4096)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))  # may differ from ours: some families' classes bring their own splitting
    rows = normal(toy_rows(3))
    answers = ["Short.", "Rather long. " * 60, "With a marker <|im_end|> in it"]
    graded = load_judge(str(tmp_path), judge_options())(list(zip(rows, answers)))
    drop, begin, score_ids = reply_ids(tokenizer)
    assert drop == 0 and tokenizer.decode(begin).startswith('{"match_score":')
    for row, answer, grades in zip(rows, answers, graded):
        for messages, grade in zip(judge_messages(row, answer, load_templates()), grades):
            p = plain_probabilities(model, encode_chat(tokenizer, messages) + begin, score_ids)
            assert grade["score"] == int(p.argmax())
            assert grade["expected"] == pytest.approx(float(p[1] + 2 * p[2]), abs=1e-4)


def normal(rows):
    return [{**row, "config": "toy", "profile": [post["text"] for post in row["profile"]]} for row in rows]


def test_the_score_is_what_greedy_generation_puts_there(tokenizer):
    """A model whose head favours the reply's form writes it, with the score that `score_probabilities` finds."""
    for seed in range(6):
        model = make_model("llama", seed=seed, max_position_embeddings=4096)
        drop, begin, score_ids = reply_ids(tokenizer)
        row = normal(toy_rows(1, start=seed))[0]
        conversations = [encode_chat(tokenizer, m) + begin for m in judge_messages(row, "An answer.", load_templates())]
        [scored] = score_probabilities(model, [conversations], score_ids)
        bias = torch.zeros(400)
        bias[score_ids] = 1e4  # keeps the form, and leaves the choice among the scores to the model
        model.lm_head.register_forward_hook(lambda module, inputs, logits, bias=bias: logits + bias)
        written = sample_completions(model, conversations, [0], 1, [0] * len(conversations), temperature=0)
        assert [score_ids.index(ids[0]) for ids in written] == scored.argmax(-1).tolist()


@pytest.mark.skipif(not (ROOT / "demo" / "model").exists(), reason="python demo/model.py fetches the model")
def test_a_real_model_writes_greedily_the_scores_that_are_read_off():
    tokenizer, model = load_tokenizer(f"{ROOT}/demo/model"), load_model(f"{ROOT}/demo/model", "float32").eval()
    _, begin, score_ids = reply_ids(tokenizer)
    groups = []
    for row, answer in zip(normal(toy_rows(2)), ("Play it.", "Brew it with care, and take your time. " * 5)):
        groups.append([encode_chat(tokenizer, m) + begin for m in judge_messages(row, answer, load_templates())])
    prompts, stop = [ids for group in groups for ids in group], stop_ids(model, tokenizer)
    written = sample_completions(model, prompts, stop, 1, [0] * len(prompts), temperature=0)
    kept = [score_ids.index(ids[0]) if ids[0] in score_ids else None for ids in written]
    read = torch.cat(score_probabilities(model, groups, score_ids)).argmax(-1).tolist()
    assert None not in kept and kept == read


def test_reply_ids_of_tokenizers_that_treat_digits_and_spaces_in_their_own_ways(tokenizer):
    joined = make_tokenizer()
    joined.add_tokens([" 0", " 1", " 2"])  # a digit and the space before it are one token
    braced = make_tokenizer()
    braced.add_tokens(["\n{"])  # the reply's first character joins the prompt's last
    for each in (tokenizer, joined, braced):
        drop, begin, score_ids = reply_ids(each)
        prompt = encode_chat(each, [{"role": "user", "content": "Hello"}])
        for score, its_id in enumerate(score_ids):
            text = f'<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{{"match_score": {score}}}'
            begins = prompt[: len(prompt) - drop] + begin + [its_id]
            assert each(text, add_special_tokens=False)["input_ids"][: len(begins)] == begins
    assert reply_ids(braced)[0] == 1


def test_a_judge_whose_logits_are_not_numbers_gives_no_score(tmp_path, tokenizer):
    model = make_model("llama", max_position_embeddings=4096)
    model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_judge(str(tmp_path), judge_options())([(normal(toy_rows(1))[0], "An answer.")]) == [[None, None]]


@pytest.mark.parametrize("dtype, near", [("bfloat16", 0.05), ("8bit", 0.2), ("4bit", 2.0)])
def test_smaller_weights_give_nearly_the_same_expectation(tmp_path, tokenizer, dtype, near):
    sizes = dict(hidden_size=64, intermediate_size=128, max_position_embeddings=4096)  # 4 bit packs blocks of 64
    make_model("llama", **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pairs = [(row, "An answer.") for row in normal(toy_rows(2))]
    whole, small = (load_judge(str(tmp_path), judge_options(judge_dtype=name))(pairs) for name in ("float32", dtype))
    for a, b in zip(sum(whole, []), sum(small, [])):
        assert 0 <= b["expected"] <= 2 and abs(a["expected"] - b["expected"]) < near


def test_a_conversation_too_long_for_the_judge_is_an_error_that_names_the_row(tmp_path, tokenizer):
    make_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="'q0'.* 1024 "):
        load_judge(str(tmp_path), judge_options())([(normal(toy_rows(1))[0], "An answer. " * 500)])


# --- Key words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "title, words",
    [
        ("children's safety", ["children", "safety"]),
        ("The cost of it all", ["cost"]),
        ("what it is", ["what", "it", "is"]),
        ("Öko-Strom", ["öko", "strom"]),
        ("!", []),
    ],
)
def test_key_words(title, words):
    assert key_words(title) == words


@pytest.mark.parametrize(
    "title, answer, score",
    [
        ("allergies", "Mind what she is allergic to.", 2),
        ("allergies", "Mind the nuts.", 0),
        ("children's safety", "Keep it safe.", 2),  # one of two words is half
        ("children's safety", "Keep it clean.", 0),
        ("low budget travel", "Travel by night.", 0),  # one of three is less than half
        ("low budget travel", "Travel on a small budget.", 2),
        ("the art of it", "ARTISTIC touches", 2),
        ("budget", "", 0),
        ("!", "anything", 0),
    ],
)
def test_keyword_grade(title, answer, score):
    assert keyword_grade({"aspect": title}, answer) == score
    row = {"rubric_aspects": [{"aspect": title}]}
    assert load_judge("keywords", None)([(row, answer)]) == [[{"score": score, "expected": float(score)}]]


# --- A server ---------------------------------------------------------------------------------------------------------


class Server:
    """An OpenAI-compatible server on this machine; `play(request number, request)` says how each call goes."""

    def __init__(self, play, address=("127.0.0.1", 0)):
        self.calls, self.keys, self.most, running, lock = [], set(), 0, Counter(), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.calls)
                    outer.calls.append(request)
                    outer.keys.add(self.headers["Authorization"])
                    running["now"] += 1
                    outer.most = max(outer.most, running["now"])
                status, headers, body = play(number, request)
                with lock:
                    running["now"] -= 1
                if status is None:  # cut the connection
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if not isinstance(body, bytes):
                    body = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        self.http = ThreadingHTTPServer(address, Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def reply(content):
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return 200, {"Content-Type": "application/json"}, {"id": "x", "created": 0, "model": "m", "choices": [choice]}


def right_score(request):
    """Which score the right one is: by the aspect, so that mixed-up replies would show."""
    return len(request["messages"][1]["content"].split("Aspect: ")[1].split("\n")[0]) % 3


@pytest.fixture
def no_waiting(monkeypatch):
    waits = []
    monkeypatch.setattr(judges.time, "sleep", waits.append)
    return waits


def test_right_scores_come_through_whatever_the_server_does(no_waiting, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    seen, lock = Counter(), threading.Lock()

    def play(number, request):
        content = request["messages"][1]["content"]
        with lock:
            seen[content] += 1
            attempt, kind = seen[content], hash(content) % 10
        score = right_score(request)
        if attempt == 1:
            threading.Event().wait(0.02)  # slow
            trouble = {
                0: (429, {"Retry-After": "7"}, {"error": "slow down"}),
                1: (500, {}, b"oops"),
                2: (None, {}, b""),
                3: (200, {"Content-Type": "application/json"}, b"<html>not JSON</html>"),
                4: reply("I would rather not say."),
                5: reply('{"match_score": 7}'),
                6: (200, {"Content-Type": "application/json"}, {"choices": []}),
                7: reply(None),
            }
            if kind in trouble:
                return trouble[kind]
        return reply(
            [
                f'{{"match_score": {score}}}',
                f'Well: {{"match_score": "{score}"}}. Bye.',
                f'```json\n{{"Match_Score": {score}.0}}\n```',
            ][kind % 3]
        )

    rows = normal(toy_rows(30))
    answers = [f"Answer {i}." for i in range(30)]
    with Server(play) as server:
        graded = load_judge(server.url, judge_options(judge_model="big"))(list(zip(rows, answers)))
    for row, grades in zip(rows, graded):
        assert [g["score"] for g in grades] == [len(aspect["aspect"]) % 3 for aspect in row["rubric_aspects"]]
    assert server.keys == {"Bearer secret-key"} and {call["model"] for call in server.calls} == {"big"}
    assert 1 < server.most <= 8 and 7.0 in no_waiting
    hot = Counter(round(call["temperature"], 2) for call in server.calls)
    assert hot[0.0] >= 60 and hot[0.1] and set(hot) == {0.0, 0.1}


def test_an_unreadable_reply_is_asked_again_hotter_each_time_and_is_then_no_score(no_waiting):
    with Server(lambda number, request: reply("no")) as server:
        row = normal(toy_rows(1))[0] | {"rubric_aspects": [{"aspect": "a", "reason": "", "evidence": ""}]}
        assert load_judge(server.url, judge_options())([(row, "An answer.")]) == [[None]]
    heats = [round(call["temperature"], 2) for call in server.calls]
    assert heats == [min(10, i) / 10 for i in range(20)]


def test_a_dead_server_is_one_line(no_waiting):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InputError, match="does not answer") as error:
        load_judge(url, judge_options())([(normal(toy_rows(1))[0], "An answer.")])
    assert "\n" not in str(error.value)
    assert len(no_waiting) == 2 * (judges.BREAKS - 1) and max(no_waiting) <= 60


def test_a_refused_request_is_not_repeated_and_its_reason_is_shown(no_waiting):
    with Server(lambda number, request: (400, {}, {"error": "too many tokens"})) as server:
        with pytest.raises(InputError, match="400.*too many tokens"):
            load_judge(server.url, judge_options())([(normal(toy_rows(1))[0], "An answer.")])
    assert len(server.calls) == 2 and not no_waiting


def test_a_wrong_key_ends_at_once_and_is_not_shown(no_waiting, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with Server(lambda number, request: (401, {}, {"error": "who are you"})) as server:
        with pytest.raises(InputError, match="refuses") as error:
            load_judge(server.url, judge_options())([(normal(toy_rows(1))[0], "An answer.")])
    assert "secret" not in str(error.value) and not no_waiting


def test_without_a_key_no_token_of_the_hub_is_sent(no_waiting, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    with Server(lambda number, request: reply('{"match_score": 1}')) as server:
        load_judge(server.url, judge_options())([(normal(toy_rows(1))[0], "An answer.")])
    assert server.keys == {None}


def test_chat_markers_in_an_answer_do_not_reach_the_server_whole(no_waiting):
    with Server(lambda number, request: reply('{"match_score": 1}')) as server:
        load_judge(server.url, judge_options())([(normal(toy_rows(1))[0], "x<|im_end|></s>[INST]<end_of_turn> 1 < 2")])
    sent = server.calls[0]["messages"][1]["content"]
    assert not any(marker in sent for marker in ("<|im_end|>", "</s>", "[INST]", "<end_of_turn>")) and "1 < 2" in sent

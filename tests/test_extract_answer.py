"""`extract_answer` finds the answer in what chat models really write, and never takes the JSON itself for the answer."""

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replies import extract_answer, read_score

A = "Take the early bus, it is quiet."
OK = json.dumps({"personalized_answer": A})
QUOTES = 'Say "hello" to them, and "bye" when you go.'

CASES = {  # name: (reply, the answer in it)
    "bare": (OK, A),
    "bare, with space around": (f"\n\n  {OK} \n", A),
    "fenced": (f"```json\n{OK}\n```", A),
    "fenced, no language": (f"```\n{OK}\n```", A),
    "fenced, capital language": (f"```JSON\n{OK}\n```", A),
    "fenced with ~~~": (f"~~~json\n{OK}\n~~~", A),
    "fence on one line": (f"```json {OK} ```", A),
    "fence not closed": (f"```json\n{OK}", A),
    "fence only closed": (f"{OK}\n```", A),
    "single backticks": (f"`{OK}`", A),
    "the word json before": (f"json\n{OK}", A),
    "prose before": (f"Sure! Here is the answer you asked for:\n\n{OK}", A),
    "prose after": (f"{OK}\n\nI hope this helps. Let me know!", A),
    "prose around a fence": (f"Of course.\n```json\n{OK}\n```\nAnything else?", A),
    "prose with braces before": (f"I fill in {{your name}} here: {OK}", A),
    "prose with braces after": (f"{OK} and {{that}} is it", A),
    "another object before": (f'{{"thought": "buses"}}\n{OK}', A),
    "another object after": (f'{OK}\n{{"confidence": 0.9}}', A),
    "an empty form before": (f'The form is {{"personalized_answer": ""}}. So: {OK}', A),
    "a draft before": (f'{{"personalized_answer": "Hm."}}\nBetter:\n{OK}', A),
    "the same twice": (f"{OK}\n{OK}", A),
    "repeated, the last one cut off": (f'{OK}\n{{"personalized_answer": "Take the ea', A),
    "pretty printed": (json.dumps({"personalized_answer": A}, indent=4), A),
    "more keys": (json.dumps({"reasoning": "x", "personalized_answer": A, "sources": [1]}), A),
    "inside another object": (json.dumps({"response": {"personalized_answer": A}}), A),
    "inside a list": (json.dumps([{"personalized_answer": A}]), A),
    "capital key": (f'{{"Personalized_Answer": "{A}"}}', A),
    "upper-case key": (f'{{"PERSONALIZED_ANSWER": "{A}"}}', A),
    "camel-case key": (f'{{"personalizedAnswer": "{A}"}}', A),
    "key with a space": (f'{{"personalized answer": "{A}"}}', A),
    "key with a hyphen": (f'{{"Personalized-Answer": "{A}"}}', A),
    "raw newlines": ('{"personalized_answer": "First.\n\nSecond."}', "First.\n\nSecond."),
    "escaped newlines": ('{"personalized_answer": "First.\\n\\nSecond."}', "First.\n\nSecond."),
    "raw tab": ('{"personalized_answer": "a\tb"}', "a\tb"),
    "raw newlines, list": ('```json\n{\n"personalized_answer": "- one\n- two\n"\n}\n```', "- one\n- two\n"),
    "unescaped quotes": (f'{{"personalized_answer": "{QUOTES}"}}', QUOTES),
    "unescaped quotes, fenced": (f'```json\n{{\n  "personalized_answer": "{QUOTES}"\n}}\n```', QUOTES),
    "unescaped quotes at the end": ('{"personalized_answer": "They say "go""}', 'They say "go"'),
    "unescaped quotes and a colon": ('{"personalized_answer": "Say "hi": it works."}', 'Say "hi": it works.'),
    "escaped quotes": (json.dumps({"personalized_answer": QUOTES}), QUOTES),
    "single quotes": (f"{{'personalized_answer': '{A}'}}", A),
    "key without quotes": (f'{{personalized_answer: "{A}"}}', A),
    "curly quotes": (f"{{“personalized_answer”: “{A}”}}", A),
    "trailing comma": (f'{{"personalized_answer": "{A}",}}', A),
    "wrong escape": ('{"personalized_answer": "It\\\'s quiet."}', "It's quiet."),
    "brace missing": (f'{{"personalized_answer": "{A}"', A),
    "quote and brace missing": (f'{{"personalized_answer": "{A}', A),
    "fenced, quote and brace missing": (f'```json\n{{"personalized_answer": "{A}\n```', A),
    "cut off": ('```json\n{"personalized_answer": "Take the early bus, it', "Take the early bus, it"),
    "cut off with raw newlines": ('{"personalized_answer": "One.\nTwo, th', "One.\nTwo, th"),
    "cut off in the key": ('{"personalized_ans', ""),
    "cut off before the value": ('{"personalized_answer":', ""),
    "cut off at the quote": ('{"personalized_answer": "', ""),
    "reasoning before": (f"<think>They like buses.</think>\n{OK}", A),
    "reasoning with a draft": (f'<think>Maybe {{"personalized_answer": "No."}}?</think>{OK}', A),
    "reasoning with a broken draft": (f'<think>Maybe {{"personalized_answer": "No. </think>\n{OK}', A),
    "reasoning in capitals": (f"<Thinking>Hm.</Thinking>\n```json\n{OK}\n```", A),
    "reasoning opened by the template": (f"They like buses.\n</think>\n\n{OK}", A),
    "reasoning not closed": (f"<think>They like buses. So:\n{OK}", A),
    "reasoning and no answer": ('<think>{"personalized_answer": "No."}</think> I cannot say.', ""),
    "reasoning, then a cut-off answer": ('<think>Hm {x}.</think>{"personalized_answer": "Take', "Take"),
    "only reasoning": ("<think>They like buses and", ""),
    "tags inside the answer": (json.dumps({"personalized_answer": "Write </think> at the end"}), "Write </think> at the end"),
    "fence inside the answer": (json.dumps({"personalized_answer": "Run ```pip``` now"}), "Run ```pip``` now"),
    "fence inside the answer, fenced": ("```json\n" + json.dumps({"personalized_answer": "a\n```\nb"}) + "\n```", "a\n```\nb"),
    "JSON inside the answer": (json.dumps({"personalized_answer": 'Use {"a": 1}'}), 'Use {"a": 1}'),
    "the form inside the answer": (json.dumps({"personalized_answer": OK}), OK),
    "a list of sentences": ('{"personalized_answer": ["One.", "Two."]}', "One.\nTwo."),
    "an object": ('{"personalized_answer": {"First": "one", "Then": "two"}}', "First: one\nThen: two"),
    "a number": ('{"personalized_answer": 42}', "42"),
    "null": ('{"personalized_answer": null}', ""),
    "empty": ('{"personalized_answer": ""}', ""),
    "half a surrogate pair": ('{"personalized_answer": "so \\ud83d sad"}', "so ? sad"),
    "emoji, escaped": ('{"personalized_answer": "so \\ud83d\\ude22 sad"}', "so 😢 sad"),
    "right-to-left": ('{"personalized_answer": "שלום"}', "שלום"),
    "nothing": ("", ""),
    "only prose": ("You should take the early bus.", ""),
    "another key": ('{"answer": "Take the bus."}', ""),
    "the key in prose": ("The personalized_answer is to take the bus.", ""),
    "only a fence": ("```json\n```", ""),
    "an empty object": ("{}", ""),
    "many braces": ("{" * 3000, ""),
    "deeply nested": ('{"a":' * 3000, ""),
    "a deeply nested answer": ('{"personalized_answer": ' + "[" * 900 + "]" * 900 + "}", ""),
    "a byte order mark": ("\ufeff" + OK, A),
}


@pytest.mark.parametrize("reply, answer", CASES.values(), ids=CASES)
def test_reply(reply, answer):
    assert extract_answer(reply) == answer


WRAPPINGS = [
    "{}",
    "```json\n{}\n```",
    "```\n{}\n```\n",
    "Here it is:\n```json\n{}\n```\nBye.",
    "Sure: {}",
    "{} Done.",
    "<think>So {{then}}</think>\n```json\n{}\n```",
]


@settings(max_examples=300, deadline=None)
@given(st.text(), st.sampled_from(WRAPPINGS), st.booleans(), st.sampled_from([None, 2]))
@example('```"}', WRAPPINGS[3], True, None)
@example('</think>{"personalized_answer": "x"}', WRAPPINGS[6], False, 2)
def test_any_string_in_a_valid_reply_comes_back_unchanged(answer, wrapping, ascii_only, indent):
    reply = wrapping.format(json.dumps({"personalized_answer": answer}, ensure_ascii=ascii_only, indent=indent))
    assert extract_answer(reply) == answer


PIECES = [
    '{"personalized_answer": "',
    '"}',
    "```json\n",
    "```",
    "<think>",
    "</think>",
    "\\",
    '"',
    "{",
    "}",
    "\n",
    "a b",
    ": ",
    "[",
    "],",
]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join)))
def test_no_input_raises_or_gives_anything_but_text_without_the_form_around_it(reply):
    for answer_format in ("json", "text"):
        answer = extract_answer(reply, answer_format)
        assert isinstance(answer, str)
        answer.encode()
    read_score(reply)


def test_a_reply_cut_off_anywhere_never_gives_the_json_itself():
    whole = "```json\n" + json.dumps({"personalized_answer": f"{A}\n{QUOTES}"}) + "\n```"
    for end in range(len(whole)):
        answer = extract_answer(whole[:end])
        assert "personalized" not in answer and "```" not in answer and f"{A}\n{QUOTES}".startswith(answer.rstrip("\\")), end


def test_long_broken_replies_take_no_long_time():
    noise = random.Random(0)
    extract_answer("".join(noise.choice(PIECES) for _ in range(3000)))


@pytest.mark.parametrize(
    "reply, answer",
    [
        ("  Take the bus.\n", "Take the bus."),
        ("<think>Hm.</think>\nTake the bus.", "Take the bus."),
        ("Hm.</think>Take the bus.", "Take the bus."),
        ("<think>Hm, so", ""),
        ("", ""),
    ],
)
def test_plain_text_without_its_reasoning(reply, answer):
    assert extract_answer(reply, "text") == answer


@pytest.mark.parametrize(
    "reply, score",
    [
        ('{"match_score": 2}', 2),
        ('{"match_score": 0}', 0),
        ('```json\n{"match_score": 1}\n```', 1),
        ('The answer touches it. {"match_score": "1"} I think.', 1),
        ('{"Match Score": 2.0}', 2),
        ('{"match_score": 2', 2),
        ('{"reason": "it says "yes"", "match_score": 2}', 2),
        ("<think>0?</think>{'match_score': 2}", 2),
        ('{"match_score": 3}', None),
        ('{"match_score": -1}', None),
        ('{"match_score": 1.5}', None),
        ('{"match_score": true}', None),
        ('{"match_score": null}', None),
        ('{"score": 2}', None),
        ("2", None),
        ("", None),
        (None, None),
    ],
)
def test_scores_of_judges(reply, score):
    assert read_score(reply) == score

"""Read answers and scores: from what models write, which is JSON in many ways, and from files in LaMP-QA's forms."""

import json
import re

from json_repair import repair_json

from command_line import InputError, read_text
from lamp_qa import parse_json

REASONING = r"think|thinking|thought|thoughts|reason|reasoning|analysis|reflection|scratchpad"


def extract_answer(text: str, answer_format: str = "json") -> str:
    """The answer in a model's reply, "" if there is none; the reply's JSON itself is never returned as the answer."""
    if answer_format == "json":
        try:
            return as_text(find_field(text, "personalizedanswer"))
        except RecursionError:  # lists in lists in lists
            return ""
    text = re.sub(rf"(?is)^.*</({REASONING})>", "", text)
    return re.sub(rf"(?is)<({REASONING})>.*", "", text).strip()


def as_text(value) -> str:
    """A JSON value as a person would write it; half surrogate pairs, which no file can hold, become question marks."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {as_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "\n".join(map(as_text, value))
    return "" if value is None else str(value).encode("utf-8", "replace").decode()


def find_field(text: str, name: str):
    """The value of the field `name` (letters only, any capitalization) in the JSON of a reply; None if there is none.

    Whole objects come first: the last one that has the field and stands behind the reasoning. Otherwise what begins like
    one is repaired: unescaped quotes, a cut-off tail.
    """
    spans, position = [], text.find("{")
    while position >= 0:
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(text, position)
            spans.append((position, end, look_up(value, name)))
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)
    closings = [tag.end() for tag in re.finditer(rf"(?i)</({REASONING})>", text)]
    behind = max((end for end in closings if not any(low < end <= high for low, high, _ in spans)), default=0)
    found = [value for low, _, value in spans if low >= behind and value not in (None, "")]
    if found:
        return found[-1]
    key = "[ _-]?".join({"personalizedanswer": ("personalized", "answer"), "matchscore": ("match", "score")}[name])
    start = re.search(rf"(?is)\{{[^{{]*?\b{key}\b", text[behind:])
    if not start:
        return None
    rest = re.sub(r"\s*```[^`\"}]*$", "", text[behind + start.start() :])
    try:
        return look_up(repair_json(rest, return_objects=True), name)
    except Exception:  # no matter what the repair trips over: it is then no answer
        return None


def look_up(value, name: str):
    """The first value under the key `name`, at any depth, None if there is none."""
    if isinstance(value, dict):
        for key, item in value.items():
            if re.sub("[^a-z]", "", key.lower()) == name:
                return item
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((found for found in (look_up(item, name) for item in items) if found is not None), None)


def read_score(text) -> int | None:
    """The match_score in a judge's reply, None unless it is 0, 1 or 2."""
    value = find_field(text, "matchscore") if isinstance(text, str) else None
    value = value.strip() if isinstance(value, str) else value
    return {"0": 0, "1": 1, "2": 2, "0.0": 0, "1.0": 1, "2.0": 2}.get(str(value))


def read_responses(path: str) -> dict[str, str]:
    """Answers by id from a file {id: [{"output": answer}, ...]}; of several answers the first, as the benchmark reads it."""
    raw = parse_json(read_text(path), path)
    if not isinstance(raw, dict):
        raise InputError(f'{path}: expected an object {{id: [{{"output": answer}}]}}, found {raw!r:.60}')
    answers = {}
    for name, outputs in raw.items():
        if not isinstance(outputs, list) or (outputs and not (isinstance(outputs[0], dict) and "output" in outputs[0])):
            raise InputError(f'{path}, id {name!r}: expected a list of objects with "output", found {outputs!r:.60}')
        value = outputs[0]["output"] if outputs else ""
        answers[name] = "" if value is None else str(value).encode("utf-8", "replace").decode()
    return answers


def read_scores(path: str) -> dict[str, float]:
    """Question scores by id from a scores.json."""
    raw = parse_json(read_text(path), path)
    try:
        return {question["id"]: float(question["score"]) for question in raw["per_question_scores"]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: expected scores.json of a run, per_question_scores of id and score: {error!r:.80}"
        ) from error

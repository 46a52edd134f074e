"""Measure personalization the way LaMP-QA does (arXiv 2506.00137): does an answer cover what its asker cares about?

A model answers every question of a split; a judge grades each rubric aspect of each answer 0, 1 or 2; a question scores
sum / (2 * aspects), a config the mean of its questions, and macro is the mean of the configs.

    python evaluate.py --model runs/mine/model --dataset D --judge Qwen/Qwen2.5-32B-Instruct --output-dir results/mine
    python evaluate.py --model M --context none ...          # no posts in the prompt; --context rubric: the upper bound
    python evaluate.py --responses answers.json ...          # grade existing answers, {id: [{"output": text}]}
    python evaluate.py ... --compare results/base/scores.json
    accelerate launch evaluate.py ...                        # several devices share the questions

Judges: a chat model by folder or hub id, an OpenAI-compatible server by URL (its key is read from OPENAI_API_KEY), or
`keywords`, which needs no model and whose figures mean nothing outside of demos and tests. A call that fails is never a
score. A run that was stopped goes on where it stood when the same command is given again. Results: responses.json and
scores.json (LaMP-QA's forms), summary.json, and a page for people, index.html (view.py).
"""

import difflib
import functools
import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from checkpoint import check_positions
from command_line import InputError, listed, option, parse_options, read_text, run, write_file
from grasp import load_model, load_tokenizer, sample_completions, seed_for
from judges import grade, load_judge
from lamp_qa import (
    describe,
    encode_chat,
    leaks,
    load_examples,
    load_rows,
    load_templates,
    parse_json,
    privileged_block,
    stop_ids,
    student_messages,
)
from replies import extract_answer, look_up, read_responses, read_scores
from resumable import check_settings, digest, fingerprint, in_batches, quiet_accelerator
from view import as_table, write_page

MAX_FAILED = 0.002  # a run in which a larger share of the judge's calls failed ends non-zero
FREE = {"output_dir", "compare", "judge_workers"}  # options that may differ when a run is continued


@dataclass
class EvaluateOptions:
    model: str = option("", "chat model that answers: a local folder or a hub id", section="Model and data")
    dataset: str = option("", "LaMP-QA rows: a .json or .jsonl file, a folder of SPLIT.json[l], or a hub id")
    config: str = option("", "only this one of the data set's configs (default: all)")
    split: str = option("test", "split to answer")
    output_dir: str = option("", "folder for the results; a run that was stopped goes on in it")
    responses: str = option(
        "", "grade the answers in this file instead: {id: [{output: text}]}; --model then only counts tokens"
    )
    context: str = option(
        "profile",
        "what the model sees beside the question; profile is the student's prompt, rubric the teacher's",
        choices=("none", "profile", "rubric"),
        section="Prompts",
    )
    num_contexts: int = option(10, "how many of the user's posts the prompts show", low=0)
    rank_profile_with: str = option("", "encoder that ranks the posts by nearness to the question (default: as they stand)")
    privileged: str = option("aspects", "what the rubric's prompt adds", choices=("aspects", "narrative", "both"))
    answer_format: str = option("json", "how answers are written; json is LaMP-QA's", choices=("json", "text"))
    prompts: str = option("", "YAML or JSON file of templates that replace ours (see TEMPLATES in lamp_qa.py)")
    max_prompt_tokens: int = option(6144, "rows whose longer prompt has more tokens are left out, never cut", low=1)
    max_dropped: float = option(0.05, "stop if a larger share of the rows has to be left out", low=0, high=1)
    max_new_tokens: int = option(2048, "longest answer", low=1, section="Answers")
    temperature: float = option(0.1, "of the first try; each further one is 0.1 hotter, up to 1", low=0)
    top_p: float = option(0.95, "sample from the most likely tokens with this mass", low=0.01, high=1)
    resamples: int = option(20, "how often an answer that cannot be read is sampled again before it counts as empty", low=0)
    generation_batch_size: int = option(32, "prompts sampled side by side on one device", low=1)
    dtype: str = option("bfloat16", "of the answering model's weights", choices=("bfloat16", "float32"))
    seed: int = option(0, "of the answers and of the intervals", low=0)
    judge: str = option("", "a chat model by folder or hub id, a server by URL, or keywords", section="Judge")
    judge_model: str = option("", "the model's name on the judge's server")
    judge_dtype: str = option("bfloat16", "of a local judge's weights", choices=("bfloat16", "float32", "8bit", "4bit"))
    judge_batch_size: int = option(4, "answers graded side by side, with all their aspects", low=1)
    judge_workers: int = option(16, "requests to the judge's server at once", low=1)
    compare: str = option("", "scores.json of another run, to show what changed", section="Report")


# --- Answers ----------------------------------------------------------------------------------------------------------


def sample_answers(tokenizer, prompts, options, folder: Path, accelerator) -> dict[str, dict]:
    """An answer to each prompt ({id: token ids}) as the protocol samples it: {id: {"output", "tries"}}.

    What cannot be read is sampled again, `options.resamples` times, 0.1 hotter each time up to 1, and is then "". An answer
    depends on seed, id and try; the batches are the same whatever was done before, and however many processes there are.
    """
    model = load_model(options.model, options.dtype, accelerator.device).eval()
    answers, stop = {}, stop_ids(model, tokenizer)
    left = sorted(prompts, key=lambda name: -len(prompts[name]))
    for attempt in range(options.resamples + 1):
        temperature = max(options.temperature, min(1.0, options.temperature + 0.1 * attempt))

        def sample(names, _, attempt=attempt, temperature=temperature):
            seeds = [seed_for(options.seed, name, attempt) for name in names]
            batch = [prompts[name] for name in names], stop, options.max_new_tokens, seeds, temperature, options.top_p
            completions = sample_completions(model, *batch, batch_size=len(names))
            texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
            outputs = [extract_answer(text, options.answer_format) for text in texts]
            return {name: {"output": output, "tries": attempt + 1} for name, output in zip(names, outputs)}

        step = f"answers, try {attempt + 1}"
        answers |= in_batches(sample, step, left, options.generation_batch_size, folder, accelerator)
        left = [name for name in left if not answers[name]["output"].strip()]
        if not left:
            break
    return {name: answers[name] for name in prompts}


def recites(row, text: str, templates, options) -> bool:
    """Does an answer leak: recite the privileged block where it differs from what the student sees?"""
    shown = student_messages(row, templates, options.answer_format, options.num_contexts)[-1]["content"]
    return leaks(text, privileged_block(row, templates, options.privileged), shown)


def grade_answers(rows, answers, options, folder: Path, accelerator) -> dict[str, list]:
    """The grades of all aspects by id, None where a call failed; `rows` and `answers` (texts) are by id.

    An empty answer scores 0 without a call. On a second run only what has no grade yet is asked for, and the judge is
    loaded only if there is anything.
    """
    torch.cuda.empty_cache()  # of the model that answered
    judge = functools.cache(lambda: load_judge(options.judge, options))
    names = sorted((name for name in rows if answers[name].strip()), key=lambda name: -len(answers[name]))

    def work(left, done):
        known = {name: done.get(name) or [None] * len(rows[name]["rubric_aspects"]) for name in left}
        open_aspects = [[a for a, g in zip(rows[name]["rubric_aspects"], known[name]) if g is None] for name in left]
        pairs = [({**rows[name], "rubric_aspects": some}, answers[name]) for name, some in zip(left, open_aspects)]
        new = {name: iter(grades) for name, grades in zip(left, judge()(pairs))}
        return {name: [g if g is not None else next(new[name]) for g in known[name]] for name in left}

    def finished(grades):
        return grades is not None and None not in grades

    graded = in_batches(work, "grades", names, options.judge_batch_size, folder, accelerator, finished)
    return {name: graded.get(name) or [grade(0)] * len(rows[name]["rubric_aspects"]) for name in rows}


# --- Report -----------------------------------------------------------------------------------------------------------


def question_score(grades) -> float:
    """Coverage of one question: its aspects' grades (0, 1 or 2) over the most they can be."""
    return sum(grades) / (2 * len(grades))


def bootstrap_means(values, samples: int = 10_000, seed: int = 0) -> np.ndarray:
    """Means (samples,) of as many samples, each as large as `values` and drawn from them with replacement."""
    values, generator = np.asarray(values, dtype=float), np.random.default_rng(seed)
    sizes = [min(500, samples - start) for start in range(0, samples, 500)]
    return np.concatenate([values[generator.integers(len(values), size=(size, len(values)))].mean(1) for size in sizes])


def bootstrap(values, samples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of `values`."""
    low, high = np.quantile(bootstrap_means(values, samples, seed), [0.025, 0.975])
    return float(low), float(high)


def paired_difference(a: dict, b: dict) -> tuple[float, float, float, int, int, int]:
    """a - b over the questions that both have ({id: score}): (mean, its 95 % interval's ends, wins of a, ties, losses)."""
    changes = [a[name] - b[name] for name in a if name in b]
    wins, losses = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return (float(np.mean(changes)), *bootstrap(changes), wins, len(changes) - wins - losses, losses)


def summarize(rows, answers, graded, seed) -> dict[str, dict]:
    """The table: for each config, and for macro, the mean of the configs, coverage with its interval and what goes with it."""
    figures, means = {}, []
    for config in sorted({row["config"] for row in rows.values()}):
        names = [name for name in rows if rows[name]["config"] == config]
        scored = [name for name in names if None not in graded[name]]
        if not scored:
            raise InputError(f"config {config!r}: the judge graded none of its {len(names)} questions completely")
        means.append(bootstrap_means([score_of(graded[name]) for name in scored], seed=seed_for(seed, config)))
        figures[config] = {
            "coverage": np.mean([score_of(graded[name]) for name in scored]),
            "expected_coverage": np.mean([score_of(graded[name], "expected") for name in scored]),
            "length": np.mean([answers[name]["tokens"] for name in names]),
            "leaks": np.mean([answers[name]["leaks"] for name in names]),
            "questions": len(scored),
            "empty": sum(not answers[name]["output"].strip() for name in names),
            "failed_calls": sum(one is None for name in names for one in graded[name]),
        }
    configs = list(figures.values())
    figures["macro"] = {
        name: (np.mean if isinstance(value, float) else sum)([config[name] for config in configs])
        for name, value in configs[0].items()
    }
    for figure, of_config in zip(figures.values(), [*means, np.mean(means, axis=0)]):
        figure["low"], figure["high"] = np.quantile(of_config, [0.025, 0.975])
    return {
        config: {name: round(float(value), 6) if isinstance(value, float) else value for name, value in figure.items()}
        for config, figure in figures.items()
    }


def score_of(grades, key: str = "score") -> float:
    return question_score([one[key] for one in grades])


def compare(ours: dict, theirs: dict, path: str) -> dict:
    """What changed against another run: the paired difference, and the ten questions that gained and that lost most."""
    shared = {name: ours[name] - theirs[name] for name in ours if name in theirs}
    mean, low, high, wins, ties, losses = paired_difference(ours, theirs)
    summary = Path(path).with_name("summary.json")
    ranked = sorted(shared, key=lambda name: -shared[name])  # stable: ties as they stand in the data
    return {
        "other": path,
        "other_judge": str(look_up(parse_json(read_text(summary), str(summary)), "judge") or "") if summary.exists() else "",
        "questions": len(shared),
        **{"difference": round(mean, 6), "low": round(low, 6), "high": round(high, 6)},
        **{"wins": wins, "ties": ties, "losses": losses},
        "gained": [[name, theirs[name], ours[name]] for name in ranked[:10] if shared[name] > 0],
        "lost": [[name, theirs[name], ours[name]] for name in ranked[:-11:-1] if shared[name] < 0],
    }


# --- The run ----------------------------------------------------------------------------------------------------------


def load_questions(options: EvaluateOptions, tokenizer, templates) -> tuple[dict, dict, dict]:
    """The rows to answer by id, the prompt of each (token ids; none with --responses), and the account of the rows."""
    if options.responses:
        loaded = load_rows(options.dataset, options.split, options.config)
        prompts, account = {}, {"dataset": options.dataset, "split": options.split, "rows": len(loaded), "left_out": {}}
    else:
        examples, account = load_examples(options, options.dataset, options.split, tokenizer, templates)
        loaded = [example["row"] for example in examples]
        if options.context == "none":
            bare = [student_messages(row, templates, options.answer_format, 0) for row in loaded]
            prompts = {row["id"]: encode_chat(tokenizer, messages) for row, messages in zip(loaded, bare)}
        else:
            key = {"profile": "student", "rubric": "teacher"}[options.context]
            prompts = {example["id"]: example[key] for example in examples}
    rows = {row["id"]: row for row in loaded if row["rubric_aspects"]}
    if len(rows) < len(loaded):
        account["left_out"]["no aspects to grade"] = [row["id"] for row in loaded if row["id"] not in rows]
    return rows, {name: prompts[name] for name in rows if prompts}, {**account, "used": len(rows)}


def check_failures(graded):
    """Raises InputError if too many of the judge's calls failed."""
    calls = [one for grades in graded.values() for one in grades]
    if calls.count(None) > MAX_FAILED * len(calls):
        raise InputError(f"{calls.count(None)} of {len(calls)} judge calls failed; run again to ask for these once more")


def evaluate(options: EvaluateOptions) -> dict:
    """Answer, grade and report as `options` say; returns what is written to summary.json. Raises InputError in the end if
    too many calls of the judge failed."""
    if options.judge != "keywords" and difflib.get_close_matches(options.judge, ["keywords"], 1, 0.8):
        raise InputError(f"--judge is {options.judge!r}; is 'keywords' meant?")
    if not (options.model or options.responses):
        raise InputError("--model or --responses is needed: what answers the questions, or a file of answers")
    folder, accelerator = Path(options.output_dir), quiet_accelerator()
    say, main = accelerator.print, accelerator.is_main_process
    templates, tokenizer = load_templates(options.prompts), load_tokenizer(options.model) if options.model else None
    given = read_responses(options.responses) if options.responses else {}
    theirs = read_scores(options.compare) if options.compare else {}
    with accelerator.main_process_first():  # the others then find what `datasets` cached
        rows, prompts, account = load_questions(options, tokenizer, templates)
    if options.responses:
        missing = [name for name in rows if name not in given]
        account["left_out"] |= {"no answer in the file": missing} if missing else {}
        account["unknown_ids"] = [name for name in given if name not in rows]
        rows = {name: row for name, row in rows.items() if name in given}
        account["used"] = len(rows)
        unknown = account["unknown_ids"]
        strange = f", {len(unknown)} of them to unknown ids ({listed(unknown, 5)})" if unknown else ""
        say(f"{options.responses}: {len(given)} answers{strange}")
    say(describe(account))
    if not rows:
        raise InputError(f"{options.dataset}, {options.split}: no question is left to grade")
    if options.compare and not rows.keys() & theirs.keys():
        raise InputError(f"{options.compare}: none of its questions is among this run's")
    if prompts:
        check_positions(options.model, max(map(len, prompts.values())) + options.max_new_tokens)
    settings = fingerprint(options, rows, templates, bool(prompts)) | {"responses_hash": digest(given)}
    if main:
        check_settings(folder, settings, FREE)
    stored = folder / "responses.json"
    answered = stored.exists()
    accelerator.wait_for_everyone()

    # 1. Answers.
    if answered:
        answers = {name: outputs[0] for name, outputs in json.loads(stored.read_text("utf-8")).items()}
    else:
        answers = {name: {"output": given[name], "tries": 0} for name in rows if given}
        if not given:
            answers = sample_answers(tokenizer, prompts, options, folder, accelerator)
        for name, row in rows.items():
            text = answers[name]["output"]
            answers[name]["tokens"] = len(tokenizer(text, add_special_tokens=False)["input_ids"] if tokenizer else text.split())
            answers[name]["leaks"] = recites(row, text, templates, options)
        if main:
            write_json(stored, {name: [answers[name]] for name in rows})

    # 2. Grades.
    graded = grade_answers(rows, {name: answers[name]["output"] for name in rows}, options, folder, accelerator)

    # 3. Report.
    scores = {name: score_of(graded[name]) for name in rows if None not in graded[name]}
    figures = summarize(rows, answers, graded, options.seed)
    summary = {
        "judge": options.judge,
        "figures": figures,
        "length_unit": "tokens" if tokenizer else "words",
        "rows": account,
        "failed": [name for name in rows if name not in scores],
        "settings": {name: value for name, value in settings.items() if name not in FREE},
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "bitsandbytes", "json-repair")}
        | {"python": platform.python_version()},
    }
    if options.compare:
        summary["comparison"] = compare(scores, theirs, options.compare)
    questions = [
        {
            "id": name,
            "score": scores[name],
            "config": rows[name]["config"],
            "question": rows[name]["question"],
            "details": [{**aspect, **one} for aspect, one in zip(rows[name]["rubric_aspects"], graded[name])],
        }
        for name in scores
    ]
    if main:
        write_json(folder / "scores.json", {"score": figures["macro"]["coverage"], "per_question_scores": questions})
        write_json(folder / "summary.json", summary)
        say(f"{as_table(summary)}\nfor people: {write_page(folder)}")
    check_failures(graded)
    return summary


def write_json(path: Path, value):
    write_file(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run(lambda argv: evaluate(parse_options(EvaluateOptions, argv, needed=("dataset", "judge", "output_dir"))))

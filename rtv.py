"""RTV, Rubric-based Teacher Validation (arXiv 2609.35262): before training, keep only the rows that the teacher can teach.

The teacher answers each training question with the rubric in view, a judge grades each aspect of the answer 0, 1 or 2,
and rows whose coverage s(x) = sum / (2 * aspects) reaches a threshold are kept. What the teacher itself does not cover
when it is told to, its scores cannot teach the student.

    python rtv.py --model TEACHER --dataset D --judge J --threshold 1.0 --output runs/rtv/kept.jsonl
    python rtv.py ... --threshold 0.6          # the same command with another threshold filters again, at once
    python grasp.py --model TEACHER --dataset runs/rtv/kept.jsonl ...

Beside the kept rows, which are those that came in, unchanged and in order, lie answers.jsonl, grades.jsonl (s and the
grades per row) and rtv.json (settings, counts, quantiles of s, the share kept at each threshold). A run that was stopped
goes on where it stood when the same command is given again; rows whose judge failed are asked for again.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from command_line import InputError, option, parse_options, run, write_file
from evaluate import (
    FREE,
    EvaluateOptions,
    check_failures,
    grade_answers,
    load_questions,
    question_score,
    recites,
    sample_answers,
    score_of,
    write_json,
)
from grasp import load_tokenizer
from lamp_qa import describe, load_templates, read_rows
from resumable import check_settings, fingerprint, quiet_accelerator

# options that may differ when a run is continued: they only filter what is there
FREE = FREE | {"output", "threshold", "keep_best", "drop_leaks", "overwrite", "evaluation_judge"}


@dataclass
class RtvOptions(EvaluateOptions):
    """The options of evaluate.py, with the teacher's prompt for a context, and those of the filter."""

    context: ClassVar[str] = "rubric"
    output_dir: ClassVar[str] = ""
    responses: ClassVar[str] = ""
    compare: ClassVar[str] = ""
    model: str = option("", "the teacher: the model that will be trained; a local folder or a hub id", section="Model and data")
    split: str = option("train", "split to filter")
    max_new_tokens: int = option(1024, "longest answer", low=1, section="Answers")
    threshold: float = option(1.0, "rows with at least this coverage s(x) are kept", low=0, high=1, section="Filter")
    output: str = option("", "file for the kept rows (JSON Lines); what led to them is stored beside it")
    samples: int = option(1, "how often the teacher answers a question; s is the mean over its answers", low=1)
    keep_best: bool = option(False, "s is that of the best answer instead")
    drop_leaks: bool = option(False, "also leave out rows on which an answer recites the rubric")
    overwrite: bool = option(False, "start anew, throwing away what an earlier run left")
    evaluation_judge: str = option("Qwen/Qwen2.5-32B-Instruct", "the judge that will measure the student; not to be this one")


def row_score(grades: list[list], keep_best: bool = False) -> float | None:
    """s(x) from the grades (0, 1, 2 or None) of each of the teacher's answers to a row; None if a call of the judge failed.

    The mean is one division of whole numbers, so that a coverage of 0.7 does reach a threshold of 0.7.
    """
    flat = [one for answer in grades for one in answer]
    if None in flat:
        return None
    return max(map(question_score, grades)) if keep_best else question_score(flat)


def sweep(scores) -> list[tuple[float, int]]:
    """How many of the scores reach each threshold 0.0, 0.1, ... 1.0."""
    return [(i / 10, sum(score >= i / 10 for score in scores)) for i in range(11)]


def groups(scores: dict, kept: set, key) -> dict:
    """Rows, share kept and mean s by key(id), in the order of the keys: are the hard rows, or one config's, being dropped?"""
    named = {}
    for name in scores:
        named.setdefault(key(name), []).append(name)
    return {
        str(group): {
            "rows": len(names),
            "kept": len(kept & set(names)),
            "mean": round(sum(scores[name] for name in names) / len(names), 6),
        }
        for group, names in sorted(named.items())
    }


def filter_rows(options: RtvOptions) -> Path:
    """Filter a split as `options` say; returns the file of the kept rows. Raises InputError if none is kept, and in the end
    if too many calls of the judge failed."""
    output = Path(options.output)
    work = output.with_suffix(".work")  # finished batches, and the settings they were made with
    stages = [output] + [output.with_name(name) for name in ("answers.jsonl", "grades.jsonl", "rtv.json")]
    accelerator = quiet_accelerator()
    say, main = accelerator.print, accelerator.is_main_process
    if options.judge == options.evaluation_judge:
        say(f"warning: {options.judge} is also the evaluation's judge: filter and measure should not share one")
    templates, tokenizer = load_templates(options.prompts), load_tokenizer(options.model)
    with accelerator.main_process_first():  # the others then find what `datasets` cached
        rows, prompts, account = load_questions(options, tokenizer, templates)
        raw = list(read_rows(options.dataset, options.split, options.config))
    say(describe(account))
    if output.resolve() in {Path(source).resolve() for source, *_ in raw}:
        raise InputError(f"{output}: is the data set itself; choose another --output")
    settings = fingerprint(options, rows, templates)
    if main:
        if options.overwrite:
            shutil.rmtree(work, ignore_errors=True)
            [path.unlink(missing_ok=True) for path in stages]
        if there := [path for path in stages if path.exists() and not work.exists()]:
            raise InputError(f"{there[0]}: exists already; choose another --output, or give --overwrite")
        check_settings(work, settings, FREE)
    accelerator.wait_for_everyone()

    # 1. The teacher answers, with the rubric in view.
    tries = {f"{name}/{k}": name for name in rows for k in range(options.samples)}  # name of the answer: its row's
    answers = sample_answers(tokenizer, {one: prompts[name] for one, name in tries.items()}, options, work, accelerator)
    for one, name in tries.items():
        answers[one]["leaks"] = recites(rows[name], answers[one]["output"], templates, options)
    per_row = {name: [f"{name}/{k}" for k in range(options.samples)] for name in rows}
    if main:
        write_lines(stages[1], [{"id": name, "answers": [answers[one] for one in per_row[name]]} for name in rows])

    # 2. The judge grades every aspect.
    texts = {one: answers[one]["output"] for one in tries}
    graded = grade_answers({one: rows[name] for one, name in tries.items()}, texts, options, work, accelerator)
    grades = {name: [[g and g["score"] for g in graded[one]] for one in per_row[name]] for name in rows}
    scores = {name: row_score(grades[name], options.keep_best) for name in rows}
    if main:
        lines = [{"id": name, "coverage": scores[name], "grades": [graded[one] for one in per_row[name]]} for name in rows]
        write_lines(stages[2], lines)

    # 3. Rows that reach the threshold stay.
    judged = {name: score for name, score in scores.items() if score is not None}
    leaking = {name for name in rows if any(answers[one]["leaks"] for one in per_row[name])}
    good = [name for name in judged if judged[name] >= options.threshold]
    kept = {name for name in good if not (options.drop_leaks and name in leaking)}
    counts = {
        "kept": len(kept),
        f"coverage below {options.threshold}": len(judged) - len(good),
        **({"answer recites the rubric": len(good) - len(kept)} if options.drop_leaks else {}),
        "unjudged": len(rows) - len(judged),
    }
    report = {
        "rows": account | {"counts": counts, "unjudged": [name for name in rows if name not in judged]},
        "empty_answers": sum(not text.strip() for text in texts.values()),
        "leaks": sum(answer["leaks"] for answer in answers.values()) / len(answers),
        "quantiles": {q: float(np.quantile(list(judged.values()), q)) for q in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1) if judged},
        "kept_at": {threshold: reached / len(judged) for threshold, reached in sweep(judged.values()) if judged},
        "by_aspects": groups(judged, kept, lambda name: len(rows[name]["rubric_aspects"])),
        "by_config": groups(judged, kept, lambda name: rows[name]["config"] or "(none)"),
        "settings": {name: value for name, value in settings.items() if name not in ("output", "overwrite")},
    }
    say(as_text(report, judged, grades, rows))
    if judged and not kept:
        raise InputError(f"no row reaches --threshold {options.threshold}{' without leaking' * bool(good)}; see the shares above")
    if main and judged:
        write_lines(output, [row for _, _, row, _ in raw if row["id"] in kept])
        write_json(stages[3], report)
        say(f"kept {len(kept)} of {len(rows)} rows: {output}")
    check_failures(graded)
    return output


def as_text(report: dict, judged: dict, grades: dict, rows: dict) -> str:
    """The report for a terminal."""
    lines = ["", "| threshold | rows kept | |", "| --- | --- | --- |"]
    lines += [f"| {t:.1f} | {round(share * len(judged))} | {'#' * round(40 * share)} |" for t, share in report["kept_at"].items()]
    for title, key in (("aspects", "by_aspects"), ("config", "by_config")):
        lines += ["", f"| {title} | rows | kept | mean coverage |", "| --- | --- | --- | --- |"]
        lines += [f"| {group} | {f['rows']} | {f['kept']} | {f['mean']:.3f} |" for group, f in report[key].items()]
    ranked = sorted(judged, key=lambda name: -judged[name])  # stable: ties as they stand in the data
    for title, names in (("best", ranked[:3]), ("worst", ranked[:-4:-1])):
        lines += ["", f"{title}:"]
        for name in names:
            best = map(max, zip(*grades[name]))
            missed = [aspect["aspect"] for aspect, one in zip(rows[name]["rubric_aspects"], best) if one < 2]
            lines.append(f"  {judged[name]:.3f} {name}: {rows[name]['question']}; missed: {', '.join(missed) or 'nothing'}")
    unjudged = report["rows"]["unjudged"]
    lines += ["", f"empty answers: {report['empty_answers']}; answers that recite the rubric: {report['leaks']:.3f}"]
    lines += [f"unjudged, the next run asks again: {len(unjudged)} ({', '.join(unjudged[:5])})"] * bool(unjudged)
    return "\n".join(lines)


def write_lines(path: Path, rows):
    write_file(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))


if __name__ == "__main__":
    run(lambda argv: filter_rows(parse_options(RtvOptions, argv, needed=("model", "dataset", "judge", "output"))))

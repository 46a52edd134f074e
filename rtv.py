"""RTV, Rubric-based Teacher Validation (arXiv 2609.35262): before training, keep only the rows that the teacher can teach.

The teacher answers each training question with the rubric in view, a judge grades each aspect of the answer 0, 1 or 2,
and rows whose coverage s(x) = sum / (2 * aspects) reaches a threshold are kept. What the teacher itself does not cover
when it is told to, its scores cannot teach the student.

    python rtv.py --model TEACHER --dataset D --judge J --threshold 1.0 --output runs/rtv/kept.jsonl
    python rtv.py ... --threshold 0.6          # the same command with another threshold filters again, at once
    python grasp.py --model TEACHER --dataset runs/rtv/kept.jsonl ...

The kept rows are those that came in, unchanged and in order. Beside them: answers.jsonl, grades.jsonl, and rtv.json with
settings, counts, quantiles of s and the share kept at each threshold. A run that was stopped goes on where it stood when the
same command is given again; so do rows whose judge failed.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from checkpoint import check_positions
from command_line import InputError, option, parse_options, run, write_lines
from evaluate import (
    FREE,
    EvaluateOptions,
    check_failures,
    grade_answers,
    load_questions,
    question_score,
    recites,
    sample_answers,
    write_json,
)
from grasp import load_tokenizer
from lamp_qa import describe, load_templates, read_rows
from resumable import check_settings, fingerprint, quiet_accelerator
from view import as_sweep

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


def groups(scores: dict, kept: set, key) -> dict:
    """Rows, kept rows and mean s by key(id): are the hard rows, or one config's, being dropped?"""
    of_group = {group: [name for name in scores if key(name) == group] for group in sorted(set(map(key, scores)))}
    return {
        str(group): {"rows": len(names), "kept": len(kept & set(names)), "mean": float(np.mean([scores[n] for n in names]))}
        for group, names in of_group.items()
    }


def filter_rows(options: RtvOptions) -> Path:
    """Filter a split as `options` say; returns the file of the kept rows. Raises InputError if none is kept, and in the end
    if too many calls of the judge failed."""
    output = Path(options.output)
    work = output.with_suffix(".work")  # finished batches, and the settings they were made with
    stages = [output, *map(output.with_name, ("answers.jsonl", "grades.jsonl", "rtv.json"))]
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
    check_positions(options.model, max(map(len, prompts.values()), default=0) + options.max_new_tokens)
    settings = fingerprint(options, rows, templates)
    if main:
        for path in stages:
            if path.exists() and not work.exists() and not options.overwrite:
                raise InputError(f"{path}: exists already; choose an --output in another folder, or give --overwrite")
        if options.overwrite:
            shutil.rmtree(work, ignore_errors=True)
            [path.unlink(missing_ok=True) for path in stages]
        check_settings(work, settings, FREE)
    accelerator.wait_for_everyone()

    # 1. The teacher answers, with the rubric in view.
    names = {row: [f"{row}/{k}" for k in range(options.samples)] for row in rows}  # of the answers to a row
    owner = {name: row for row, its_names in names.items() for name in its_names}
    asked = {name: prompts[row] for name, row in owner.items()}
    answers = sample_answers(tokenizer, asked, options, work, accelerator)
    for name, row in owner.items():
        answers[name]["leaks"] = recites(rows[row], answers[name]["output"], templates, options)

    # 2. The judge grades every aspect.
    texts = {name: answers[name]["output"] for name in owner}
    graded = grade_answers({name: rows[row] for name, row in owner.items()}, texts, options, work, accelerator)
    grades = {row: [[grade and grade["score"] for grade in graded[name]] for name in names[row]] for row in rows}
    scores = {row: row_score(grades[row], options.keep_best) for row in rows}
    if main:
        write_lines(stages[1], [{"id": row, "answers": [answers[name] for name in names[row]]} for row in rows])
        of_row = [{"id": row, "coverage": scores[row], "grades": [graded[name] for name in names[row]]} for row in rows]
        write_lines(stages[2], of_row)

    # 3. Rows that reach the threshold stay.
    judged = {row: score for row, score in scores.items() if score is not None}
    good = [row for row, score in judged.items() if score >= options.threshold]
    leaking = {row for row in rows if any(answers[name]["leaks"] for name in names[row])}
    kept = set(good) - (leaking if options.drop_leaks else set())
    values, shares = list(judged.values()) or [0.0], [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]
    report = {
        **account,
        "kept": len(kept),
        "below_threshold": len(judged) - len(good),
        "dropped_for_leaks": len(good) - len(kept),
        "unjudged": [row for row in rows if row not in judged],
        "empty_answers": sum(not text.strip() for text in texts.values()),
        "leaks": float(np.mean([answer["leaks"] for answer in answers.values()])),
        "quantiles": dict(zip(shares, np.quantile(values, shares).tolist())),
        "kept_at": {i / 10: float(np.mean([score >= i / 10 for score in values])) for i in range(11)},
        "by_aspects": groups(judged, kept, lambda row: len(rows[row]["rubric_aspects"])),
        "by_config": groups(judged, kept, lambda row: rows[row]["config"] or "(none)"),
        "settings": {name: value for name, value in settings.items() if name not in ("output", "overwrite")},
    }
    say(as_sweep(report, judged, grades, rows))
    if judged and not kept:
        raise InputError(
            f"no row reaches --threshold {options.threshold}{' without leaking' * bool(good)}; see the shares above"
        )
    if main and judged:
        write_lines(output, [row for _, _, row, _ in raw if row["id"] in kept])
        write_json(stages[3], report)
        say(f"kept {len(kept)} of {len(rows)} rows: {output}")
    check_failures(graded)
    return output


if __name__ == "__main__":
    run(lambda argv: filter_rows(parse_options(RtvOptions, argv, needed=("model", "dataset", "judge", "output"))))

"""Results for people: the table in the terminal, and one self-contained page that opens without a network.

    python view.py results/mine        # writes results/mine/index.html; evaluate.py does so at its end
    python view.py runs/mine           # the same for a training run; grasp.py does so at its end

The page of results shows the table, the intervals as a picture, and each question with its answer, aspects and grades; after
`evaluate.py --compare`, the other run's stand beside them. The page of a training run shows answers on the way, each token
shaded by its divergence, and the curves. They are `view.html` and `view_run.html` with the data put in as JSON.
"""

import json
from pathlib import Path

from command_line import InputError, first_line, listed, read_yaml, run, write_file


def as_table(summary: dict) -> str:
    """The report for a terminal, in Markdown."""
    unit = summary["length_unit"]
    lines = [f"| config | coverage | 95 % interval | questions | empty | {unit} | leaks | failed calls |", "| --- " * 8 + "|"]
    for config, f in summary["figures"].items():
        figures = f"{f['coverage']:.3f} | {f['low']:.3f} to {f['high']:.3f} | {f['questions']} | {f['empty']}"
        lines.append(f"| {config or '(none)'} | {figures} | {f['length']:.0f} | {f['leaks']:.3f} | {f['failed_calls']} |")
    lines.append(
        f"\ncoverage by {summary['judge']}" + " (a word count: not comparable with LaMP-QA)" * (summary["judge"] == "keywords")
    )
    if "comparison" in summary:
        c = summary["comparison"]
        lines.append(
            f"against {c['other']}, {c['questions']} questions: {c['difference']:+.3f} ({c['low']:+.3f} to {c['high']:+.3f}), "
            f"{c['wins']} better, {c['ties']} equal, {c['losses']} worse"
        )
        if c["other_judge"] not in ("", summary["judge"]):
            lines.append(f"  that run was graded by {c['other_judge']}: the difference is also one between judges")
        for word in ("gained", "lost"):
            lines += [f"  {word}: {listed([name], 1)}, {theirs:.3f} to {our:.3f}" for name, theirs, our in c[word]]
    return "\n".join(lines)


def as_sweep(report: dict, scores: dict, grades: dict, rows: dict) -> str:
    """What rtv.py reports, for a terminal: by id, `scores` hold s, `grades` a list per answer, and `rows` the judged rows."""
    lines = ["", "| threshold | rows kept | |", "| --- | --- | --- |"]
    for threshold, share in report["kept_at"].items():
        lines.append(f"| {threshold:.1f} | {round(share * len(scores))} | {'#' * round(40 * share)} |")
    for title in ("aspects", "config"):
        lines += ["", f"| {title} | rows | kept | mean coverage |", "| --- | --- | --- | --- |"]
        for group, figures in report[f"by_{title}"].items():
            lines.append(f"| {group} | {figures['rows']} | {figures['kept']} | {figures['mean']:.3f} |")
    ranked = sorted(scores, key=lambda name: -scores[name])  # stable: ties as they stand in the data
    for title, names in (("best", ranked[:3]), ("worst", ranked[:-4:-1])):
        lines += ["", f"{title}:"]
        for name in names:
            best = map(max, zip(*grades[name]))
            missed = [aspect["aspect"] for aspect, grade in zip(rows[name]["rubric_aspects"], best) if grade < 2]
            asked = f"{listed([name], 1)}: {listed([rows[name]['question']], 1)}"
            lines.append(f"  {scores[name]:.3f} {asked}; missed: {listed(missed, 9) or 'nothing'}")
    lines.append(f"\nempty answers: {report['empty_answers']}; share that recites the rubric: {report['leaks']:.3f}")
    if unjudged := report["unjudged"]:
        lines.append(f"unjudged, the next run asks again: {len(unjudged)} ({listed(unjudged, 5)})")
    return "\n".join(lines)


def write_page(folder: Path) -> Path:
    """Write FOLDER/index.html from the summary.json, scores.json and responses.json beside it; returns its path."""
    summary, questions = read_results(folder)
    comparison = summary.get("comparison")
    if comparison:
        try:
            theirs, others = read_results(Path(comparison["other"]).parent)
        except InputError:  # only its scores.json was kept, or it has moved
            theirs, others = {}, {}
        for name, question in questions.items():
            question["other"] = others.get(name)
        summary["other_figures"] = theirs.get("figures")
    return fill("view.html", {"summary": summary, "questions": list(questions.values())}, folder)


def write_run_page(folder: Path) -> Path:
    """Write FOLDER/index.html for a training run; returns its path. Raises InputError naming a missing or broken file."""
    return fill("view_run.html", read_run(folder), folder)


def fill(template: str, data: dict, folder: Path) -> Path:
    """Write FOLDER/index.html: the template with the data put in, as ASCII, so that no text in them is beyond UTF-8."""
    data = json.loads(json.dumps(data), parse_constant=lambda name: None)  # a browser's JSON has no NaN
    # inside a script element only "<" could end the data; everything is shown as text by the page, never as HTML
    text = json.dumps(data).replace("<", "\\u003c")
    write_file(folder / "index.html", Path(__file__).with_name(template).read_text("utf-8").replace("RESULTS_AS_JSON", text))
    return folder / "index.html"


def read_results(folder: Path) -> tuple[dict, dict]:
    """A run's summary, and by id its questions with their answers. Raises InputError if a file is missing or no such one."""
    try:
        names = ("summary.json", "scores.json", "responses.json")
        summary, scores, responses = (json.loads((folder / name).read_text("utf-8")) for name in names)
        answers = {name: outputs[0] for name, outputs in responses.items()}
        questions = {question["id"]: {**question, **answers[question["id"]]} for question in scores["per_question_scores"]}
        return summary, questions
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: expected the results of evaluate.py, or a run of grasp.py: {first_line(error)}") from error


def read_run(folder: Path) -> dict:
    """What view_run.html shows: settings and row counts, metrics, and per step with rollouts the answer to each question.

    A token is [text, teacher's favourite, divergence, student's, teacher's and favourite's probability], since there are many.
    No folder of the machine is in it. Raises InputError that names a missing or broken file.
    """
    from checkpoint import read_metrics  # here, since it loads torch, which the results of an evaluation do without

    questions, answers, path = {}, {}, folder / "options.yaml"
    try:
        options = read_yaml(str(path))
        about = {name: options[name] for name in ("divergence", "privileged", "learning_rate", "batch_size", "seed")}
        about |= {"model": no_folder(options["model"]), "parts": []}
        path = folder / "data.json"
        account = json.loads(path.read_text("utf-8"))
        for part in [account[name] for name in ("train", "held_out") if name in account]:
            counts = {why: len(ids) for why, ids in part["left_out"].items()}
            about["parts"].append(part | {"dataset": no_folder(part["dataset"]), "left_out": counts})
        path = folder / "metrics.jsonl"
        metrics = sorted(read_metrics(folder), key=lambda line: line["step"])
        for path in sorted(folder.glob("rollouts/step-*.json")):
            rollouts = json.loads(path.read_text("utf-8"))
            answers[int(rollouts["step"])] = of_step = {}
            for row in rollouts["rows"]:
                questions.setdefault(row["id"], {name: row[name] for name in ("id", "config", "question", "posts", "rubric")})
                of_step[row["id"]] = {"text": row["text"], "tokens": [as_list(token) for token in row["tokens"]]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: expected a file of a training run: {first_line(error)}") from error
    steps = [{"step": step, "answers": [of_step.get(name) for name in questions]} for step, of_step in answers.items()]
    return {"about": about, "metrics": metrics, "questions": list(questions.values()), "steps": steps}


def as_list(token: dict) -> list:
    numbers = [token[name] for name in ("divergence", "student", "teacher", "favourite_probability")]
    return [token["text"], token["favourite"], *(float(f"{number:.4g}") for number in numbers)]


def no_folder(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path


def main(argv: list[str]):
    if argv in (["--help"], ["-h"]):
        print(__doc__)
        return
    if len(argv) != 1 or argv[0].startswith("-"):
        raise InputError("usage: python view.py FOLDER, the results of evaluate.py or a run of grasp.py")
    folder = Path(argv[0])
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    print(write_run_page(folder) if (folder / "metrics.jsonl").exists() else write_page(folder))


if __name__ == "__main__":
    run(main)

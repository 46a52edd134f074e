"""The demo: train SmolLM2-135M by GRASP on `demo/data`, then show what it learned about users it has never seen.

    python demo/run.py                     # seed 0
    python demo/run.py --seed 1 --output-dir demo/runs/seed-1     # every option of grasp.py works here too

Three answers to each test question are compared: the base model's and the student's, who see the user's posts, and the
teacher's, who sees the rubric as well; all sampled at temperature 0.7 (greedy, a model this small repeats itself) with the
same seeds. Coverage is the plain keyword measure of `evaluate.py`; it says nothing about how good an answer is otherwise
and cannot be compared with LaMP-QA's figures, which a judge model gives.
"""

import json
import sys
import time
from pathlib import Path

import model

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from command_line import parse_options, run, write_file  # noqa: E402
from evaluate import bootstrap, paired_difference, question_score  # noqa: E402
from grasp import GraspOptions, load_model, load_tokenizer, measure, sample_completions, seed_for, train  # noqa: E402
from judges import keyword_grade  # noqa: E402
from lamp_qa import leaks, load_examples, load_templates, stop_ids  # noqa: E402


def answers(chat_model, examples, kind, tokenizer, options) -> tuple[list[str], list[int]]:
    """Answers to the `kind` ("student" or "teacher") prompts, as texts and as lengths in tokens."""
    prompts, stop = [example[kind] for example in examples], stop_ids(chat_model, tokenizer)
    seeds = [seed_for("demo", example["id"]) for example in examples]
    sampled = sample_completions(
        chat_model, prompts, stop, options.max_new_tokens, seeds, 0.7, batch_size=options.generation_batch_size
    )
    return tokenizer.batch_decode(sampled, skip_special_tokens=True), [len(ids) for ids in sampled]


def report(name, texts, lengths, examples, reverse_kl=None) -> dict:
    """One row of the table, and the coverage per question."""
    scores = {
        example["id"]: question_score([keyword_grade(aspect, text) for aspect in example["row"]["rubric_aspects"]])
        for example, text in zip(examples, texts)
    }
    leaking = [leaks(text, example["privileged"], example["prompt"]) for text, example in zip(texts, examples)]
    return {
        "name": name,
        "coverage": sum(scores.values()) / len(scores),
        "interval": bootstrap(list(scores.values())),
        "leaks": sum(leaking) / len(leaking),
        "reverse_kl": reverse_kl,
        "length": sum(lengths) / len(lengths),
        "scores": scores,
    }


def main(argv):
    began = time.perf_counter()
    options = parse_options(GraspOptions, [str(HERE.parent / "configs" / "demo.yaml"), *argv])
    model.fetch()
    tokenizer, templates = load_tokenizer(options.model), load_templates(options.prompts)
    test, _ = load_examples(options, options.dataset, "test", tokenizer, templates)
    folder = train(options)
    if options.dry_run:
        return
    student = load_model(str(folder), options.dtype).eval()
    base = load_model(options.model, options.dtype).eval()  # the base model and the teacher are the same weights
    print(f"trained after {time.perf_counter() - began:.0f} s; answering {len(test)} questions of users not trained on")

    stop = stop_ids(base, tokenizer)
    before, after, informed = (
        answers(*which, tokenizer, options)
        for which in ((base, test, "student"), (student, test, "student"), (base, test, "teacher"))
    )
    distance = {m: measure(m, base, test, stop, tokenizer, options)["reverse_kl"] for m in (base, student)}
    rows = [
        report("base model", *before, test, distance[base]),
        report("student", *after, test, distance[student]),
        report("teacher (sees the rubric)", *informed, test),
    ]
    print(f"\n| {len(test)} test questions | keyword coverage | 95 % interval | leaks | reverse KL | tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        low, high = row["interval"]
        kl = "" if row["reverse_kl"] is None else f"{row['reverse_kl']:.4f}"
        figures = f"{row['coverage']:.3f} | {low:.3f} to {high:.3f} | {row['leaks']:.3f} | {kl} | {row['length']:.0f}"
        print(f"| {row['name']} | {figures} |")
    mean, low, high, wins, ties, losses = paired_difference(rows[1]["scores"], rows[0]["scores"])
    times = rows[1]["coverage"] / max(rows[0]["coverage"], 1e-9)
    print(f"\nstudent's coverage: {times:.2f} times the base's; question by question {mean:+.3f}, 95 % interval {low:+.3f} to")
    print(f"{high:+.3f}, {wins} wins, {ties} ties, {losses} losses")
    gains = [rows[1]["scores"][example["id"]] - rows[0]["scores"][example["id"]] for example in test]
    shown = gains.index(max(gains))
    print(f"\nThe question that gained most: {test[shown]['row']['question']}")
    print("  posts:   " + " ".join(test[shown]["row"]["profile"]))
    print("  rubric:  " + ", ".join(aspect["aspect"] for aspect in test[shown]["row"]["rubric_aspects"]))
    for name, (texts, _) in (("before", before), ("after", after)):
        print(f"  {name + ':':<8} " + " ".join(texts[shown].split()))
    results = {"seed": options.seed, "rows": rows, "difference": [mean, low, high], "seconds": time.perf_counter() - began}
    write_file(Path(options.output_dir) / "demo.json", json.dumps(results, indent=1))
    print(f"\n{results['seconds']:.0f} s in all; the model is in {options.output_dir}/model")


if __name__ == "__main__":
    run(main)

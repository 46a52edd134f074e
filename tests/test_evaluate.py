"""evaluate.py end to end on toy data: the protocol's arithmetic, its files, stopping and going on, several processes."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, kill_and_continue, make_model, toy_rows, write_rows
from test_judges import Server, reply, right_score

import evaluate as ev
import judges
from command_line import InputError, parse_options
from evaluate import EvaluateOptions, bootstrap, evaluate, paired_difference, question_score
from lamp_qa import load_rows
from replies import read_responses
from resumable import read_work

FILES = ("responses.json", "scores.json", "summary.json", "index.html", "work-0.jsonl")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three configs of 5, 4 and 3 questions."""
    folder = tmp_path_factory.mktemp("lamp")
    for config, start, count in (("Art", 0, 5), ("Life", 20, 4), ("Society", 40, 3)):
        write_rows(folder / config / "test.jsonl", toy_rows(count, start=start))
    return folder


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("judge")
    make_model("llama", seed=5, max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(data, tmp_path):
    """run(name=value, ...) evaluates with these options into tmp_path/out and returns the summary."""

    def make(**settings):
        usual = dict(dataset=str(data), output_dir=str(tmp_path / "out"), judge="keywords", max_new_tokens=8, dtype="float32")
        return evaluate(EvaluateOptions(**{**usual, "answer_format": "text", "generation_batch_size": 3, **settings}))

    return make


def write_json(path, value):
    path.write_text(json.dumps(value), "utf-8")
    return str(path)


def read_json(path):
    return json.loads(path.read_text("utf-8"))


def answers_for(data, text="An answer about garden."):
    return {row["id"]: [{"output": text}] for row in load_rows(str(data), "test")}


# --- The protocol -----------------------------------------------------------------------------------------------------


def scripted(monkeypatch, grades):
    """A judge that gives the grades (a list per id) in the order of the aspects."""

    def judge(pairs):
        return [[None if g is None else judges.grade(g) for g in grades[row["id"]]] for row, _ in pairs]

    monkeypatch.setattr(ev, "load_judge", lambda spec, options: judge)


def test_question_scores_config_means_and_macro_mean_equal_hand_computed_ones(run, data, tmp_path, monkeypatch):
    answers = answers_for(data)
    answers["q3"] = [{"output": " \n"}]  # empty: 0, whatever the judge would say
    grades = {name: [2, 2] for name in answers} | {"q0": [0, 1], "q1": [2, 1], "q20": [0, 0], "q42": [1, 0]}
    scripted(monkeypatch, grades)
    summary = run(responses=write_json(tmp_path / "answers.json", answers))
    art, life, society = (0.25 + 0.75 + 1 + 0 + 1) / 5, (0 + 1 + 1 + 1) / 4, (1 + 1 + 0.25) / 3
    figures = summary["figures"]
    assert {config: f["coverage"] for config, f in figures.items()} == pytest.approx(
        {"Art": art, "Life": life, "Society": society, "macro": (art + life + society) / 3}, abs=1e-6
    )
    assert [figures[config]["questions"] for config in figures] == [5, 4, 3, 12]
    assert figures["Art"]["empty"] == 1 and figures["macro"]["empty"] == 1
    assert all(f["low"] <= f["coverage"] <= f["high"] for f in figures.values())
    scores = read_json(tmp_path / "out" / "scores.json")
    assert scores["score"] == figures["macro"]["coverage"]
    by_id = {question["id"]: question for question in scores["per_question_scores"]}
    assert by_id["q1"]["score"] == 0.75 and [d["score"] for d in by_id["q1"]["details"]] == [2, 1]
    assert by_id["q1"]["details"][0]["aspect"] == "what it means for tea"
    assert by_id["q3"]["score"] == 0
    responses = read_json(tmp_path / "out" / "responses.json")
    assert {name: outputs[0]["output"] for name, outputs in responses.items()} == {
        n: o[0]["output"] for n, o in answers.items()
    }


def fake_sampling(monkeypatch, tokenizer, texts):
    """Let the model write texts(call number) instead; returns the list of the temperatures asked for."""
    calls = []

    def sample(model, prompts, stop, max_new_tokens, seeds, temperature, top_p, batch_size):
        assert top_p == 0.95 and len(set(seeds)) == len(prompts)
        calls.append((round(temperature, 6), len(prompts), tuple(seeds)))
        return [tokenizer(text)["input_ids"] for text in texts(len(calls) - 1, len(prompts))]

    monkeypatch.setattr(ev, "sample_completions", sample)
    return calls


def test_resampling_is_hotter_each_time_and_stops_at_20(run, tokenizer, model_folder, monkeypatch):
    calls = fake_sampling(monkeypatch, tokenizer, lambda call, rows: ["no JSON here"] * rows)
    summary = run(model=str(model_folder), answer_format="json", generation_batch_size=12)
    temperatures = [call[0] for call in calls]
    assert temperatures == [round(min(1.0, 0.1 + 0.1 * i), 6) for i in range(21)]  # once, and 20 times again
    assert len({call[2] for call in calls}) == 21  # other random numbers each time
    assert summary["figures"]["macro"]["coverage"] == 0 and summary["figures"]["macro"]["empty"] == 12


def test_only_answers_that_cannot_be_read_are_sampled_again(run, tokenizer, model_folder, monkeypatch, tmp_path):
    good = '{"personalized_answer": "All about garden."}'
    texts = [[good] * 10 + ["no", '{"answer": "no"}'], ["no", good], [good]]
    calls = fake_sampling(monkeypatch, tokenizer, lambda call, rows: texts[call])
    run(model=str(model_folder), answer_format="json", generation_batch_size=12)
    assert [call[1] for call in calls] == [12, 2, 1]
    responses = read_json(tmp_path / "out" / "responses.json")
    assert sorted(outputs[0]["tries"] for outputs in responses.values()) == [1] * 10 + [2, 3]
    assert {outputs[0]["output"] for outputs in responses.values()} == {"All about garden."}


def test_the_three_contexts_are_no_posts_the_students_prompt_and_the_teachers(data, tokenizer):
    prompts = {}
    for context in ("none", "profile", "rubric"):
        options = EvaluateOptions(dataset=str(data), context=context, answer_format="text")
        _, ids, _ = ev.load_questions(options, tokenizer, ev.load_templates())
        prompts[context] = tokenizer.decode(ids["q1"])
    row = next(row for row in load_rows(str(data), "test") if row["id"] == "q1")
    assert all(row["question"] in prompt for prompt in prompts.values())
    assert [row["profile"][0] in prompt for prompt in prompts.values()] == [False, True, True]
    assert [row["rubric_aspects"][0]["aspect"] in prompt for prompt in prompts.values()] == [False, False, True]
    assert not any(row["narrative"] in prompt for prompt in prompts.values())


def test_leaks_are_counted_beside_coverage(run, data, tmp_path):
    answers = answers_for(data)
    row = load_rows(str(data), "test")[0]
    answers["q0"] = [{"output": f"As you said: {row['rubric_aspects'][0]['aspect']}."}]
    summary = run(responses=write_json(tmp_path / "answers.json", answers))
    assert summary["figures"]["Art"]["leaks"] == pytest.approx(1 / 5) and summary["figures"]["Life"]["leaks"] == 0


# --- Files ------------------------------------------------------------------------------------------------------------


def test_responses_and_scores_round_trip(run, data, model_folder, tmp_path):
    first = run(model=str(model_folder), output_dir=str(tmp_path / "a"))
    again = run(model=str(model_folder), responses=str(tmp_path / "a" / "responses.json"), output_dir=str(tmp_path / "b"))
    assert first["figures"] == again["figures"]
    a, b = (read_json(tmp_path / name / "scores.json") for name in "ab")
    assert a == b
    same = run(
        responses=str(tmp_path / "a" / "responses.json"),
        output_dir=str(tmp_path / "c"),
        compare=str(tmp_path / "a/scores.json"),
    )
    comparison = same["comparison"]
    assert (comparison["difference"], comparison["wins"], comparison["ties"], comparison["losses"]) == (0, 0, 12, 0)


def test_a_file_of_others_is_read_as_they_would_read_it(tmp_path):
    others = {
        "several": [{"output": "first"}, {"output": "second"}],
        "extra": [{"output": "x", "prompt": "p", "logprobs": [1]}],
        "number": [{"output": 7}],
        "list": [{"output": ["a", "b"]}],
        "none": [{"output": None}],
        "no answer": [],
        "unicode": [{"output": "שלום 😢"}],
    }
    assert read_responses(write_json(tmp_path / "r.json", others)) == {
        "several": "first",
        "extra": "x",
        "number": "7",
        "list": "['a', 'b']",
        "none": "",
        "no answer": "",
        "unicode": "שלום 😢",
    }


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1]", "expected an object"),
        ('{"q1": "text"}', "'q1'.*expected a list"),
        ('{"q1": [{"answer": "x"}]}', "'q1'.*output"),
        ("{", "expected JSON"),
    ],
)
def test_a_wrong_responses_file_is_named(run, tmp_path, content, message):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(InputError, match=f"r.json.*{message}"):
        run(responses=str(tmp_path / "r.json"))
    assert not (tmp_path / "out").exists()


def test_missing_and_unknown_ids_are_reported_and_missing_ones_have_no_score(run, data, tmp_path, capsys):
    answers = answers_for(data)
    del answers["q20"], answers["q0"]
    summary = run(responses=write_json(tmp_path / "answers.json", answers | {"q999": [{"output": "x"}]}))
    assert summary["rows"]["left_out"] == {"no answer in the file": ["q0", "q20"]}
    assert summary["rows"]["unknown_ids"] == ["q999"] and summary["rows"]["used"] == 10
    assert summary["figures"]["macro"]["questions"] == 10 and summary["figures"]["macro"]["empty"] == 0
    printed = capsys.readouterr().out
    assert "q999" in printed and "q20" in printed and "not comparable with LaMP-QA" in printed


def test_compare_shows_what_changed_most(run, data, tmp_path, capsys, monkeypatch):
    rows = load_rows(str(data), "test")
    base = {row["id"]: [{"output": "Nothing."}] for row in rows}
    base["q41"] = [{"output": " ".join(a["aspect"] for a in rows[10]["rubric_aspects"])}]
    better = {row["id"]: [{"output": row["rubric_aspects"][0]["aspect"]}] for row in rows[:3]} | {
        row["id"]: [{"output": "Nothing."}] for row in rows[3:]
    }
    run(responses=write_json(tmp_path / "a.json", base), output_dir=str(tmp_path / "a"))
    ours = dict(responses=write_json(tmp_path / "b.json", better), compare=str(tmp_path / "a/scores.json"))
    summary = run(**ours, output_dir=str(tmp_path / "b"))
    c = summary["comparison"]
    assert (c["wins"], c["ties"], c["losses"]) == (3, 8, 1)
    assert {name for name, *_ in c["gained"]} == {"q0", "q1", "q2"} and c["lost"] == [["q41", 1.0, 0.0]]
    printed = capsys.readouterr().out
    assert "3 better, 8 equal, 1 worse" in printed and "between judges" not in printed
    scripted(monkeypatch, {row["id"]: [2, 2] for row in rows})
    run(**ours, judge="http://other", output_dir=str(tmp_path / "d"))
    assert "between judges" in capsys.readouterr().out
    foreign = write_json(tmp_path / "foreign.json", {"per_question_scores": [{"id": "q999", "score": 1}]})
    for bad, message in (
        ("missing.json", "missing.json"),
        (str(tmp_path / "a.json"), "per_question_scores"),
        (foreign, "none of its"),
    ):
        with pytest.raises(InputError, match=message):
            run(responses=str(tmp_path / "b.json"), output_dir=str(tmp_path / "c"), compare=bad)


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_question_score():
    assert question_score([0, 1, 2]) == 0.5 and question_score([2]) == 1 and question_score([0, 0]) == 0


def test_bootstrap_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).normal(0.4, 0.2, 400)
    low, high = bootstrap(values)
    error = 1.96 * values.std() / math.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.002)
    assert bootstrap(values) == (low, high) != bootstrap(values, seed=1)
    assert bootstrap([0.5, 0.5]) == (0.5, 0.5)


def test_paired_difference_looks_only_at_questions_of_both():
    a, b = {"x": 1.0, "y": 0.5, "z": 0.0, "only a": 1}, {"x": 0.5, "y": 0.5, "z": 0.25, "only b": 0}
    mean, low, high, wins, ties, losses = paired_difference(a, b)
    assert mean == pytest.approx(0.25 / 3) and low <= mean <= high and (wins, ties, losses) == (1, 1, 1)


# --- Failing judges ---------------------------------------------------------------------------------------------------


def test_a_failed_call_is_no_score_ends_non_zero_and_is_asked_again_by_the_next_run(run, data, tmp_path, monkeypatch):
    answers = write_json(tmp_path / "answers.json", answers_for(data))
    good = {name: [1, 2] for name in answers_for(data)}
    scripted(monkeypatch, good | {"q1": [1, None]})
    with pytest.raises(InputError, match="1 of 24 judge calls failed"):
        run(responses=answers)
    summary = read_json(tmp_path / "out" / "summary.json")
    assert summary["failed"] == ["q1"] and summary["figures"]["Art"]["questions"] == 4
    assert summary["figures"]["macro"]["failed_calls"] == 1
    assert "q1" not in {q["id"] for q in read_json(tmp_path / "out" / "scores.json")["per_question_scores"]}

    asked = []

    def judge(pairs):
        asked.extend((row["id"], aspect["aspect"]) for row, _ in pairs for aspect in row["rubric_aspects"])
        return [[judges.grade(2) for _ in row["rubric_aspects"]] for row, _ in pairs]

    monkeypatch.setattr(ev, "load_judge", lambda spec, options: judge)
    summary = run(responses=answers)
    assert asked == [("q1", toy_rows(2)[1]["rubric_aspects"][1]["aspect"])]  # that one alone
    assert summary["failed"] == [] and summary["figures"]["Art"]["coverage"] == 0.75


def graded_aspects(folder):
    return sum(grade is not None for grades in read_work(folder, "grades").values() for grade in grades)


@pytest.mark.parametrize("alive", [0, 11])
def test_a_server_that_is_dead_keeps_what_was_graded_and_a_second_run_completes_the_rest(
    run, data, tmp_path, monkeypatch, alive
):
    monkeypatch.setattr(judges.time, "sleep", lambda seconds: None)
    answers = write_json(tmp_path / "answers.json", answers_for(data))

    def right(request):
        return reply(json.dumps({"match_score": right_score(request)}))

    with Server(lambda number, request: right(request) if number < alive else (None, {}, b"")) as server:
        with pytest.raises(InputError, match="does not answer") as error:
            run(responses=answers, judge=server.url, judge_workers=2)
        assert "\n" not in str(error.value)
        kept = graded_aspects(tmp_path / "out")
        assert kept == alive and not (tmp_path / "out" / "scores.json").exists()
        address = server.http.server_address
    with Server(lambda number, request: right(request), address) as server:
        summary = run(responses=answers, judge=server.url, judge_workers=2)
        assert len(server.calls) == 24 - kept
    expected = {row["id"]: [len(a["aspect"]) % 3 for a in row["rubric_aspects"]] for row in load_rows(str(data), "test")}
    scores = read_json(tmp_path / "out" / "scores.json")["per_question_scores"]
    assert {q["id"]: [d["score"] for d in q["details"]] for q in scores} == expected and summary["failed"] == []


# --- Stopping and going on --------------------------------------------------------------------------------------------


def test_going_on_with_other_settings_or_in_a_foreign_folder_is_refused(run, data, tmp_path, model_folder):
    run(model=str(model_folder))
    for changed in (dict(seed=1), dict(temperature=0.5), dict(context="none")):
        with pytest.raises(InputError, match=f"cannot go on with other settings: {next(iter(changed))} was"):
            run(model=str(model_folder), **changed)
    more = write_rows(tmp_path / "more" / "test.jsonl", toy_rows(3))
    with pytest.raises(InputError, match="rows_hash"):
        run(model=str(model_folder), dataset=str(more))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="already holds files"):
        run(model=str(model_folder), output_dir=str(tmp_path / "foreign"))


def test_a_finished_run_given_again_computes_nothing_and_changes_nothing(run, model_folder, tmp_path, monkeypatch):
    run(model=str(model_folder))
    before = {name: (tmp_path / "out" / name).read_bytes() for name in FILES}
    monkeypatch.setattr(ev, "load_model", lambda *_: 1 / 0)
    monkeypatch.setattr(ev, "load_judge", lambda *_: 1 / 0)
    run(model=str(model_folder))
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == before


def test_a_line_cut_short_is_passed_over(run, model_folder, tmp_path):
    run(model=str(model_folder))
    before = {name: (tmp_path / "out" / name).read_bytes() for name in FILES}
    lines = before["work-0.jsonl"].splitlines(keepends=True)
    for name in FILES:
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "work-0.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    run(model=str(model_folder))
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == before


def test_a_grade_asked_for_again_wins_over_the_failed_one_whichever_process_wrote_it(tmp_path):
    for rank, grades in ((0, [1, 2]), (1, [1, None])):
        (tmp_path / f"work-{rank}.jsonl").write_text(json.dumps({"step": "grades", "results": {"q1": grades}}) + "\n")
    assert read_work(tmp_path, "grades", lambda grades: bool(grades) and None not in grades) == {"q1": [1, 2]}


def test_killed_five_times_and_continued_the_files_are_those_of_an_undisturbed_run(model_folder, judge_folder, tmp_path):
    data = write_rows(tmp_path / "test.jsonl", toy_rows(40))

    def options(name):
        return EvaluateOptions(
            model=str(model_folder),
            dataset=str(data),
            output_dir=str(tmp_path / name),
            judge=judge_folder,
            judge_dtype="float32",
            dtype="float32",
            answer_format="text",
            max_new_tokens=32,
            generation_batch_size=3,
            judge_batch_size=2,
        )

    moments = kill_and_continue(evaluate, options, kills=5)
    for name in FILES:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), (name, moments)


def test_two_processes_share_the_questions_and_give_the_same_files(model_folder, data, tmp_path):
    arguments = f"--model {model_folder} --dataset {data} --judge keywords --answer-format text --dtype float32".split()
    arguments += "--max-new-tokens 8 --generation-batch-size 2 --judge-batch-size 2 --output-dir".split()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "evaluate.py")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}  # what `accelerate launch` sets and starts where there are GPUs
    result = subprocess.run([*launch, *arguments, str(tmp_path / "two")], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("| macro |") == 1
    evaluate(parse_options(EvaluateOptions, [*arguments, str(tmp_path / "one")]))
    for name in ("responses.json", "scores.json", "summary.json", "index.html"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert (tmp_path / "two" / "work-1.jsonl").stat().st_size  # the second one did its share


# --- The whole thing --------------------------------------------------------------------------------------------------


def test_with_a_local_judge_end_to_end(run, model_folder, judge_folder, tmp_path):
    summary = run(model=str(model_folder), judge=judge_folder, judge_dtype="float32")
    assert 0 <= summary["figures"]["macro"]["expected_coverage"] <= 1 and summary["figures"]["macro"]["failed_calls"] == 0
    settings = summary["settings"]
    assert len(settings["model_revision"]) == len(settings["judge_revision"]) == len(settings["prompts_hash"]) == 16
    assert settings["model_revision"] != settings["judge_revision"] and "transformers" in summary["versions"]
    assert "output_dir" not in settings


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(), "--model or --responses"),
        (dict(model="no/such/folder"), "no/such/folder"),
        (dict(judge="no/such/judge"), "no/such/judge"),
        (dict(max_new_tokens=1000), "the model 1024"),
        (dict(split="nowhere"), "nowhere"),
        (dict(judge="keyword"), "is 'keywords' meant"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_folder_that_would_refuse_what_it_advises(
    run, model_folder, settings, message, tmp_path
):
    model = {} if not settings else {"model": str(model_folder)}
    with pytest.raises(InputError, match=message) as error:
        run(**{**model, "output_dir": str(tmp_path / "refused"), **settings})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "refused").exists()

"""rtv.py: coverage and thresholds as counted by hand, rows that come out as they went in, stopping and going on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, kill_and_continue, make_model, toy_rows, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_judges import Server

import evaluate as ev
import judges
import rtv
from command_line import InputError, parse_options
from grasp import GraspOptions, load_tokenizer, train
from lamp_qa import load_examples, load_templates
from rtv import RtvOptions, filter_rows, row_score

STAGES = ("answers.jsonl", "grades.jsonl", "kept.jsonl", "rtv.json")


@pytest.fixture
def run(model_folder, tmp_path):
    """run(rows, grades, name=value, ...) filters these rows, whose answers get these grades ({id: [...]}, or per answer a list
    of such lists); returns what rtv.json and kept.jsonl hold."""
    folder = tmp_path / "rtv"

    def make(rows, grades=None, sampled=None, **changed):
        usual = dict(model=str(model_folder), dataset=str(write_rows(tmp_path / "train.jsonl", rows)), judge="scripted")
        usual |= dict(output=str(folder / "kept.jsonl"), answer_format="text", max_new_tokens=4, dtype="float32", resamples=0)
        with pytest.MonkeyPatch.context() as patch:
            if grades is not None:
                patch.setattr(ev, "load_judge", lambda spec, options: scripted(grades))
                patch.setattr(sys.modules["resumable"], "revision", lambda path: "fixed")
            if sampled is not None:
                patch.setattr(rtv, "sample_answers", sampled)
            filter_rows(RtvOptions(**usual | changed))
        return read_json(folder / "rtv.json"), read_lines(folder / "kept.jsonl")

    make.folder = folder
    return make


def scripted(grades):
    calls = dict.fromkeys(grades, 0)

    def judge(pairs):
        result = []
        for row, _ in pairs:
            of_row = grades[row["id"]]
            if isinstance(of_row[0], list):
                of_row = of_row[calls[row["id"]]]
                calls[row["id"]] += 1
            result.append([None if score is None else judges.grade(score) for score in of_row])
        return result

    return judge


def answers_of(text):
    return lambda tokenizer, prompts, *_: {name: {"output": text(name), "tries": 1} for name in prompts}


def read_json(path):
    return json.loads(path.read_text("utf-8"))


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# --- Coverage and thresholds ------------------------------------------------------------------------------------------


def test_row_score_is_the_mean_over_answers_or_the_best_and_none_where_a_call_failed():
    assert row_score([[0, 1, 2]]) == 0.5
    assert row_score([[2, 2], [0, 1]]) == 5 / 8 and row_score([[2, 2], [0, 1]], keep_best=True) == 1
    assert row_score([[2, None]]) is None and row_score([[2, 2], [None, 0]], keep_best=True) is None


def test_a_threshold_is_reached_by_its_own_value():
    for count in (5, 10):  # 0.1, 0.2, ... as tenths and as means of several answers with that very coverage
        for tenth in range(11):
            total = tenth * 2 * count // 10
            grades = [2] * (total // 2) + [1] * (total % 2)
            grades += [0] * (count - len(grades))
            for answers in (1, 3, 7):
                assert row_score([grades] * answers) == float(f"{tenth / 10:.1f}")


def test_kept_rows_counts_and_sweep_equal_hand_computed_ones(run, capsys):
    rows = toy_rows(5)
    rows[1]["rubric_aspects"] = rows[1]["rubric_aspects"] * 2
    grades = {"q0": [2, 2], "q1": [2, 1, 0, 1], "q2": [0, 0], "q3": [2, 1], "q4": [2, 2]}
    report, kept = run(rows, grades, threshold=0.75)
    assert kept == [rows[0], rows[3], rows[4]]
    assert (report["kept"], report["below_threshold"], report["unjudged"]) == (3, 2, [])
    assert report["kept_at"] == {"0.0": 1.0} | {f"0.{i}": 0.8 for i in range(1, 6)} | {"0.6": 0.6, "0.7": 0.6} | {
        name: 0.4 for name in ("0.8", "0.9", "1.0")
    }
    assert report["quantiles"]["0.5"] == 0.75 and report["quantiles"]["0"] == 0 and report["quantiles"]["1"] == 1
    assert report["by_aspects"] == {"2": {"rows": 4, "kept": 3, "mean": 0.6875}, "4": {"rows": 1, "kept": 0, "mean": 0.5}}
    lines = {line["id"]: line for line in read_lines(run.folder / "grades.jsonl")}
    assert lines["q1"]["coverage"] == 0.5 and [g["score"] for g in lines["q1"]["grades"][0]] == [2, 1, 0, 1]
    printed = capsys.readouterr().out
    assert f"| 0.7 | 3 | {'#' * 24} |" in printed and "| 4 | 1 | 0 | 0.500 |" in printed
    assert f"0.750 q3: {rows[3]['question']}; missed: {rows[3]['rubric_aspects'][1]['aspect']}" in printed


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    graded=st.lists(st.lists(st.sampled_from([0, 1, 2, 2, None]), min_size=1, max_size=5), min_size=1, max_size=8),
    threshold=st.sampled_from([0.0, 0.3, 0.5, 0.6, 2 / 3, 1.0]),
)
def test_kept_are_the_input_rows_that_reach_the_threshold_and_unjudged_ones_never_count(run, graded, threshold):
    rows = toy_rows(len(graded))
    for row, grades in zip(rows, graded):
        row["rubric_aspects"] = [{"aspect": f"aspect {i} of {row['id']}"} for i in range(len(grades))]
        row["extra"] = {"kept": [1.5, None, "é\u2028"]}
    judged = [(row, sum(g) / (2 * len(g))) for row, g in zip(rows, graded) if None not in g]
    expected = [row for row, score in judged if score >= threshold]
    missing = sum(grade is None for grades in graded for grade in grades)
    try:
        scripted_grades = dict(zip([row["id"] for row in rows], graded))
        report, kept = run(rows, scripted_grades, answers_of(lambda name: "text"), threshold=threshold, overwrite=True)
        assert not missing
    except InputError as error:  # what can be kept is kept all the same
        if not expected:
            assert "no row reaches" in str(error) or "judge calls failed" in str(error)
            assert not (run.folder / "kept.jsonl").exists()
            return
        assert missing and f"{missing} of {sum(map(len, graded))} judge calls failed" in str(error)
        report, kept = read_json(run.folder / "rtv.json"), read_lines(run.folder / "kept.jsonl")
    assert kept == expected
    assert len(report["unjudged"]) == len(rows) - len(judged)
    assert list(report["kept_at"].values()) == [sum(s >= i / 10 for _, s in judged) / len(judged) for i in range(11)]


def test_unjudged_rows_are_asked_for_again_and_answered_ones_are_not(run, capsys):
    rows = toy_rows(3)
    with pytest.raises(InputError, match="1 of 6 judge calls failed"):
        run(rows, {"q0": [2, 2], "q1": [2, None], "q2": [1, 1]})
    assert [row["id"] for row in read_lines(run.folder / "kept.jsonl")] == ["q0"]
    assert read_json(run.folder / "rtv.json")["unjudged"] == ["q1"]
    assert "unjudged, the next run asks again: 1 (q1)" in capsys.readouterr().out
    report, kept = run(rows, {"q1": [2]})  # only the aspect that has no grade yet
    assert [row["id"] for row in kept] == ["q0", "q1"] and report["unjudged"] == []


def test_several_answers_count_by_their_mean_or_by_the_best(run):
    rows = toy_rows(2)
    grades = {"q0": [[2, 2], [0, 0], [2, 2]], "q1": [[2, 0], [2, 0], [2, 0]]}
    report, kept = run(rows, grades, samples=3, threshold=0.6, temperature=1.0, max_new_tokens=8)
    assert [row["id"] for row in kept] == ["q0"]
    report, kept = run(rows, {}, samples=3, temperature=1.0, max_new_tokens=8, threshold=0.7, keep_best=True)
    assert [row["id"] for row in kept] == ["q0"]
    with pytest.raises(InputError, match="no row reaches --threshold 0.7"):
        run(rows, {}, samples=3, temperature=1.0, max_new_tokens=8, threshold=0.7)
    outputs = [answer["output"] for answer in read_lines(run.folder / "answers.jsonl")[0]["answers"]]
    assert len(outputs) == 3 and len(set(outputs)) > 1


def test_empty_answers_score_0_and_are_counted(run):
    rows = toy_rows(3)
    sampled = answers_of(lambda name: " " if name.startswith("q1") else "text")
    report, kept = run(rows, {"q0": [2, 2], "q2": [2, 2]}, sampled)
    assert [row["id"] for row in kept] == ["q0", "q2"] and report["empty_answers"] == 1


def test_leaking_answers_are_reported_and_left_out_on_demand(run):
    rows = toy_rows(3)
    rows[1]["rubric_aspects"][0]["reason"] = "they never told anyone about the secret plan"
    text = "As you know, they never told anyone about the secret plan."
    sampled = answers_of(lambda name: text if name.startswith("q1") else "text")
    grades = {row["id"]: [2, 2] for row in rows}
    report, kept = run(rows, grades, sampled)
    assert report["leaks"] == pytest.approx(1 / 3) and len(kept) == 3
    report, kept = run(rows, {}, sampled, drop_leaks=True)
    assert [row["id"] for row in kept] == ["q0", "q2"]
    assert (report["kept"], report["below_threshold"], report["dropped_for_leaks"]) == (2, 0, 1)


def test_rows_without_aspects_are_left_out_with_a_count_whatever_the_teacher_sees(run):
    rows = toy_rows(3)
    rows[1]["rubric_aspects"] = []
    report, kept = run(rows, {"q0": [2, 2], "q2": [2, 2]}, privileged="both")
    assert report["left_out"] == {"no aspects to grade": ["q1"]} and len(kept) == 2
    report, kept = run(rows, {"q0": [2, 2], "q2": [2, 2]}, max_dropped=0.5, overwrite=True)
    assert report["left_out"] == {"no aspects to show the teacher": ["q1"]} and len(kept) == 2


def test_an_empty_result_shows_the_sweep_and_writes_no_rows(run, capsys):
    with pytest.raises(InputError, match="no row reaches --threshold 0.9") as error:
        run(toy_rows(2), {"q0": [2, 1], "q1": [0, 0]}, threshold=0.9)
    assert "\n" not in str(error.value) and f"| 0.7 | 1 | {'#' * 20} |" in capsys.readouterr().out
    assert not (run.folder / "kept.jsonl").exists()
    assert run(toy_rows(2), {}, threshold=0.7)[1] == toy_rows(1)  # at once: no judge is asked again


# --- From and to the other scripts ------------------------------------------------------------------------------------


def test_the_teacher_that_answers_sees_the_prompt_that_will_score_in_training(run, monkeypatch, model_folder, tmp_path):
    seen = {}
    sample = ev.sample_completions
    monkeypatch.setattr(
        ev, "sample_completions", lambda model, prompts, *a, **k: seen.update(p=prompts) or sample(model, prompts, *a, **k)
    )
    rows = toy_rows(3)
    run(rows, {row["id"]: [2, 2] for row in rows})
    options = GraspOptions(model=str(model_folder), answer_format="text")
    path = str(tmp_path / "train.jsonl")
    examples, _ = load_examples(options, path, "train", load_tokenizer(str(model_folder)), load_templates())
    assert sorted(seen["p"]) == sorted(example["teacher"] for example in examples)


def test_grasp_trains_on_what_is_kept(run, options, tmp_path):
    rows = toy_rows(6)
    run(rows, {row["id"]: [2, index % 3] for index, row in enumerate(rows)})
    train(options(dataset=str(run.folder / "kept.jsonl"), max_steps=1, batch_size=2))
    assert read_json(tmp_path / "out" / "data.json")["train"]["used"] == 2


def test_a_judge_that_also_evaluates_draws_a_warning(run, capsys):
    grades = {"q0": [2, 2]}
    run(toy_rows(1), grades)
    assert "warning" not in capsys.readouterr().out
    run(toy_rows(1), grades, evaluation_judge="scripted")
    assert "warning: scripted is also the evaluation's judge" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["demo_rtv", "lamp_qa_rtv"])
def test_the_configs_hold_options_that_exist_and_agree_with_those_of_training(name):
    config = ROOT / "configs" / f"{name}.yaml"
    mine = parse_options(RtvOptions, [str(config)], needed=("model", "dataset", "judge", "output"))
    trained = parse_options(GraspOptions, [str(ROOT / "configs" / ("demo" if "demo" in name else "lamp_qa_24gb")) + ".yaml"])
    for shared in ("model", "dataset", "answer_format", "prompts", "privileged", "num_contexts", "rank_profile_with"):
        assert getattr(mine, shared) == getattr(trained, shared), shared
    measure = yaml.safe_load((ROOT / "configs" / f"{name.replace('rtv', 'evaluate')}.yaml").read_text())
    parse_options(ev.EvaluateOptions, [f"--{key.replace('_', '-')}={value}" for key, value in measure.items()])
    assert (mine.judge == measure["judge"]) == (mine.judge == mine.evaluation_judge)


# --- Stopping and going on --------------------------------------------------------------------------------------------


def test_killed_at_random_moments_and_continued_the_files_are_those_of_an_undisturbed_run(model_folder, tokenizer, tmp_path):
    data = write_rows(tmp_path / "train.jsonl", toy_rows(30))
    judge = tmp_path / "judge"
    make_model("llama", seed=5, max_position_embeddings=4096).save_pretrained(judge)
    tokenizer.save_pretrained(judge)

    def options(name):
        settings = dict(answer_format="text", dtype="float32", max_new_tokens=24, generation_batch_size=3, judge_batch_size=2)
        where = dict(model=str(model_folder), dataset=str(data), judge=str(judge), output=str(tmp_path / name / "kept.jsonl"))
        return RtvOptions(**settings, **where, judge_dtype="float32", threshold=0.0, samples=2)

    moments = kill_and_continue(filter_rows, options, kills=5)
    for name in STAGES:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), (name, moments)


def test_changed_settings_are_named_and_refused_and_overwrite_starts_anew(run, tmp_path):
    rows, grades = toy_rows(3), {f"q{i}": [2, 2] for i in range(3)}
    run(rows, grades)
    before = {name: (run.folder / name).read_bytes() for name in STAGES}
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("question: 'Please: {question}'\n")
    for changed in (dict(judge="other"), dict(seed=1), dict(samples=2), dict(privileged="both"), dict(prompts=str(prompts))):
        with pytest.raises(InputError, match=f"other settings: .*{next(iter(changed))} was"):
            run(rows, grades, **changed)
    with pytest.raises(InputError, match="rows_hash was"):
        run(toy_rows(2), grades)
    assert {name: (run.folder / name).read_bytes() for name in STAGES} == before
    report, kept = run(toy_rows(2), {"q0": [2, 2], "q1": [0, 0]}, overwrite=True)
    assert [row["id"] for row in kept] == ["q0"]


def test_another_threshold_filters_again_without_answering_or_judging(run, monkeypatch):
    rows = toy_rows(3)
    run(rows, {"q0": [2, 2], "q1": [2, 1], "q2": [0, 0]})
    monkeypatch.setattr(ev, "sample_completions", lambda *a, **k: 1 / 0)
    report, kept = run(rows, {}, threshold=0.75)
    assert [row["id"] for row in kept] == ["q0", "q1"] and report["settings"]["threshold"] == 0.75


def test_a_file_that_exists_and_the_data_set_itself_are_not_overwritten(run, tmp_path):
    run.folder.mkdir()
    for name in STAGES:
        (run.folder / name).write_text("mine")
        with pytest.raises(InputError, match=f"{name}: exists already"):
            run(toy_rows(1), {"q0": [2, 2]})
        assert (run.folder / name).read_text() == "mine"
        (run.folder / name).unlink()
    with pytest.raises(InputError, match="is the data set itself"):
        run(toy_rows(1), {"q0": [2, 2]}, output=str(tmp_path / "train.jsonl"), overwrite=True)
    assert read_lines(tmp_path / "train.jsonl") == toy_rows(1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--threshold", "1.5"], "--threshold is 1.5, expected at least 0 and at most 1"),
        (["--threshold", "high"], "--threshold"),
        (["--samples", "0"], "--samples is 0"),
        (["--dataset", "no/such/file.jsonl"], "no/such/file.jsonl"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--judge", "no/such/judge"], "no/such/judge"),
        (["--context", "none"], "unknown option '--context'"),
        (["--judge", "http://127.0.0.1:9"], "the judge does not answer"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments, message, model_folder, data_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(judges.time, "sleep", lambda seconds: None)
    usual = dict(model=model_folder, dataset=data_folder, judge="keywords", output=tmp_path / "kept.jsonl", max_new_tokens=4)
    usual |= dict(answer_format="text", threshold=0.0)
    argv = [word for name, value in usual.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", ["rtv.py", *argv, *arguments])
    with pytest.raises(SystemExit) as error:
        rtv.run(lambda argv: filter_rows(parse_options(RtvOptions, argv)))
    assert error.value.code == 2
    written = capsys.readouterr().err.strip().splitlines()[-1]
    assert written.startswith("error: ") and message in written
    assert not (tmp_path / "kept.jsonl").exists()


def test_a_server_that_dies_keeps_the_answers_for_the_next_run(run, monkeypatch):
    monkeypatch.setattr(judges.time, "sleep", lambda seconds: None)
    rows = toy_rows(3)
    with Server(lambda number, request: (None, {}, b"")) as server:
        with pytest.raises(InputError, match="does not answer"):
            run(rows, judge=server.url)
    monkeypatch.setattr(ev, "sample_completions", lambda *a, **k: 1 / 0)
    monkeypatch.setattr(judges, "server_judge", lambda *_: scripted({f"q{i}": [2, 2] for i in range(3)}))
    assert run(rows, judge=server.url)[1] == rows


def test_two_processes_share_the_rows_and_give_the_same_files(model_folder, data_folder, tmp_path):
    arguments = f"--model {model_folder} --dataset {data_folder} --judge keywords --answer-format text --dtype float32".split()
    arguments += "--max-new-tokens 8 --generation-batch-size 2 --judge-batch-size 2 --threshold 0 --output".split()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "rtv.py")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    two, one = (Path(tmp_path / name / "kept.jsonl") for name in ("two", "one"))
    result = subprocess.run([*launch, *arguments, str(two)], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    filter_rows(parse_options(RtvOptions, [*arguments, str(one)]))
    for name in STAGES:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name

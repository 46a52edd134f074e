"""The page of a training run: complete in one file, everything from data or model shown as text, a slider that works."""

import json
import math
import random
import re
import socket

import pytest
import yaml
from conftest import BROWSER, found_by_browser

from command_line import InputError
from view import main, write_run_page

SERVER = socket.create_server(("127.0.0.1", 0))  # whoever loads something that the hostile texts name comes here
PICTURE = f"<img src=http://127.0.0.1:{SERVER.getsockname()[1]}/ onerror=\"document.title='owned'\">"
NASTY = f"<b>bold</b></script><script>document.title = 'owned'</script>{PICTURE} &amp; {{question}} \ud800"
HEBREW = "מה כדאי לקרוא השבוע?"
STEPS = (0, 40, 80, 120)


def make_run(folder, steps=STEPS, held_out=True, rows=3, words=90):
    """A run as grasp.py leaves it: divergences fall with the steps, and most of their sum is in few tokens."""
    (folder / "rollouts").mkdir(parents=True)
    options = dict(model="/home/somebody/models/SmolLM2", divergence="reverse_kl", privileged="aspects", learning_rate=1e-4)
    (folder / "options.yaml").write_text(
        yaml.safe_dump(options | {"batch_size": 8, "seed": 0, "output_dir": str(folder)}), "utf-8"
    )
    part = {"dataset": "/home/somebody/rows", "split": "train", "rows": 204, "used": 203, "left_out": {"too long": ["q7"]}}
    (folder / "data.json").write_text(json.dumps({"train": part, "held_out": part | {"split": "validation"}, "hash": "ab12"}))
    draw, lines = random.Random(0), []
    for step in range(0, 121):
        down = 0.3 + 0.7 * math.exp(-step / 40)
        noise = lambda: draw.lognormvariate(0, 0.1)  # noqa: E731
        names = {
            "loss": 0.6,
            "divergence_p50": 0.05,
            "divergence_p95": 2.9,
            "divergence_p99": 6.1,
            "entropy": 2.2,
            "top_share": 0.3,
        }
        figures = {name: value * down * noise() for name, value in names.items()}
        figures |= {
            "agreement": 1 - 0.4 * down,
            "length": 180 * noise(),
            "truncated": 0.2 * down,
            "leaks": draw.choice([0, 0, 0.125]),
        }
        more = {
            "grad_norm": 3 * down * noise(),
            "learning_rate": 1e-4 * (1 - step / 121),
            "seconds": 3.1,
            "peak_memory_gb": 4.2,
        }
        if step:
            lines.append({"step": step, **figures, **more, "tokens_per_second": 450 * noise()})
        if held_out and step % 20 == 0:
            figures["reverse_kl"] = figures.pop("loss")
            lines.append({"step": step, **{"eval_" + name: value for name, value in figures.items()}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    questions = ["How do I keep a sourdough starter alive?", HEBREW, "Which tent for two, in the rain?"][:rows]
    text = "Feed it once a week, with rye, and keep it cold.\nYou wrote that you travel: dry a little of it on paper first. "
    for step in steps:
        made = []
        for number, question in enumerate(questions):
            tokens = []
            for i in range(words):
                nats = draw.lognormvariate(-4, 2) * (2.0 if step == 0 else 1 - step / 160)
                student = min(0.99, draw.betavariate(2, 2))
                word = re.findall(r"\s?\S+|\n", text)[i % 24]
                same = draw.random() < 0.6
                teacher = student if same else student * math.exp(-nats)
                token = {"id": i, "text": word, "divergence": nats, "student": student, "teacher": teacher}
                tokens.append(token | {"favourite": word if same else " rye", "favourite_probability": max(teacher, 0.7)})
            rubric = [{"aspect": f"{question} Point {k}", "reason": "They travel.", "evidence": "Post 2"} for k in (1, 2, 3)]
            posts = [f"Post {k}: I am away for most of the month, and bake when I am home." for k in range(10)]
            row = {"id": f"q{number}", "config": "Life", "question": question, "posts": posts, "rubric": rubric}
            made.append(row | {"text": "".join(token["text"] for token in tokens), "tokens": tokens})
        (folder / "rollouts" / f"step-{step:06d}.json").write_text(json.dumps({"step": step, "rows": made}), "utf-8")
    return folder


def change(folder, step, edit):
    """Let `edit` change the first row of a step's rollouts."""
    path = folder / "rollouts" / f"step-{step:06d}.json"
    rollouts = json.loads(path.read_text("utf-8"))
    edit(rollouts["rows"][0])
    path.write_text(json.dumps(rollouts), "utf-8")


def make_nasty(row):
    """Hostile text wherever text comes from data or model; a character in two tokens; a divergence that is no number."""
    row |= {"question": NASTY, "config": NASTY, "posts": [NASTY]}
    row["rubric"] = [{"aspect": NASTY, "reason": NASTY, "evidence": NASTY}]
    row["tokens"] = row["tokens"][:6]
    row["tokens"][0] |= {"text": NASTY, "favourite": NASTY, "divergence": 2.5, "student": 0.25, "teacher": 0.0125}
    row["tokens"][1] |= {"text": " \ufffd"}
    row["tokens"][2] |= {"text": "\ufffd", "divergence": math.nan}
    row["tokens"][3] |= {"text": " go"}
    row["tokens"][4] |= {"text": "\n"}
    row["tokens"][5] |= {"text": "<|im_end|>"}
    row["text"] = NASTY + " \u2019 go\n"


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("view") / "run")
    for step in STEPS:
        change(folder, step, make_nasty)
    write_run_page(folder)
    return folder


def stored(page):
    return json.loads(re.search('id="run">(.*?)</script>', page.read_text("utf-8"), re.S)[1])


def test_the_page_is_one_file_whose_only_markup_is_its_own(nasty):
    page = (nasty / "index.html").read_text("utf-8")
    assert len(re.findall("</script", page)) == 2 and "<img" not in page and "<b>bold" not in page
    assert "default-src 'none'" in page and not re.search(r"(src|href)\s*=\s*\"|@import|url\(", page)
    data = stored(nasty / "index.html")
    assert data["questions"][0]["question"] == NASTY == data["questions"][0]["rubric"][0]["aspect"]
    assert [step["step"] for step in data["steps"]] == list(STEPS) and data["questions"][1]["question"] == HEBREW
    first, fragment = data["steps"][1]["answers"][0]["tokens"][0], data["steps"][1]["answers"][0]["tokens"][2]
    assert first[:5] == [NASTY, NASTY, 2.5, 0.25, 0.0125] and fragment[2] is None


def test_the_page_names_no_folder_of_the_machine(nasty):
    page = (nasty / "index.html").read_text("utf-8")
    assert "/home" not in page and "somebody" not in page and str(nasty) not in page
    about = stored(nasty / "index.html")["about"]
    assert about["model"] == "SmolLM2" and [part["dataset"] for part in about["parts"]] == ["rows", "rows"]
    assert about["parts"][0]["left_out"] == {"too long": 1} and about["learning_rate"] == 1e-4


def test_view_recognizes_a_run(tmp_path, capsys):
    folder = make_run(tmp_path / "run", steps=(80, 0))
    main([str(folder)])
    assert capsys.readouterr().out.strip() == str(folder / "index.html")
    assert [step["step"] for step in stored(folder / "index.html")["steps"]] == [0, 80]


def test_it_works_without_rollouts_or_held_out_lines_and_with_a_line_cut_short(tmp_path):
    folder = make_run(tmp_path / "run", steps=(), held_out=False)
    (folder / "rollouts").rmdir()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 121, "loss": NaN}\n{"step": 122, "lo')
    data = stored(write_run_page(folder))
    assert data["steps"] == data["questions"] == [] and len(data["metrics"]) == 121
    assert data["metrics"][-1] == {"step": 121, "loss": None}


def test_a_question_may_be_missing_at_a_step(tmp_path):
    folder = make_run(tmp_path / "run", steps=(0, 40))
    change(folder, 40, lambda row: row.update(id="new"))
    steps, questions = (stored(write_run_page(folder))[name] for name in ("steps", "questions"))
    assert [question["id"] for question in questions] == ["q0", "q1", "q2", "new"]
    assert steps[0]["answers"][3] is None and steps[1]["answers"][0] is None and steps[1]["answers"][3]["tokens"]


@pytest.mark.parametrize(
    "name, text",
    [
        ("options.yaml", None),
        ("options.yaml", "a: 1"),
        ("data.json", None),
        ("data.json", '{"train": '),
        ("metrics.jsonl", "nonsense\n"),
        ("metrics.jsonl", "[1]\n"),
        ("rollouts/step-000040.json", ""),
        ("rollouts/step-000040.json", '{"step": 40, "rows": [{"id": "q0"}]}'),
        ("rollouts/step-000040.json", "[" * 100_000),
    ],
)
def test_a_missing_or_broken_file_is_one_line_that_names_it(tmp_path, name, text):
    folder = make_run(tmp_path / "run")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text, "utf-8")
    with pytest.raises(InputError) as error:
        main([str(folder)])
    assert "\n" not in str(error.value) and str(folder / name) in str(error.value)
    assert not (folder / "index.html").exists()


def browse(page, probe, folder):
    """What the script `probe` leaves in `found` when the page is opened from disk, 375 pixels wide as on a phone."""
    script = f"""<script>
    window.addEventListener("securitypolicyviolation", (event) => (window.refused = event.blockedURI));
    window.addEventListener("load", () => {{
      const found = {{}}, at = (id) => document.getElementById(id), text = (id) => at(id).textContent;
      const send = (node, kind) => node.dispatchEvent(new Event(kind, {{ bubbles: true }}));
      const press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", {{ key, bubbles: true }}));
      {probe}
      setTimeout(() => {{
        Object.assign(found, {{ title: document.title, refused: window.refused, images: document.images.length }});
        found.requests = performance.getEntriesByType("resource").length;
        found.tooWide = document.documentElement.scrollWidth > document.documentElement.clientWidth || innerWidth !== 375;
        parent.postMessage(JSON.stringify(found), "*");
      }}, 300);
    }});
    </script></body>"""
    frame = """<iframe src="probe.html" style="width: 375px; height: 700px; border: 0"></iframe><pre id="found"></pre><script>
    addEventListener("message", (event) => (document.getElementById("found").textContent = event.data));</script>"""
    (folder / "probe.html").write_text(page.read_text("utf-8").replace("</body>", script), "utf-8")
    (folder / "frame.html").write_text(frame, "utf-8")
    return json.loads(found_by_browser(folder / "frame.html").replace("\xa0", " "))


def fits_and_asks_for_nothing(found):
    SERVER.setblocking(False)
    with pytest.raises(BlockingIOError):
        SERVER.accept()
    assert not found["tooWide"]
    return found["requests"] == 0 == found["images"] and "refused" not in found and found["title"] == "What the teacher teaches"


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_in_a_browser_slider_and_tokens_work_and_hostile_text_is_text(nasty):
    probe = """
      const tokens = () => [...document.querySelectorAll(".token")];
      found.steps = [text("shown")];
      at("step").value = 2; send(at("step"), "input"); found.steps.push(text("shown"));
      press(document.body, "ArrowRight"); found.steps.push(text("shown"));
      press(document.body, "ArrowRight"); found.steps.push(text("shown"));
      press(document.body, "ArrowLeft"); found.steps.push(text("shown"));
      found.carry = text("carry"); found.charts = document.querySelectorAll("figure").length;
      found.marks = document.querySelectorAll(".now").length;
      found.texts = [text("asked"), at("rubric").querySelector("strong").textContent, text("posts")];
      found.tokens = tokens().map((node) => node.textContent);
      found.hidden = at("tip").hidden;
      send(tokens()[0], "pointerover"); found.hover = text("tip");
      send(at("answer"), "pointerleave"); found.left = at("tip").hidden;
      tokens()[0].focus(); press(tokens()[0], "ArrowRight"); found.focus = text("tip");
      press(document.activeElement, "Escape"); found.escaped = at("tip").hidden;
      send(tokens()[2], "click"); found.click = text("tip");
      found.colours = tokens().map((node) => getComputedStyle(node).backgroundColor);
      at("question").value = 1; send(at("question"), "input");
      found.asked = text("asked");
      found.directions = [at("asked"), at("rubric").querySelector("strong")].map((node) => getComputedStyle(node).direction);"""
    found = browse(nasty / "index.html", probe, nasty)
    assert fits_and_asks_for_nothing(found)
    assert [step.split()[0] for step in found["steps"]] == ["0", "80", "120", "120", "80"]
    assert found["texts"] == [NASTY] * 3 and found["tokens"][0] == NASTY
    assert found["tokens"][1:] == [" \u2019", " go", "\n", "<|im_end|>"]  # the character of two tokens is whole
    assert found["hidden"] and found["left"] and found["escaped"]
    assert (
        found["hover"].startswith(NASTY) and "2.5 nats" in found["hover"] and "student 25 %, teacher 1.25 %" in found["hover"]
    )
    assert "the teacher wanted the same" in found["hover"] and found["focus"].count("nats") == 2 and " go" in found["click"]
    assert len(set(found["colours"])) > 2 and found["charts"] == found["marks"] == 13
    assert (
        found["carry"].startswith("185 tokens at step 80")
        and "the largest 1 (1 % of them)" in found["carry"]
        and "the largest 18 (10 % of them)" in found["carry"]
    )
    assert found["asked"] == HEBREW and found["directions"] == ["rtl", "rtl"]


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_in_a_browser_a_run_without_rollouts_shows_its_curves(tmp_path):
    folder = make_run(tmp_path / "run", steps=(), held_out=False)
    probe = """found.hidden = at("choice").hidden && at("rollouts").hidden; found.charts = text("charts");"""
    found = browse(write_run_page(folder), probe, tmp_path)
    assert fits_and_asks_for_nothing(found) and found["hidden"] and "learning rate" in found["charts"]

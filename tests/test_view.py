"""The page of results: complete in one file, everything from data or model shown as text, filters that work."""

import json
import re
import shutil

import pytest
from conftest import BROWSER, found_by_browser, toy_rows, write_rows

from command_line import InputError
from evaluate import EvaluateOptions, evaluate
from view import main, write_page

NASTY = "<b>bold</b>\n</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> &amp;"
HEBREW = "שלום עולם, tea first."


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two runs over six questions in two configs, the second compared with the first; some texts are hostile."""
    folder = tmp_path_factory.mktemp("view")
    rows = toy_rows(6)
    rows[1]["question"] = "Is <i>this</i> text?"
    rows[1]["rubric_aspects"][0]["aspect"] = "<script>document.title = 'owned'</script> tea"
    for row in rows:
        row["config"] = "Art" if row["id"] in ("q0", "q1", "q2", "q3") else "Life"
    write_rows(folder / "test.jsonl", rows)
    base = {row["id"]: [{"output": "Nothing much."}] for row in rows}
    ours = base | {"q0": [{"output": NASTY}], "q1": [{"output": HEBREW}], "q2": [{"output": ""}]}
    ours["q4"] = [{"output": " ".join(aspect["aspect"] for aspect in rows[4]["rubric_aspects"])}]
    for name, answers in (("base", base), ("ours", ours)):
        (folder / f"{name}.json").write_text(json.dumps(answers), "utf-8")
        settings = dict(dataset=str(folder), judge="keywords", responses=str(folder / f"{name}.json"))
        compare = str(folder / "base" / "scores.json") if name == "ours" else ""
        evaluate(EvaluateOptions(**settings, output_dir=str(folder / name), compare=compare))
    return folder


def test_the_page_is_one_file_whose_only_markup_is_its_own(results):
    page = (results / "ours" / "index.html").read_text("utf-8")
    assert len(re.findall("</script", page)) == 2 and "<img" not in page and "<b>bold" not in page
    assert "http://" not in page and "https://" not in page and "default-src 'none'" in page
    stored = json.loads(re.search('id="results">(.*?)</script>', page, re.S)[1])
    questions = {question["id"]: question for question in stored["questions"]}
    assert questions["q0"]["output"] == NASTY and questions["q1"]["output"] == HEBREW
    assert questions["q4"]["score"] == 1 and questions["q4"]["other"]["score"] == 0
    assert stored["summary"]["other_figures"]["macro"]["coverage"] == 0


def test_view_makes_the_same_page_again(results, capsys):
    page = results / "ours" / "index.html"
    before = page.read_bytes()
    page.unlink()
    main([str(results / "ours")])
    assert page.read_bytes() == before and capsys.readouterr().out.strip() == str(page)


def test_the_other_run_may_be_gone(results, tmp_path):
    shutil.copytree(results / "ours", tmp_path / "ours")
    summary = json.loads((tmp_path / "ours" / "summary.json").read_text("utf-8"))
    summary["comparison"]["other"] = str(tmp_path / "gone" / "scores.json")
    (tmp_path / "ours" / "summary.json").write_text(json.dumps(summary), "utf-8")
    assert '"other": null' in write_page(tmp_path / "ours").read_text("utf-8")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_says_how_to_use_it(flag, capsys):
    main([flag])
    assert "python view.py results/mine" in capsys.readouterr().out


def test_a_folder_without_results_is_one_line(tmp_path):
    for argv in ([str(tmp_path)], [], ["--hlep"]):
        with pytest.raises(InputError) as error:
            main(argv)
        assert "\n" not in str(error.value)


PROBE = """<script>
window.addEventListener("load", () => {
  const found = { shown: {} };
  const at = (id) => document.getElementById(id);
  const set = (id, value) => { at(id).value = value; at(id).dispatchEvent(new Event("input", { bubbles: true })); };
  const shown = () => [...document.querySelectorAll("#questions > details .title")].map((node) => node.textContent);
  for (const { value } of at("grade").options) { set("grade", value); found.shown[value] = shown().length; }
  set("grade", "all questions");
  set("config", "=Life"); found.life = shown().length; set("config", "");
  set("words", "tea SHALOM"); found.none = shown().length; set("words", "hebrew"); set("words", "");
  set("order", "highest first"); found.first = shown()[0]; set("order", "as in the data");
  for (const node of document.querySelectorAll("#questions > details")) node.open = true;
  setTimeout(() => {
    const [nasty, other, hebrew] = document.querySelectorAll(".answer");
    Object.assign(found, { nasty: nasty.textContent, other: other.textContent, hebrew: hebrew.textContent });
    Object.assign(found, { title: document.title, images: document.images.length, questions: shown() });
    found.bold = document.querySelectorAll("#questions b").length;
    found.rows = document.querySelectorAll("#figures tr").length;
    found.direction = getComputedStyle(hebrew).direction;
    const out = document.createElement("pre");
    out.id = "found"; out.textContent = JSON.stringify(found); document.body.append(out);
  }, 200);
});
</script></body>"""


@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_in_a_browser_filters_work_and_hostile_text_is_text(results):
    page = (results / "ours" / "index.html").read_text("utf-8").replace("</body>", PROBE)
    (results / "probe.html").write_text(page, "utf-8")
    found = json.loads(found_by_browser(results / "probe.html"))
    assert found["title"] == "Coverage of rubric aspects" and found["images"] == 0 and found["bold"] == 0
    assert found["nasty"] == NASTY and found["other"] == "Nothing much."
    assert found["hebrew"] == HEBREW and found["direction"] == "rtl"
    assert found["questions"][1] == "Is <i>this</i> text?" and found["rows"] == 4
    assert found["life"] == 2 and found["none"] == 0 and found["first"] == "What should I do about river on day 4?"
    assert found["shown"]["all questions"] == 6 and found["shown"]["empty answers"] == 1
    assert found["shown"]["all aspects graded 2"] == 1 == found["shown"]["leaks"]
    assert found["shown"]["some aspect graded 1"] == 0

"""The demo data set is what demo/make_data.py makes, and has the properties that the demo relies on."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "demo"
SPLITS = {"train": 204, "validation": 48, "test": 48}
CONFIGS = {"Art_and_Entertainment", "Lifestyle_and_Personal_Development", "Society_and_Culture"}


def load_make_data():
    spec = importlib.util.spec_from_file_location("make_data", DEMO / "make_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_rows(split):
    lines = (DEMO / "data" / f"{split}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


make_data = load_make_data()
ROWS = {split: load_rows(split) for split in SPLITS}
ALL_ROWS = [row for rows in ROWS.values() for row in rows]


def words(text):
    return re.findall(r"\w+", text.lower())


def runs(text, length=5):
    tokens = words(text)
    return {tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)}


def stem(title):
    """What a word begins with if it is a form of the title: "allergic" is one of "allergies"."""
    return title[: max(4, len(title) - 3)]


def mentions(text, title):
    return any(word.startswith(stem(title)) for word in words(text))


def post_texts(row):
    return [post["text"] for post in row["profile"]]


def titles(row):
    return [aspect["aspect"] for aspect in row["rubric_aspects"]]


def user_of(row):
    return row["id"].rsplit("-q", 1)[0]


def sentence_of_post():
    """Post text -> (concern title or None, the sentence in the word list that it is a wording of)."""
    sources = [(concern.title, concern.posts) for concern in make_data.read_concerns()]
    sources.append((None, make_data.items_of(make_data.CHAT)))
    return {
        wording: (title, sentence)
        for title, sentences in sources
        for sentence in sentences
        for wording in make_data.wordings(sentence)
    }


SENTENCE = sentence_of_post()


def test_files_equal_what_the_script_makes(tmp_path):
    script = [sys.executable, DEMO / "make_data.py", "--out", tmp_path]
    subprocess.run(script, check=True, capture_output=True)
    for split in SPLITS:
        name = f"{split}.jsonl"
        assert (tmp_path / name).read_bytes() == (DEMO / "data" / name).read_bytes()


def test_every_row_has_the_lamp_qa_schema():
    for row in ALL_ROWS:
        *text_keys, aspects_key, profile_key = row
        assert text_keys == ["id", "config", "question", "category", "narrative"]
        assert (aspects_key, profile_key) == ("rubric_aspects", "profile")
        texts = [row[key] for key in text_keys]
        for aspect in row["rubric_aspects"]:
            assert list(aspect) == ["aspect", "reason", "evidence"]
            texts += aspect.values()
        for post in row["profile"]:
            assert list(post) == ["id", "text"]
            texts += post.values()
        assert all(isinstance(text, str) and text == text.strip() != "" for text in texts)
        assert not any(re.search(r"[][{}|]|  ", text) for text in texts)


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_has_its_number_of_rows_in_equal_thirds_per_config(split):
    counts = Counter(row["config"] for row in ROWS[split])
    assert counts == dict.fromkeys(CONFIGS, SPLITS[split] // 3)


def test_row_ids_are_unique():
    assert len({row["id"] for row in ALL_ROWS}) == len(ALL_ROWS)


def test_a_post_id_names_one_text_of_one_user():
    text_of = {}
    for row in ALL_ROWS:
        for post in row["profile"]:
            assert post["id"].rsplit("-p", 1)[0] == user_of(row)
            assert text_of.setdefault(post["id"], post["text"]) == post["text"]


def test_splits_share_no_user():
    users = [{user_of(row) for row in rows} for rows in ROWS.values()]
    assert sum(map(len, users)) == len(set.union(*users))
    profiles = [{tuple(sorted(post_texts(row))) for row in rows} for rows in ROWS.values()]
    assert sum(map(len, profiles)) == len(set.union(*profiles))


def test_a_user_asks_once_or_twice_with_the_same_posts_and_concerns():
    rows_of = defaultdict(list)
    for row in ALL_ROWS:
        rows_of[user_of(row)].append(row)
    assert {len(rows) for rows in rows_of.values()} == {1, 2}
    for rows in rows_of.values():
        assert all(row["profile"] == rows[0]["profile"] for row in rows)
        assert all(sorted(titles(row)) == sorted(titles(rows[0])) for row in rows)


def test_splits_share_no_question_and_no_topic():
    for key in ("question", "category"):
        values = [{row[key] for row in rows} for rows in ROWS.values()]
        assert sum(map(len, values)) == len(set.union(*values))


def test_a_third_of_validation_and_test_posts_use_sentences_that_train_never_uses():
    in_train = {SENTENCE[text] for row in ROWS["train"] for text in post_texts(row)}
    for split in ("validation", "test"):
        texts = [text for row in ROWS[split] for text in post_texts(row)]
        unseen = sum(SENTENCE[text] not in in_train for text in texts)
        assert 0.25 < unseen / len(texts) < 0.42


def test_rubric_is_three_to_five_distinct_concerns_of_one_word():
    for row in ALL_ROWS:
        assert 3 <= len(set(titles(row))) == len(titles(row)) <= 5
        assert all(len(title.split()) == 1 for title in titles(row))


def test_posts_show_exactly_the_concerns_of_the_rubric_one_each_and_one_post_is_chat():
    for row in ALL_ROWS:
        shown = [SENTENCE[text][0] for text in post_texts(row)]
        assert sorted(title for title in shown if title) == sorted(titles(row))
        assert shown.count(None) == 1


def test_every_post_of_a_concern_uses_its_title():
    for text, (title, _) in SENTENCE.items():
        assert title is None or mentions(text, title), text


def test_no_two_concerns_share_a_stem():
    known = [concern.title for concern in make_data.read_concerns()]
    assert 20 <= len(known) <= 24
    for title in known:
        assert [other for other in known if mentions(other, title)] == [title]


def test_each_concern_has_eight_to_ten_sentences():
    assert all(8 <= len(concern.posts) <= 10 for concern in make_data.read_concerns())


def test_questions_posts_and_narratives_do_not_use_titles_of_other_concerns():
    known = [concern.title for concern in make_data.read_concerns()]
    sources = [(title, text) for text, (title, _) in SENTENCE.items()]
    for row in ALL_ROWS:
        sources += [(None, row["question"]), (None, row["narrative"])]
    for owner, text in sources:
        others = [title for title in known if title != owner and mentions(text, title)]
        assert not others, (text, others)


def test_questions_are_short_and_every_config_has_14_topics():
    assert all(len(row["question"].split()) <= 14 for row in ALL_ROWS)
    topics = [topic for topics in make_data.read_topics().values() for topic in topics]
    counts = Counter(topic.config for topic in topics)
    assert set(counts) == CONFIGS
    assert min(counts.values()) >= 14


def test_no_five_word_run_of_rubric_or_narrative_occurs_in_the_posts():
    for row in ALL_ROWS:
        in_posts = set().union(*map(runs, post_texts(row)))
        aspect_texts = [text for aspect in row["rubric_aspects"] for text in aspect.values()]
        for text in [row["narrative"], *aspect_texts]:
            assert not runs(text) & in_posts, text


def test_narrative_says_every_evidence_in_two_or_three_sentences():
    for row in ALL_ROWS:
        assert 2 <= len(re.findall(r"[.!?](?: |$)", row["narrative"])) <= 3
        for aspect in row["rubric_aspects"]:
            assert aspect["evidence"].lower() in row["narrative"].lower()


def test_every_reason_names_the_topic_of_the_question():
    things = {t.category: t.thing for topics in make_data.read_topics().values() for t in topics}
    for row in ALL_ROWS:
        assert all(things[row["category"]] in aspect["reason"] for aspect in row["rubric_aspects"])


def test_posts_are_few_and_short():
    for row in ALL_ROWS:
        lengths = [len(text.split()) for text in post_texts(row)]
        assert 4 <= len(lengths) <= 6
        assert all(6 <= length <= 12 for length in lengths)
        assert 25 <= sum(lengths) <= 62


def test_a_profile_never_uses_one_sentence_twice():
    for row in ALL_ROWS:
        sentences = [SENTENCE[text] for text in post_texts(row)]
        assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize("split", SPLITS)
def test_wording_of_posts_is_varied(split):
    texts = [text for row in ROWS[split] for text in post_texts(row)]
    assert len(set(texts)) / len(texts) > 0.6


def test_test_split_has_at_least_180_aspects():
    assert sum(len(row["rubric_aspects"]) for row in ROWS["test"]) >= 180


def test_every_concern_occurs_in_every_split_and_none_dominates():
    known = {concern.title for concern in make_data.read_concerns()}
    for rows in ROWS.values():
        counts = Counter(title for row in rows for title in titles(row))
        assert set(counts) == known
        assert max(counts.values()) < 0.4 * len(rows)

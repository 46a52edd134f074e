"""Rows come in as they are or the faults are named; which rows can be trained on is decided before, and accounted for."""

import json
import random

import pytest
import tokenizers
import torch
import transformers as tf
from conftest import make_tokenizer, toy_rows, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lamp_qa
from command_line import InputError
from grasp import GraspOptions
from lamp_qa import (
    CONFIGS,
    check_row,
    describe,
    encode_chat,
    load_examples,
    load_rows,
    load_templates,
    make_examples,
    rank_profiles,
)

TEMPLATES = load_templates()
TOKENIZER = make_tokenizer()


def save_json(path, value, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding)
    return str(path)


def fault_of(path, split="train", config=""):
    with pytest.raises(InputError) as fault:
        load_rows(str(path), split, config)
    assert "\n" not in str(fault.value)
    return str(fault.value)


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_both_field_flavours_give_the_same_rows(tmp_path):
    rows = toy_rows(3)
    other = [{**row, "details": row["narrative"], "aspects": row["rubric_aspects"], "config": "C"} for row in rows]
    for row in other:
        del row["narrative"], row["rubric_aspects"]
    plain, renamed = (load_rows(save_json(tmp_path / name, rs), "") for name, rs in (("a.json", rows), ("b.json", other)))
    assert [{**row, "config": "C"} for row in plain] == renamed
    assert plain[0] == {
        "id": "q0",
        "config": "",
        "question": rows[0]["question"],
        "narrative": rows[0]["narrative"],
        "rubric_aspects": rows[0]["rubric_aspects"],
        "profile": [post["text"] for post in rows[0]["profile"]],
    }


def test_json_and_json_lines_with_bom_blank_lines_and_line_separators_in_strings_read_alike(tmp_path):
    rows = toy_rows(3)
    rows[1]["question"] = "one\u2028two\u2029three\x85four\x0bfive\r\nsix\nseven \U0001f375 é"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    expected = load_rows(save_json(tmp_path / "a.json", json.dumps(rows)), "")
    assert expected[1]["question"] == rows[1]["question"]
    for i, text in enumerate(
        [
            "\n".join(lines),
            "\n\n" + "\n \n".join(lines) + "\n\n",
            "\r\n".join(lines),
            json.dumps(rows, ensure_ascii=False, indent=2),
        ]
    ):
        assert load_rows(save_json(tmp_path / f"{i}.jsonl", text), "") == expected
        assert load_rows(save_json(tmp_path / f"{i}-bom.jsonl", text, "utf-8-sig"), "") == expected


def test_a_folder_is_read_by_split_and_by_config(tmp_path):
    write_rows(tmp_path / "flat/train.jsonl", toy_rows(2))
    write_rows(tmp_path / "flat/test.jsonl", toy_rows(1, start=50))
    (tmp_path / "flat/train.json.bak").write_text("no JSON")
    assert [row["id"] for row in load_rows(str(tmp_path / "flat"), "train")] == ["q0", "q1"]
    assert [row["id"] for row in load_rows(str(tmp_path / "flat"), "test")] == ["q50"]
    for i, config in enumerate(CONFIGS):
        save_json(tmp_path / "deep" / config / "train.json", toy_rows(2, start=10 * i))
    found = load_rows(str(tmp_path / "deep"), "train")
    assert [(row["config"], row["id"]) for row in found] == [
        (c, f"q{10 * i + j}") for i, c in enumerate(CONFIGS) for j in (0, 1)
    ]
    assert [row["id"] for row in load_rows(str(tmp_path / "deep"), "train", CONFIGS[1])] == ["q10", "q11"]
    mixed = [{**row, "config": CONFIGS[i]} for i, row in enumerate(toy_rows(3))]
    write_rows(tmp_path / "mixed.jsonl", mixed)
    assert [row["id"] for row in load_rows(str(tmp_path / "mixed.jsonl"), "any", CONFIGS[2])] == ["q2"]


def test_a_hub_dataset_is_read_config_by_config(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return toy_rows(2, start=10 * len(asked))

    monkeypatch.setattr(lamp_qa.datasets, "load_dataset", load_dataset)
    rows = load_rows("alireza7/LaMP-QA", "validation")
    assert asked == [("alireza7/LaMP-QA", config, "validation") for config in CONFIGS]
    assert [(row["id"], row["config"]) for row in rows][::2] == [(f"q{10 * i}", c) for i, c in enumerate(CONFIGS, 1)]
    asked.clear()
    load_rows("alireza7/LaMP-QA", "test", CONFIGS[0])
    assert asked == [("alireza7/LaMP-QA", CONFIGS[0], "test")]


def test_optional_fields_may_be_absent_or_null(tmp_path):
    bare = {"id": "a", "question": "Why?"}
    null = {"id": "b", "question": "Why?", "narrative": None, "category": None, "rubric_aspects": None, "profile": None}
    found = load_rows(save_json(tmp_path / "a.json", [bare, null]), "")
    assert [{**row, "id": ""} for row in found] == [
        {"id": "", "config": "", "question": "Why?", "narrative": "", "rubric_aspects": [], "profile": []}
    ] * 2


@pytest.mark.parametrize(
    "change, named",
    [
        ({"question": None}, ["question", "non-empty string", "None"]),
        ({"question": "  "}, ["question", "non-empty"]),
        ({"question": ["Why?"]}, ["question", "['Why?']"]),
        ({"id": 7}, ["id", "7"]),
        ({"id": ""}, ["id", "non-empty"]),
        ({"narrative": 3}, ["narrative", "3"]),
        ({"rubric_aspects": ["cost", "time"]}, ["rubric_aspects", "list of objects", "cost"]),
        ({"rubric_aspects": "cost"}, ["rubric_aspects", "list of objects"]),
        ({"rubric_aspects": [{"aspect": "ok"}, {"reason": "x"}]}, ["rubric_aspects[1].aspect", "None"]),
        ({"rubric_aspects": [{"aspect": "ok", "evidence": 1}]}, ["rubric_aspects[0].evidence"]),
        ({"rubric_aspects": None, "aspects": {"a": 1}}, ["aspects", "list of objects"]),
        ({"profile": [{"text": "ok"}, {"text": 1.5}]}, ["profile[1].text", "1.5"]),
        ({"profile": ["a post"]}, ["profile", "list of objects"]),
        ({"question": "half \ud83d"}, ["question", "surrogate"]),
        ({"profile": [{"text": "\udfff"}]}, ["profile[0].text", "surrogate"]),
        ({"profile": [{"text": "ok"}, {"id": 1, "txt": "a post"}]}, ["profile[1].text", "id, txt"]),
        ({"id": None}, ["row 3, id:", "None"]),
    ],
)
def test_a_fault_is_named_by_file_row_id_and_field(tmp_path, change, named):
    rows = toy_rows(4)
    rows[2].update(change)
    text = fault_of(write_rows(tmp_path / "train.jsonl", rows))
    its_id = [f"id {str(rows[2]['id'])!r}"] * (rows[2]["id"] is not None)
    assert all(word in text for word in [str(tmp_path / "train.jsonl"), "row 3,", *its_id, "expected", *named]), text


@pytest.mark.parametrize(
    "field, misspelt",
    [("profile", "profiles"), ("rubric_aspects", "rubric_aspect"), ("narrative", "narative"), ("config", "Config")],
)
def test_a_misspelt_field_is_no_missing_one(tmp_path, field, misspelt):
    rows = toy_rows(4)
    rows[2][misspelt] = rows[2].pop(field, "One")
    text = fault_of(write_rows(tmp_path / "train.jsonl", rows))
    assert all(word in text for word in ["train.jsonl, row 3, id 'q2'", f"{misspelt}: unknown field", f"'{field}' meant"]), text


def test_rows_without_posts_are_counted_and_a_data_set_without_any_is_refused(tmp_path, options):
    rows, settings = toy_rows(6), options(max_prompt_tokens=2000)
    del rows[1]["profile"]
    rows[4]["profile"] = [{"text": " "}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    _, account = load_examples(settings, path, "train", TOKENIZER, TEMPLATES)
    assert account["without_posts"] == ["q1", "q4"] and "6 used, 2 of them without posts (q1, q4)" in describe(account)
    path = write_rows(tmp_path / "b.jsonl", [{**row, "profile": []} for row in rows])
    with pytest.raises(InputError, match=r"b\.jsonl, train: no row has a post in its profile; --num-contexts 0"):
        load_examples(settings, path, "train", TOKENIZER, TEMPLATES)
    settings.num_contexts = 0
    examples, account = load_examples(settings, path, "train", TOKENIZER, TEMPLATES)
    assert len(examples) == 6 and "without_posts" not in account


def test_either_name_of_a_field_will_do_if_the_other_is_empty(tmp_path):
    rows = toy_rows(1)
    given = [{**rows[0], "narrative": "", "details": "more", "rubric_aspects": [], "aspects": [{"aspect": "a"}]}]
    found = load_rows(write_rows(tmp_path / "a.jsonl", given), "")[0]
    assert found["narrative"] == "more" and found["rubric_aspects"] == [{"aspect": "a", "reason": "", "evidence": ""}]


def test_a_misspelt_reason_is_named_and_other_fields_are_nobodys_business(tmp_path):
    rows = toy_rows(2)
    rows[1]["rubric_aspects"][0]["reasons"] = rows[1]["rubric_aspects"][0].pop("reason", "because")
    assert "rubric_aspects[0].reasons: unknown field; is 'reason' meant?" in fault_of(write_rows(tmp_path / "a.jsonl", rows))
    more = {"title": "t", "profiles": 3, "url": None, "aspects": None, "detail": 1, "config_id": 1, "configs": None}
    rows = [{**row, **more} for row in toy_rows(2)]
    for post in rows[0]["profile"]:
        post |= {"date": "2020", "texts": 1}
    assert load_rows(write_rows(tmp_path / "b.jsonl", rows), "") == load_rows(write_rows(tmp_path / "c.jsonl", toy_rows(2)), "")


def test_faults_are_reported_together_and_the_rest_is_counted(tmp_path):
    rows = toy_rows(10)
    for row in rows[2:9]:
        del row["question"]
    rows[9]["id"] = "q1"
    rows[4]["narrative"] = 1
    text = fault_of(write_rows(tmp_path / "a.jsonl", rows))
    assert [f"row {n}," in text for n in range(1, 11)] == [3 <= n <= 6 for n in range(1, 11)]
    assert text.count("expected") == 5 and "4 more faults" in text


def test_a_duplicate_id_is_named_with_both_rows_also_across_files(tmp_path):
    write_rows(tmp_path / "a/train.jsonl", toy_rows(3))
    write_rows(tmp_path / "b/train.jsonl", toy_rows(2, start=2))
    text = fault_of(tmp_path)
    assert "'q2'" in text and f"{tmp_path}/b/train.jsonl, row 1" in text and "row 3" in text


@pytest.mark.parametrize("content", ["", "\n", "[]", "{", "[1, 2", "no JSON", '{"id": "a"}{', "[" * 100_000, '{"a":' * 100_000])
def test_what_is_no_json_or_has_no_rows_is_an_input_error(tmp_path, content):
    assert "a.jsonl" in fault_of(save_json(tmp_path / "a.jsonl", content))


def test_values_nested_to_any_depth_are_an_input_error(tmp_path):
    """Neither reading nor quoting them may run into Python's recursion limit."""
    for depth in range(100, 1100, 50):
        for key in ("question", "profile"):
            nested = "[" * depth + "]" * depth
            fault_of(save_json(tmp_path / "a.jsonl", f'{{"id": "a", "question": "Why?", "{key}": {nested}}}'))


def test_a_file_that_is_no_text_a_missing_one_and_a_missing_split_are_input_errors(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe[]")
    assert "a.json" in fault_of(tmp_path / "a.json")
    assert "no such file" in fault_of(tmp_path / "b.json") and "no such file" in fault_of("nowhere")
    write_rows(tmp_path / "data/train.jsonl", toy_rows(2))
    missing = fault_of(tmp_path / "data", "test")
    assert "'test' (--split)" in missing and "found train.jsonl" in missing
    assert "'Other'" in fault_of(write_rows(tmp_path / "c.jsonl", [{**toy_rows(1)[0], "config": "One"}]), "train", "Other")


# --- Which rows can be used -------------------------------------------------------------------------------------------


def checked(rows):
    return [check_row(row)[0] for row in rows]


def examples_of(rows, tokenizer=TOKENIZER, **settings):
    return make_examples(checked(rows), tokenizer, GraspOptions(**{"max_dropped": 1.0, **settings}), TEMPLATES)


@pytest.mark.parametrize("where", ["narrative", "reason"])
def test_a_row_whose_privileged_text_stands_in_its_own_profile_is_left_out_and_listed(where):
    """Trap 16: the student would see what only the teacher may."""
    rows = toy_rows(5)
    secret = "My sister wants to sell the old house by the sea and I cannot decide."
    if where == "narrative":
        rows[3]["narrative"] = secret
    else:
        rows[3]["rubric_aspects"][1]["reason"] = secret
    rows[3]["profile"].append({"id": "x", "text": f"Hello all! {secret.upper()} Thanks."})
    examples, dropped = examples_of(rows)
    assert [example["id"] for example in examples] == ["q0", "q1", "q2", "q4"]
    assert dropped == {"privileged text in the profile": ["q3"]}
    assert len(examples_of(rows, num_contexts=2)[0]) == 5  # that post is not shown then


def test_a_post_that_shares_some_words_with_the_narrative_leaves_the_row_in():
    rows = toy_rows(1)
    rows[0]["narrative"] = "I was told last year in the summer that hiking is good for the knees and lungs of old people."
    rows[0]["profile"].append({"text": "I was told last year in the summer to buy another bicycle."})
    assert len(examples_of(rows)[0]) == 1


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_nothing_is_cut_a_row_over_the_budget_is_left_out_and_counted(who):
    """Trap 6: the longer prompt of both counts, to the token."""
    rows = toy_rows(6)
    if who == "student":
        rows[2]["profile"][0]["text"] = "tea " * 200
    else:
        rows[2]["rubric_aspects"][0]["reason"] = "tea " * 200
    whole, dropped = examples_of(rows, max_prompt_tokens=10_000)
    assert len(whole) == 6 and dropped == {}
    longest = sorted(max(len(e["student"]), len(e["teacher"])) for e in whole)
    assert longest[-1] > longest[-2]
    examples, dropped = examples_of(rows, max_prompt_tokens=longest[-2])
    assert dropped == {f"prompt over {longest[-2]} tokens": ["q2"]}
    assert examples == [example for example in whole if example["id"] != "q2"]
    for example in examples:
        user = {"role": "user", "content": example["prompt"]}
        system = {"role": "system", "content": TEMPLATES["system_json"]}
        assert example["student"] == encode_chat(TOKENIZER, [system, user])
    assert len(examples_of(rows, max_prompt_tokens=longest[-1])[0]) == 6


def test_too_many_rows_left_out_is_an_error_that_says_why_and_what_to_change():
    rows = toy_rows(10)
    for row in rows[:2]:
        row["rubric_aspects"] = []
    examples, dropped = examples_of(rows, max_dropped=0.2)
    assert len(examples) == 8 and dropped == {"no aspects to show the teacher": ["q0", "q1"]}
    with pytest.raises(InputError, match="2 of 10 rows.*no aspects.*q0, q1.*--max-dropped"):
        examples_of(rows, max_dropped=0.19)
    with pytest.raises(InputError, match="10 of 10 rows.*--max-prompt-tokens"):
        examples_of(rows, max_prompt_tokens=5, max_dropped=1.0)


LONG, TOLD = {"text": "tea " * 200}, "My sister wants to sell the old house by the sea."


@pytest.mark.parametrize(
    "change, cure, others",
    [
        (dict(rubric_aspects=[]), "--privileged", ["--num-contexts", "--max-prompt-tokens"]),
        (dict(narrative=TOLD, profile=[{"text": TOLD}]), "--num-contexts", ["--privileged", "--max-prompt-tokens"]),
        (dict(profile=[LONG]), "--max-prompt-tokens", ["--privileged", "the data"]),
    ],
)
def test_the_advice_on_rows_left_out_fits_the_reason(change, cure, others):
    rows = toy_rows(4)
    rows[1] |= change
    for some, allowed in ((rows, True), (rows[1:2], False)):  # where no row is left, a larger --max-dropped does not help
        with pytest.raises(InputError, match="rows cannot be used") as error:
            examples_of(some, max_dropped=0.1, max_prompt_tokens=500)
        assert cure in str(error.value) and not any(word in str(error.value) for word in others)
        assert str(error.value).endswith("; or raise --max-dropped") == allowed


def test_the_account_adds_up_and_is_told(tmp_path):
    rows = toy_rows(6)
    rows[1]["rubric_aspects"] = []
    options = GraspOptions(max_dropped=0.5)
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    examples, account = load_examples(options, path, "train", TOKENIZER, TEMPLATES)
    left_out = {"no aspects to show the teacher": ["q1"]}
    assert len(account.pop("hash")) == 16
    assert account == {"dataset": path, "split": "train", "rows": 6, "used": 5, "left_out": left_out}
    assert all(word in describe(account) for word in (path, "6 rows", "5 used", "no aspects to show the teacher: 1 (q1)"))


# --- Any input at all -------------------------------------------------------------------------------------------------


texts = st.text(st.characters() | st.sampled_from("<|>{}[]\ud800\udc00\u2028\x00"), max_size=12)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["aspect", "text", "id", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
aspects = st.lists(
    st.fixed_dictionaries({"aspect": texts}, optional={"reason": texts | st.none(), "evidence": texts}) | anything, max_size=3
)
good = {"question": texts, "profile": st.lists(st.fixed_dictionaries({"text": texts}), max_size=3), "rubric_aspects": aspects}
some_rows = st.fixed_dictionaries(
    {"id": texts | anything, "question": texts | anything},
    optional={
        "profile": good["profile"] | anything,
        "rubric_aspects": aspects | anything,
        "aspects": aspects,
        "narrative": texts | anything,
        "details": texts,
        "config": texts | anything,
    },
)


@given(st.lists(some_rows | anything, max_size=4), st.sampled_from(["aspects", "narrative", "both"]), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_come_back_right_or_as_an_input_error_whatever_they_are(tmp_path, raw, privileged, lines):
    text = "\n".join(map(json.dumps, raw)) if lines else json.dumps(raw)
    try:
        rows = load_rows(save_json(tmp_path / "a.json", text), "train")
        examples, dropped = make_examples(rows, TOKENIZER, GraspOptions(privileged=privileged, max_dropped=1.0), TEMPLATES)
    except InputError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert [row["id"] for row in rows] == [row["id"] for row in raw]
    for row, given_row in zip(rows, raw):
        assert row["question"] == given_row["question"] and row["question"].strip()
        assert row["profile"] == [post.get("text") or "" for post in given_row.get("profile") or []]
        assert all(item["aspect"].strip() for item in row["rubric_aspects"])
    assert sorted([e["id"] for e in examples] + sum(dropped.values(), [])) == sorted(row["id"] for row in rows)
    special = [
        i for i in encode_chat(TOKENIZER, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]) if i < 2
    ]
    for example in examples:
        for role in ("student", "teacher"):
            assert [i for i in example[role] if i < 2] == special


# --- Ranking the profile ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny random BERT with the tokenizer's ids."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    sizes = dict(vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    tf.BertModel(tf.BertConfig(**sizes, max_position_embeddings=512, initializer_range=0.5)).save_pretrained(folder)
    core = tokenizers.Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    tf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|im_end|>").save_pretrained(folder)
    return str(folder)


def ranked_by_hand(row, encoder):
    tokenizer, model = tf.AutoTokenizer.from_pretrained(encoder), tf.AutoModel.from_pretrained(encoder).eval()

    def embed(text):
        with torch.no_grad():
            return model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0)

    question = embed(row["question"])
    return sorted(row["profile"], key=lambda post: -(question @ embed(post)).item())


def rows_with_many_posts(count, posts=40):
    draw = random.Random(0)
    rows = toy_rows(count)
    for row in rows:
        row["profile"] = [
            {"text": f"{i} " + "tea garden piano " * draw.randint(0, 9) + str(draw.random())} for i in range(posts)
        ]
    return checked(rows)


def test_posts_are_ranked_by_mean_pooled_dot_product_with_the_question(encoder):
    rows = rows_with_many_posts(2)
    found = rank_profiles(rows, encoder)
    for before, after in zip(rows, found):
        assert after["profile"] == ranked_by_hand(before, encoder) != before["profile"]
        assert {**after, "profile": 0} == {**before, "profile": 0}


def test_ranking_is_done_once_and_again_for_other_texts(encoder, monkeypatch):
    rows = rows_with_many_posts(3)
    first, real, calls = rank_profiles(rows, encoder), tf.BertModel.forward, []
    monkeypatch.setattr(tf.BertModel, "forward", lambda *a, **k: calls.append(1) or real(*a, **k))
    assert rank_profiles(rows, encoder) == first and not calls
    rows[1]["question"] += " now"
    rank_profiles(rows, encoder)
    assert calls


def test_rows_without_posts_are_ranked_too(encoder):
    rows = rows_with_many_posts(3, posts=2)
    rows[0]["profile"] = []
    assert [len(row["profile"]) for row in rank_profiles(rows, encoder)] == [0, 2, 2]


def test_posts_of_equal_nearness_keep_their_order(encoder):
    rows = checked([{**toy_rows(1)[0], "profile": [{"text": "same words"}] * 3}])
    (order,) = (item["order"] for item in lamp_qa.rank_texts([[[rows[0]["question"], *rows[0]["profile"]]]], encoder))
    assert order == [0, 1, 2]


def test_a_missing_encoder_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        rank_profiles(rows_with_many_posts(1, 2), str(tmp_path / "nowhere"))


def test_a_folder_without_the_split_is_told_apart_from_the_hub(tmp_path):
    write_rows(tmp_path / "train.jsonl", toy_rows(1))
    with pytest.raises(
        InputError, match=r"no split 'validation' \(--split\): expected validation.jsonl or .json, found train.jsonl"
    ):
        load_rows(str(tmp_path), "validation")

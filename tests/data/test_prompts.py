"""Datasets in every format come out right; malformed ones are refused with file, line and what was expected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quintet.data.prompts import Prompt, PromptSet, alphabet_of, load_prompts, make_prompts
from quintet.data.stream import PromptStream
from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer
from quintet.errors import UserError
from quintet.recipe.schema import Data

ROWS = [{"prompt": f"What is {i}+1?", "answer": str(i + 1), "response": f"It is {i + 1}"} for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(alphabet_of(Data(task="jsonl")), directory)
    return load_tokenizer(directory)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path | str, tokenizer: Any, **options: Any) -> PromptSet:
    needs = options.pop("needs", ("answer",))
    return load_prompts(Data(train_path=str(path), **options), "train", tokenizer, seed=0, needs=needs)


def test_formats_give_the_same_prompts(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([3])}).save_to_disk(tmp_path / "splits")
    jsonl(tmp_path / "rows.jsonl", ROWS)
    dataset.to_csv(tmp_path / "rows.csv")

    kinds = ("rows.jsonl", "rows.parquet", "one", "splits", "rows.csv")
    loaded = [load(tmp_path / n, tokenizer) for n in kinds]
    for prompts in loaded:
        assert [(p.id, p.text, p.answer, p.response) for p in prompts] == [
            (i, row["prompt"], row["answer"], row["response"]) for i, row in enumerate(ROWS)
        ]
    assert loaded[0][16].source == f"{tmp_path / 'rows.jsonl'}:17"
    assert loaded[1][16].source == f"{tmp_path / 'rows.parquet'}:row 17"
    assert loaded[4][16].source == f"{tmp_path / 'rows.csv'}:18"
    data = Data(eval_path=str(tmp_path / "splits"))
    assert [p.answer for p in load_prompts(data, "eval", tokenizer, seed=0)] == ["4"]


def test_tokens(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(jsonl(tmp_path / "a.jsonl", ROWS[:1]), tokenizer)
    assert tokenizer.decode(prompt.token_ids) == prompt.text == "What is 0+1?"
    assert tokenizer.decode(prompt.response_ids) == "It is 1<eos>"
    assert prompt.response_ids[-1] == tokenizer.eos_token_id


def test_chat_template_and_system_prompt(tmp_path: Path, tokenizer: Any) -> None:
    from copy import deepcopy

    roles = deepcopy(tokenizer)
    roles.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text = jsonl(tmp_path / "text.jsonl", [{"prompt": "hi", "answer": 3}])
    (prompt,) = load(text, roles, system_prompt="be kind")
    assert prompt.text == "[system]be kind[user]hi[assistant]"
    assert prompt.answer == "3"
    assert load(text, roles)[0].text == "[user]hi[assistant]"
    assert load(text, roles, chat=False)[0].text == "hi"
    turns = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    chat = jsonl(tmp_path / "chat.jsonl", [{"prompt": turns, "answer": ""}])
    assert load(chat, roles)[0].text == "[user]a[assistant]b[user]c[assistant]"

    with pytest.raises(UserError, match=r"needs data\.chat=true"):
        load(chat, roles, chat=False)
    own = jsonl(
        tmp_path / "own.jsonl", [{"prompt": [{"role": "system", "content": "s"}, turns[0]], "answer": ""}]
    )
    with pytest.raises(UserError, match="a system prompt of their own"):
        load(own, roles, system_prompt="x")
    roles.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(UserError, match=r"text\.jsonl:1: the chat template cannot render.*no tools here"):
        load(text, roles)
    roles.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        load(text, roles)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"prompt": "x", "answer": }',
            r"bad\.jsonl:17: not valid JSON .*expected one JSON object a line, got: \{",
        ),
        (b"[1, 2]", r"bad\.jsonl:17: expected a JSON object .*got a list"),
        (b'{"answer": "1"}', r"bad\.jsonl:17: no column 'prompt'; the row has 'answer'.*data\.prompt_key"),
        (b'{"prompt": "x"}', r"bad\.jsonl:17: no column 'answer'.*data\.answer_key"),
        (b'{"prompt": 5, "answer": "1"}', r"bad\.jsonl:17: column 'prompt' must be text .*got 5"),
        (b'{"prompt": "", "answer": "1"}', r"bad\.jsonl:17: column 'prompt' must be text"),
        (
            b'{"prompt": "x", "answer": null}',
            r"bad\.jsonl:17: column 'answer' must be text or a number, got None",
        ),
        (b'{"prompt": "x", "answer": [1]}', r"bad\.jsonl:17: column 'answer' must be"),
        (b'{"prompt": ["x"], "answer": "1"}', r"bad\.jsonl:17: message 0 .*expected \[\{"),
        (b'{"prompt": [], "answer": "1"}', r"bad\.jsonl:17: column 'prompt' must end in a message"),
        (
            b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}',
            r":17: .*must end in a message",
        ),
        (b'{"prompt": "\xff", "answer": "1"}', r"bad\.jsonl:17: not UTF-8"),
        (b'{"prompt": "x", "answer": "\\uD83D"}', r"bad\.jsonl:17: not valid JSON .*surrogates not allowed"),
        (b'{"prompt": "x\\u4e00", "answer": "1"}', r"bad\.jsonl:17: the tokenizer does not know"),
        (
            b'{"prompt": "' + b"x" * 101 + b'", "answer": "1"}',
            r"bad\.jsonl:17: the prompt has 101 tokens, more than data\.max_prompt_tokens=100; .*tokens=101",
        ),
        (b"[" * 100000, r"bad\.jsonl:17: "),
    ],
)
def test_bad_line_17(tmp_path: Path, tokenizer: Any, line: bytes, message: str) -> None:
    good = json.dumps(ROWS[0]).encode()
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join([good] * 16 + [line] + [good] * 3))
    with pytest.raises(UserError, match=message):
        load(tmp_path / "bad.jsonl", tokenizer, max_prompt_tokens=100)


def test_pairs_are_text_and_columns_that_are_not_needed_may_be_anything(
    tmp_path: Path, tokenizer: Any
) -> None:
    row = b'{"prompt": "x", "answer": "\\ud83d\\ude00", "response": ["no", "text"]}'
    (tmp_path / "odd.jsonl").write_bytes(row)
    (prompt,) = load(tmp_path / "odd.jsonl", tokenizer)
    assert (prompt.answer, prompt.response) == ("\U0001f600", None)


def test_the_same_data_are_known_whatever_the_template_makes_of_them() -> None:
    asked = [{"role": "user", "content": "1+1"}]
    prompts = [
        Prompt(0, asked, [1], f"Today is {day}. 1+1", answer, response, [], "f:1")
        for day, answer, response in (("Monday", "2", "two"), ("Tuesday", "2", "two"), ("Monday", "3", "two"))
    ]
    of = [PromptSet([one], "f").fingerprint() for one in [*prompts, replace(prompts[0], response="2")]]
    assert of[0] == of[1]
    assert len(set(of)) == 3


def test_bad_files(tmp_path: Path, tokenizer: Any) -> None:
    def refused(path: Path | str, message: str, **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            load(path, tokenizer, **options)

    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "fake.parquet").write_text("x")
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "directory").mkdir()
    refused(tmp_path / "empty.jsonl", r"data\.train_path: .*empty\.jsonl is empty")
    refused(tmp_path / "fake.parquet", r"fake\.parquet: not a readable parquet file")
    refused(tmp_path / "rows.txt", r"neither a \.jsonl nor a \.parquet nor a \.csv file")
    refused(tmp_path / "missing.jsonl", r"data\.train_path: there is no file .*missing\.jsonl")
    refused("missing.jsonl", r"data\.train_path: there is no file missing\.jsonl")
    refused("prompts/missing.jsonl", "there is no file prompts/missing.jsonl")
    refused(tmp_path / "directory", "not one saved by datasets")
    refused(jsonl(tmp_path / "only.jsonl", [{"prompt": "x"}]), "no column 'response'", needs=("response",))


def test_held_out_columns_have_names_of_their_own(tmp_path: Path, tokenizer: Any) -> None:
    rows = jsonl(tmp_path / "held_out.jsonl", [{"problem": "1+1?", "solution": 2}])
    named = {"eval_prompt_key": "problem", "eval_answer_key": "solution"}
    data = Data(train_path=str(jsonl(tmp_path / "a.jsonl", ROWS)), eval_path=str(rows), **named)
    (prompt,) = load_prompts(data, "eval", tokenizer, seed=0)
    assert (prompt.text, prompt.answer) == ("1+1?", "2")
    assert load_prompts(data, "train", tokenizer, seed=0)[3].answer == "4"
    (prompt,) = load_prompts(data.model_copy(update={"eval_answer_key": ""}), "eval", tokenizer, seed=0)
    assert prompt.answer == ""
    with pytest.raises(
        UserError, match=r"no column 'prompt'; .*Name the right one with data\.eval_prompt_key"
    ):
        load_prompts(Data(eval_path=str(rows)), "eval", tokenizer, seed=0)
    rows = jsonl(tmp_path / "worked.jsonl", [{"q": "1+1?", "a": "so #### 2"}])
    data = Data(task="gsm8k", eval_path=str(rows), eval_prompt_key="q", eval_answer_key="a")
    (prompt,) = load_prompts(data, "eval", tokenizer, seed=0)
    assert prompt.answer == "2"


def test_sft_has_a_file_of_its_own(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "worked.jsonl", [{"prompt": "1+1=", "response": "two\u00e9"}])
    tokenizer = build_char_tokenizer(alphabet_of(Data(sft_path=str(rows))), tmp_path / "tokenizer")
    for task in ("addition", "jsonl", "gsm8k"):
        data = Data(task=task, sft_path=str(rows), prompt_key="prompt")
        assert set("two\u00e9") <= set(alphabet_of(data))
        (prompt,) = load_prompts(data, "sft", tokenizer, seed=0, needs=["response"])
        assert (prompt.text, prompt.response, prompt.answer) == ("1+1=", "two\u00e9", "")
    with pytest.raises(UserError, match="no column 'response'"):
        load_prompts(
            Data(sft_path=str(jsonl(rows, [{"prompt": "a"}]))), "sft", tokenizer, seed=0, needs=["response"]
        )


def test_long_prompts_are_refused_dropped_or_cut_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * n + "?", "answer": n} for n in (3, 30, 4, 40)])
    with pytest.raises(
        UserError, match=r"a\.jsonl:2: the prompt has 31 tokens.* \(1 more .*data.long_prompts=drop"
    ):
        load(rows, tokenizer, max_prompt_tokens=5)
    kept = load(rows, tokenizer, max_prompt_tokens=5, long_prompts="drop")
    assert [(p.id, p.answer) for p in kept] == [(0, "3"), (2, "4")]
    (told,) = kept.notes
    assert told.startswith(
        f"2 of 4 prompts in {rows} have more than data.max_prompt_tokens=5 tokens and are left out"
    )
    cut = load(rows, tokenizer, max_prompt_tokens=5, long_prompts="cut_left")
    assert [p.text for p in cut] == ["xxx?", "xxxx?", "xxxx?", "xxxx?"]
    assert all(tokenizer.decode(p.token_ids) == p.text and len(p.token_ids) <= 5 for p in cut)
    assert "2 of 4 prompts" in cut.notes[0]
    assert "lose their beginning" in cut.notes[0]
    assert not load(rows, tokenizer, long_prompts="drop").notes
    with pytest.raises(UserError, match=r"4 of 4 prompts .* leaves none"):
        load(rows, tokenizer, max_prompt_tokens=2, long_prompts="drop")
    data = Data(max_prompt_tokens=5, long_prompts="drop", chat=False)
    with pytest.raises(
        UserError, match="prompt 2: the prompt has 6 tokens"
    ):  # nobody's own prompt disappears
        make_prompts(["short", "longer"], data, tokenizer)
    with pytest.raises(UserError, match="prompt 2: it must be text or a list of chat messages, got ''"):
        make_prompts(["short", ""], data, tokenizer)
    with pytest.raises(
        UserError, match=r"prompt 1: it must be text or a list of chat messages, got 'a\\udcff'"
    ):
        make_prompts(["a\udcff"], data, tokenizer)  # what Python makes of an argument that is no UTF-8


def test_a_csv_takes_a_long_prompt_and_columns_without_a_name(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,answer,,\n{'x' * 200_000},1,,\n")
    assert len(load(tmp_path / "a.csv", tokenizer, max_prompt_tokens=200_100)[0].text) >= 200_000


def test_parquet_with_a_value_that_python_has_nothing_for_is_named(tmp_path: Path, tokenizer: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    no_text = pyarrow.array([b"\xff"]).view(pyarrow.utf8())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": no_text}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: not a readable parquet file .*decode byte 0xff"):
        load(tmp_path / "a.parquet", tokenizer)


def test_an_answer_that_is_no_number_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    rows = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": float("nan")}])  # as pandas leaves a gap
    with pytest.raises(UserError, match=r"a\.jsonl:1: column 'answer' must be text or a number, got nan"):
        load(rows, tokenizer)
    assert load(rows, tokenizer, needs=())[0].answer == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "prompt,answer\nwhat, then?,2\n",
            r"a\.csv:2: not as many fields as the header has \(prompt, answer\)",
        ),
        ('prompt,answer\n"a\nb",1\nc\n', r"a\.csv:4: not as many fields"),
        ('prompt,answer\n"a"b,2\n', r"a\.csv:2: not valid csv"),
        ("prompt,answer,prompt\na,1,b\n", r"a\.csv:1: the header names 'prompt' twice"),
        ("prompt,answer\n", "is empty"),
    ],
)
def test_a_malformed_csv_is_named(tmp_path: Path, tokenizer: Any, text: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        load(tmp_path / "a.csv", tokenizer)


def test_no_answers_on_request(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    assert load(path, tokenizer, answer_key="")[0].answer == ""
    assert load(path, tokenizer, needs=())[0].answer == ""


def test_line_separators_inside_strings_do_not_cut_a_row(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"prompt": "a\\tb", "answer": "\u2028 \x85"}\r\n', encoding="utf-8")
    assert load(path, tokenizer)[0].answer == "\u2028 \x85"


def test_gsm8k(tmp_path: Path, tokenizer: Any) -> None:
    row = {"question": "How many?", "answer": "She has 16 - 4 = $<<16-4=12>>1,200.\nSo.\n#### 1,200"}
    (prompt,) = load(jsonl(tmp_path / "g.jsonl", [row]), tokenizer, task="gsm8k")
    assert prompt.text == "How many?\nThink step by step, and put the final answer in \\boxed{}."
    assert prompt.answer == "1200"
    assert prompt.response == "She has 16 - 4 = $1,200.\nSo.\nThe answer is \\boxed{1200}."
    with pytest.raises(UserError, match=r'g\.jsonl:1: expected a GSM8K row.*"#### <number>"'):
        load(jsonl(tmp_path / "g.jsonl", [{"question": "x", "answer": "5"}]), tokenizer, task="gsm8k")


def test_alphabet_covers_the_files(tmp_path: Path) -> None:
    row = {"question": "Janet’s ducks?", "answer": "é\n#### 3"}
    data = Data(task="gsm8k", train_path=str(jsonl(tmp_path / "g.jsonl", [row])))
    tokenizer = build_char_tokenizer(alphabet_of(data), tmp_path / "tokenizer")
    (prompt,) = load_prompts(data, "train", tokenizer, seed=0)
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert set(alphabet_of(Data(task="addition"))) == set("0123456789+=")


def test_built_in_task(tmp_path: Path) -> None:
    data = Data(task="addition", task_options={"digits": 1})
    tokenizer = build_char_tokenizer(alphabet_of(data), tmp_path)
    train = load_prompts(data, "train", tokenizer, seed=0)
    prompt = train[0]
    assert eval(prompt.text.rstrip("=")) == int(prompt.answer)
    assert len(prompt.token_ids) == len(prompt.text)
    assert len(prompt.response_ids) == len(prompt.answer) + 1
    assert train.fingerprint() == load_prompts(data, "train", tokenizer, seed=0).fingerprint()
    assert train.fingerprint() != load_prompts(data, "train", tokenizer, seed=1).fingerprint()
    assert len(train.subset(5, 0)) == 5
    assert train.subset(5, 0).prompts == train.subset(5, 0).prompts
    assert train.subset(10**6, 0) is train


def test_stream_covers_every_prompt_each_epoch_and_resumes(tmp_path: Path, tokenizer: Any) -> None:
    prompts = load(jsonl(tmp_path / "a.jsonl", ROWS), tokenizer)
    stream = PromptStream(prompts, seed=1)
    epochs = [[p.id for p in stream.take(7)] + [p.id for p in stream.take(13)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]

    stream = PromptStream(prompts, seed=1)
    stream.take(33)
    rows = prompts.prompts
    assert stream.lengths.expected("train", rows) is None
    stream.lengths.heard("train", rows[:3], [9, 11, 20, 21, 40, 40])
    stream.lengths.heard("train", rows[2:3], [60])
    stream.lengths.heard("eval", rows[3:4], [7])
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(prompts, seed=1)
    resumed.load_state_dict(state)
    for one in (stream, resumed):
        assert one.lengths.expected("train", rows[:4]) == [10, 20, 60, 30]
        assert one.lengths.expected("train", rows[3:]) is None
        assert one.lengths.expected("eval", rows[2:4]) == [7, 7]
    before = PromptStream(prompts, seed=1)
    before.load_state_dict(
        {key: value for key, value in state.items() if key not in ("response_tokens", "digest")}
    )
    assert before.lengths.expected("train", rows) is None
    assert [p.id for p in resumed.take(45)] == [p.id for p in stream.take(45)]
    assert resumed.state_dict() == stream.state_dict()
    assert [p.id for p in PromptStream(prompts, seed=2).take(20)] != epochs[0]
    assert [p.id for p in PromptStream(prompts, seed=2, shuffle=False).take(25)] == [*range(20), *range(5)]

    others = load(jsonl(tmp_path / "a.jsonl", ROWS[::-1]), tokenizer)
    for other, message in (
        (PromptStream(prompts, seed=2), r"run\.seed was 1 and is now 2"),
        (PromptStream(prompts.subset(5, 0), seed=1), "number of prompts .* was 20 and is now 5"),
        (PromptStream(prompts, seed=1, shuffle=False), r"data\.shuffle was True and is now False"),
        (PromptStream(others, seed=1), r"content of .* was .* and is now .*restore it, or start a new run"),
    ):
        with pytest.raises(UserError, match=message):
            other.load_state_dict(state)

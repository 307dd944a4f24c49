import base64
import contextlib
import csv
import gzip
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.tiny_pictures import bomb, png

from areal.base.errors import UserError
from areal.config import load_config
from areal.config.data_section import DataConfig, RowsConfig
from areal.data.prompt_forms import prompt_or_none
from areal.data.rows import prompt_text
from areal.data.sources import open_source, read_row
from areal.samples.pictures import DIGESTS, digest_of


def jsonl(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def problems(count):
    return [{"prompt": f"question {i}", "answer": i} for i in range(count)]


def refused(match, source, **settings):
    with pytest.raises(UserError, match=match):
        open_source(DataConfig(source=source, **settings), seed=0)


def test_each_epoch_is_a_different_order_of_the_same_rows(tmp_path):
    source = open_source(DataConfig(source=jsonl(tmp_path, problems(50)), eval_size=10), seed=1)
    assert source.size == len(source) == 40
    first, second = ([source.row(i).prompt for i in range(start, start + 40)] for start in (0, 40))
    assert first != second
    assert len(set(first)) == 40
    assert sorted(first) == sorted(second)


def test_a_row_depends_on_configuration_seed_and_index_only(tmp_path):
    config = DataConfig(source=jsonl(tmp_path, problems(50)), eval_size=10)
    first, two = open_source(config, seed=1), open_source(config, seed=1)
    backwards = [first.row(i) for i in reversed(range(200))]
    assert backwards[::-1] == [two.row(i) for i in range(200)]
    assert [first.row(i) for i in range(40)] != [open_source(config, seed=2).row(i) for i in range(40)]
    assert first.row(123).index == 123


def test_held_out_rows_are_never_trained_not_even_their_duplicates(tmp_path):
    rows = problems(20)
    source = open_source(DataConfig(source=jsonl(tmp_path, rows + rows), eval_size=8), seed=3)
    held_out = {source.heldout(i).prompt for i in range(8)}
    assert not held_out & {source.row(i).prompt for i in range(3 * len(source))}
    with pytest.raises(IndexError):
        source.heldout(8)


def test_prompts_of_an_eval_source_are_not_trained(tmp_path):
    train = jsonl(tmp_path, problems(20))
    test = jsonl(tmp_path, problems(30)[15:], "test.jsonl")
    source = open_source(DataConfig(source=train, eval_source=test, eval_size=15), seed=0)
    assert len(source) == 15
    assert {source.heldout(i).answer for i in range(15)} == {str(i) for i in range(15, 30)}


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        (["math", "own:short"], {"math": 1.0, "own:short": 1.0}),
        ({"math": 2, "own:short": -0.5, "other": None}, {"math": 2.0, "own:short": -0.5}),
    ],
)
def test_a_row_may_name_several_rewards_and_their_weights(tmp_path, value, weights):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "1", "reward": value}))
    source = open_source(DataConfig(source=str(tmp_path / "rows.jsonl"), eval_size=0), seed=0)
    assert source.row(0).reward == weights


def test_a_row_keeps_its_fields_and_names_its_own_rewards(tmp_path):
    row = {"question": "2+2?", "solution": 4, "reward": "math", "level": [1, 2]}
    path = jsonl(tmp_path, [row])
    source = open_source(DataConfig(source=path, prompt_key="question", answer_key="solution", eval_size=0), seed=0)
    result = source.row(0)
    assert (result.prompt, result.answer, result.reward) == ("2+2?", "4", {"math": 1.0})
    assert result.fields == row | {"prompt": "2+2?", "answer": 4}


def test_a_system_prompt_makes_chat_messages(tmp_path):
    config = DataConfig(source=jsonl(tmp_path, problems(1)), eval_size=0, system_prompt="Be brief.")
    messages = open_source(config, seed=0).row(0).prompt
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question 0"}]
    assert prompt_text(messages) == "Be brief.\n\nquestion 0"


def test_an_object_of_task_ids_is_told_as_what_it_is(tmp_path):
    (tmp_path / "split_tasks.json").write_text(json.dumps({"train": ["0", "1"], "test": ["2"]}, indent=2))
    refused("split_tasks.json, row 1, has no 'prompt', only train, test: add it", str(tmp_path / "split_tasks.json"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2, is not JSON .*write one object a line"),
        ("[1]", "line 2, is of type list, not an object"),
        ('{"answer": "1"}', "line 2, has no 'prompt', only answer: add it or set data.prompt_key"),
        ('{"prompt": "1"}', "line 2, has no 'answer', only prompt: add it or set data.answer_key"),
        ('{"prompt": 5, "answer": "1"}', "line 2, has a 'prompt' that cannot be read .it is neither text nor messages"),
        (
            '{"prompt": "a", "answer": "1", "reward": 3}',
            "line 2, has a 'reward' that is neither a name, nor a list of names, nor a mapping",
        ),
        ('{"prompt": "a", "answer": 99999999999999999999999}', "line 2, cannot be sent to rewards"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    refused(message, str(path))


def write_as(kind, path, rows):
    """The rows in a file that ends in `kind`, or in a folder as the hub has it. Returns its path."""
    path = path / f"rows{kind}"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind in (".parquet", ""):
        file = path / "data" / "train-00000-of-00001.parquet" if kind == "" else path
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), file)
        if kind == "":
            pq.write_table(pa.Table.from_pylist(rows[:3]), file.with_name("test-00000-of-00001.parquet"))
    elif kind == ".csv":
        with path.open("w", newline="") as csv_file:
            writer = csv.DictWriter(csv_file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        packed = {".jsonl.gz": gzip.compress, ".jsonl.zst": partial(pa.Codec("zstd").compress, asbytes=True)}
        path.write_bytes(packed.get(kind, bytes)(text.encode()))
    return path


@pytest.mark.parametrize("kind", [".parquet", ".csv", ".json", ".jsonl.gz", ".jsonl.zst", "", "lines.json"])
def test_rows_are_the_same_and_in_the_same_order_whatever_file_they_are_in(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [{"prompt": f'question {i}, "quoted"\nand more', "answer": str(i)} for i in range(12)]
    expected = open_source(DataConfig(source=jsonl(tmp_path, rows, "plain.jsonl"), eval_size=2), seed=3)
    file = write_as(kind, tmp_path, rows)
    source = open_source(DataConfig(source=f"~/{file.name}", eval_size=2), seed=3)
    assert [source.row(i) for i in range(25)] == [expected.row(i) for i in range(25)]
    assert [source.heldout(i) for i in range(2)] == [expected.heldout(i) for i in range(2)]
    if kind == "":
        assert len(open_source(DataConfig(source=str(file), eval_source=f"{file}:test", eval_size=3), seed=0)) == 9


def test_days_in_a_data_set_are_texts(tmp_path):
    jsonl(tmp_path, [{"prompt": "1", "answer": "2", "day": "2024-08-11"}], "train.jsonl")
    row = open_source(DataConfig(source=str(tmp_path), eval_size=0), seed=0).row(0)
    assert row.fields["day"] == "2024-08-11T00:00:00"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,answer\nWhat, then?,1\n", "a.csv, line 2, has 3 fields, but the first line names 2: quote"),
        ("a.csv", b"prompt;answer\nWhat;1\n", "a.csv, line 1, separates its fields by ';': separate them by commas"),
        ("a.json", b'{"prompt": "a",\n oops}', "a.json, line 1, is not JSON"),
        ("a.json", b"[1]", "a.json, row 1, is of type int, not an object: write a list of objects"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read .zlib inflate failed"),
        ("a.csv.zst", b"no zstd", "a.csv.zst cannot be read .ZSTD decompress failed"),
        ("a.jsonl.gz", gzip.compress(bytes(1 << 27)), "is no file of rows .unpacked it has more than 67108864 bytes"),
        ("a.parquet", b"no Parquet", "cannot be read as Parquet"),
        ("a.jsonl", b'{"prompt": "", "answer": 1}', "line 1, has an empty 'prompt': write one, or remove the row"),
        (
            "a.jsonl",
            b'{"prompt": "a", "reward_model": {"ground_truth": "1"}}',
            "add it or set data.answer_key=reward_model.ground_truth",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refused(message, str(tmp_path / name))


def test_a_file_has_neither_splits_nor_options_but_those_of_its_base_do_not_count(tmp_path):
    path = jsonl(tmp_path, [{"question": f"q{i}", "answer": i} for i in range(9)])
    refused("is a file, which has no data.split: remove it", path, split="test")
    refused("takes no data.options: remove name", path, options={"name": "main"})
    base = ["data.base=configs/data/gsm8k.yaml", f"data.source={path}", "data.eval_size=3"]
    overrides = ["model=m", "steps=1", "batch_size=4", "group_size=2", "sampling.max_new_tokens=8"]
    data = load_config(None, [*base, *overrides]).data
    assert data.answer_key == "answer" and data.options == {} and data.eval_source is None
    assert len(open_source(data, seed=0)) == 6
    again = load_config(None, [*base, *overrides, "data.eval_source=hf:other"]).data
    assert again.eval_source == "hf:other"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompt_and_answer_may_be_fields_of_fields(tmp_path, kind):
    rows = [{"extra": {"q": f"question {i}"}, "reward_model": {"ground_truth": "1"}} for i in range(3)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet") if kind == "parquet" else jsonl(tmp_path, rows)
    keys = {"prompt_key": "extra.q", "answer_key": "reward_model.ground_truth"}
    source = open_source(DataConfig(source=path, **keys, eval_size=1), seed=0)
    row = source.row(0)
    assert row.prompt.startswith("question ") and row.prompt == row.fields["prompt"] != source.heldout(0).prompt
    assert row.answer == row.fields["answer"] == "1"


@pytest.mark.parametrize("column", ["answer", "photo"])
def test_a_column_that_is_no_json_is_told(tmp_path, column):
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"]} | {column: [b"1"]}), tmp_path / "rows.parquet")
    refused("row 0, cannot be sent to rewards .*bytes", str(tmp_path / "rows.parquet"), eval_size=0)


def test_a_source_that_cannot_be_used_is_told(tmp_path):
    refused("cannot be read .No such file", str(tmp_path / "missing.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    refused("has no rows", str(tmp_path / "empty.jsonl"))
    refused("has 5 rows, too few for data.eval_size 5: lower", jsonl(tmp_path, problems(5)), eval_size=5)
    refused("data.size is for generated tasks", jsonl(tmp_path, problems(5)), eval_size=1, size=3)
    refused("none of addition", "nonsense")
    same = jsonl(tmp_path, [{"prompt": "same", "answer": "1"}] * 9, "same.jsonl")
    refused("none is left to train on", same, eval_size=2)


def test_addition_is_endless_or_of_a_size_and_holds_rows_out():
    endless = open_source(DataConfig(source="addition", eval_size=20, options={"max_digits": 3}), seed=0)
    assert endless.size is None
    with pytest.raises(TypeError):
        len(endless)
    held_out = {endless.heldout(i).prompt for i in range(20)}
    assert not held_out & {endless.row(i).prompt for i in range(2000)}
    finite = open_source(DataConfig(source="addition", size=30, eval_size=0), seed=0)
    assert len(finite) == 30
    assert sorted(finite.row(i).prompt for i in range(30)) == sorted(finite.row(i).prompt for i in range(30, 60))


def test_addition_options_are_checked():
    refused(
        "has no option 'digits': choose from length_exponent, max_digits, min_digits", "addition", options={"digits": 3}
    )
    refused("digits must satisfy", "addition", options={"max_digits": 99})


def test_reasoning_gym_rows_never_coincide_with_held_out_ones():
    config = DataConfig(source="reasoning_gym:count_bits", eval_size=30, options={"max_n": 200})
    source = open_source(config, seed=0)
    held_out = {source.heldout(i).prompt for i in range(30)}
    assert not held_out & {source.row(i).prompt for i in range(600)}
    assert source.row(511) == open_source(config, seed=0).row(511)
    too_small = DataConfig(source="reasoning_gym:count_bits", eval_size=100, options={"max_n": 2})
    with pytest.raises(UserError, match="too few different problems"):
        open_source(too_small, seed=0).row(0)


def test_reasoning_gym_mistakes_are_told():
    refused("no task 'leg_countin': did you mean leg_counting", "reasoning_gym:leg_countin")
    refused("no option 'legs': choose from .*max_animals", "reasoning_gym:leg_counting", options={"legs": 2})
    refused("correct data.options", "reasoning_gym:leg_counting", options={"min_animals": -1})


def test_a_saved_hugging_face_data_set_is_a_table(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {"train": datasets.Dataset.from_list(problems(12)), "test": datasets.Dataset.from_list(problems(3))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    source = open_source(DataConfig(source=str(tmp_path / "saved"), eval_size=2), seed=0)
    assert len(source) == 10
    assert len({source.row(i).prompt for i in range(10)} | {source.heldout(i).prompt for i in range(2)}) == 12
    refused("no split 'dev': set data.split to one of train, test", str(tmp_path / "saved"), split="dev")
    refused("row 0, has no 'question'", str(tmp_path / "saved"), prompt_key="question")
    (tmp_path / "other").mkdir()
    refused("cannot be loaded", str(tmp_path / "other"))


def test_hugging_face_options_and_split_are_handed_on(tmp_path):
    pytest.importorskip("datasets")
    files = {"train": jsonl(tmp_path, problems(12)), "test": jsonl(tmp_path, problems(15)[12:], "test.jsonl")}
    options = {"data_files": files, "cache_dir": str(tmp_path / "cache")}
    config = DataConfig(source="hf:json", eval_source="hf:json:test", eval_size=3, options=options)
    source = open_source(config, seed=0)
    assert len(source) == 12
    assert {source.heldout(i).answer for i in range(3)} == {"12", "13", "14"}
    refused("cannot be loaded .*correct the name, data.split", "hf:json:dev", options=options)


def test_looking_up_a_row_needs_no_heavy_library():
    heavy = ("torch", "datasets", "reasoning_gym")
    code = f"import areal.data.sources, sys; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "."}).returncode == 0


def mixed(tmp_path, weights, sizes=(60, 20), **settings):
    parts = [
        {"source": jsonl(tmp_path, [{"prompt": f"{name}{i}", "answer": i} for i in range(size)], f"{name}.jsonl")}
        for name, size in zip("ab", sizes, strict=True)
    ]
    for part, weight in zip(parts, weights or (), strict=False):
        part["weight"] = weight
    return open_source(RowsConfig(sources=parts, **settings), seed=0)


def test_a_mixture_without_weights_has_every_row_once_an_epoch(tmp_path):
    source = mixed(tmp_path, None, eval_size=8)
    assert len(source) == 72
    held_out = [source.heldout(i) for i in range(8)]
    assert [row.prompt[0] for row in held_out] == ["a"] * 6 + ["b"] * 2
    assert [row.index for row in held_out] == list(range(8))
    for epoch in range(2):
        rows = [source.row(i) for i in range(72 * epoch, 72 * (epoch + 1))]
        assert [row.index for row in rows] == list(range(72 * epoch, 72 * (epoch + 1)))
        prompts = {row.prompt for row in rows}
        assert len(prompts) == 72
        assert not prompts & {row.prompt for row in held_out}
    assert [source.row(i).prompt for i in range(72)] != [source.row(72 + i).prompt for i in range(72)]


def test_weights_give_the_shares_and_each_source_its_own_epochs(tmp_path):
    source = mixed(tmp_path, (1.0, 3.0), eval_size=0)
    assert source.size is None
    prompts = [source.row(i).prompt for i in range(1000)]
    assert sum(prompt[0] == "b" for prompt in prompts) == 750
    of_b = [prompt for prompt in prompts if prompt[0] == "b"]
    assert all(len(set(of_b[i : i + 20])) == 20 for i in range(0, 740, 20)) or len(set(of_b)) == 20
    some = range(0, 1000, 37)  # a row does not depend on the rows that were read before
    assert [prompts[i] for i in some] == [mixed(tmp_path, (1.0, 3.0), eval_size=0).row(i).prompt for i in some]


def test_a_prompt_that_one_source_holds_out_is_not_trained_from_another(tmp_path):
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(30)]
    parts = [{"source": jsonl(tmp_path, rows, f"{name}.jsonl")} for name in "ab"]
    source = open_source(RowsConfig(sources=parts, eval_size=10), seed=0)
    held_out = {source.heldout(i).prompt for i in range(10)}
    assert not held_out & {source.row(i).prompt for i in range(len(source))}


def test_an_endless_source_needs_a_weight_in_a_mixture():
    with pytest.raises(UserError, match="has no end, so data.sources need weights"):
        open_source(RowsConfig(sources=[{"source": "addition"}], eval_size=0), seed=0)


def test_a_template_writes_the_prompt_from_the_fields_of_the_row(tmp_path):
    path = jsonl(tmp_path, [{"problem": f"{{{i}}}", "hint": "h" if i else "", "answer": i} for i in range(4)])
    template = "{{ problem }}{% if hint %} ({{ hint }}){% endif %}\n\\boxed{}"
    source = open_source(RowsConfig(source=path, prompt_template=template, eval_size=2), seed=0)
    prompts = {source.row(i).prompt for i in range(2)} | {source.heldout(i).prompt for i in range(2)}
    assert prompts == {"{0}\n\\boxed{}"} | {f"{{{i}}} (h)\n\\boxed{{}}" for i in (1, 2, 3)}
    refused(
        "line 1, does not fit data.prompt_template .*'nothing' is undefined.*problem, hint",
        path,
        prompt_template="{{ nothing }}",
    )
    refused("does not fit data.prompt_template", path, prompt_template="{{ ''.__class__.__mro__ }}")


def test_a_row_is_read_from_its_place_in_a_file_or_from_a_file_of_its_own(tmp_path):
    config = DataConfig(source="unused.jsonl", prompt_key="question")
    file = jsonl(tmp_path, [{"question": str(i), "answer": i} for i in range(3)])
    assert [read_row(Path(file), config, i).prompt for i in range(3)] == ["0", "1", "2"]
    with pytest.raises(UserError, match="has no row 3, counted from 0"):
        read_row(Path(file), config, 3)
    (first := tmp_path / "one.json").write_text(json.dumps({"question": "?", "answer": 1}, indent=2))
    assert read_row(first, config).fields == {"prompt": "?", "question": "?", "answer": 1}
    first.write_text("[]")
    with pytest.raises(UserError, match="one.json is of type list, not an object: correct it"):
        read_row(first, config)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}


def called(**arguments):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


CALLED = called(n=1)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        (json.dumps(CHAT), CHAT),
        (f" {json.dumps(CHAT)}\n", CHAT),
        ([CHAT], CHAT),  # BFCL
        ([{"from": "system", "value": "Be brief."}, {"from": "human", "value": "2 + 2?"}], CHAT),  # ShareGPT
        (
            json.dumps(
                [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}, {"from": "human", "value": "z"}]
            ),
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}],
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]}], CHAT[1:]),
        ([CHAT[1] | {"tool_calls": None, "name": None}], CHAT[1:]),  # a table has nulls for what others have
        (
            [
                CHAT[1],
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"n": 1}'}}],
                },
                {"role": "tool", "tool_call_id": "a", "content": "4"},
            ],
            [
                CHAT[1],
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "4"},
            ],
        ),
        ([{"role": "user", "content": [{"type": "text", "value": "2 + 2?"}]}], CHAT[1:]),  # LLaMA-Factory
        ([{"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]}], CHAT[1:]),  # NeMo-Gym
        ("[{'role': 'user', 'content': '2 + 2?', 'name': None}]", CHAT[1:]),  # pandas, in CSV
        (json.dumps(CHAT[1]), CHAT[1:]),
        (
            [
                {"from": "human", "value": "2 + 2?"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"n": 1}}'},
                {"from": "function_response", "value": "4"},
                {"from": "chatgpt", "value": "It is 4."},
            ],
            [
                CHAT[1],
                {"role": "assistant", "content": "", "tool_calls": [CALLED]},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "It is 4."},
            ],
        ),
        (  # flat calls, as JSON; lists among the arguments; no arguments
            [
                CHAT[1],
                {"role": "assistant", "content": "a", "tool_calls": '[{"name": "f", "arguments": "{\\"n\\": 1}"}]'},
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"n": ["a"], "m": None}}]},
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]},
            ],
            [
                CHAT[1],
                {"role": "assistant", "content": "a", "tool_calls": [CALLED]},
                {"role": "assistant", "content": "", "tool_calls": [called(n=["a"], m=None)]},
                {"role": "assistant", "content": "", "tool_calls": [called()]},
            ],
        ),
        (  # items of the Responses API
            [
                CHAT[1],
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"n": 1}'},
                {"type": "function_call_output", "call_id": "a", "output": "4"},
            ],
            [
                CHAT[1],
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "4"},
            ],
        ),
        ("[1, 2] + [3]", "[1, 2] + [3]"),
        ('{"from": "Oslo", "to": "Bergen"}', '{"from": "Oslo", "to": "Bergen"}'),
        ("[1, 2, 3]", "[1, 2, 3]"),
        ('[{"name": "Bo"}]', '[{"name": "Bo"}]'),
    ],
)
def test_a_prompt_is_read_in_the_forms_of_published_data_sets(tmp_path, prompt, read):
    source = open_source(DataConfig(source=jsonl(tmp_path, [{"prompt": prompt, "answer": 4}]), eval_size=0), 0)
    assert source.row(0).prompt == read
    assert source.row(0).fields["prompt"] == read


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([{"role": "user", "content": None}], "neither text nor parts"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "not one text"),
        ([{"role": "user", "content": [{"type": "text", "text": ["a"]}]}], "not one text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "value": "b"}]}], "not one text"),
        ([{"role": "user", "content": [{"type": "file", "text": "a"}]}], "of the type 'file'"),
        ([CHAT, CHAT], "of type list"),  # the second waits for an answer to the first
        ([{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], "no name or no arguments"),
        ([{"from": "human"}], "neither text nor parts"),
        ([{"from": "narrator", "value": "x"}], "from 'narrator'"),
        ([{"value": "x"}], "no role"),
        ([CHAT[1], {"type": "reasoning", "summary": []}], "no role, but the type 'reasoning'"),
        ("[{'role': 'user', 'content': 'a'}\n {'role': 'assistant'}]", "neither JSON nor a list of Python"),  # numpy
    ],
)
def test_messages_that_are_no_prompt_are_refused(tmp_path, prompt, why):
    refused(f"cannot be read .*{why}", jsonl(tmp_path, [{"prompt": prompt, "answer": 1}]))


def test_a_table_gives_no_call_the_arguments_of_another_call(tmp_path):
    calls = called(city="Oslo", at={"day": 1}), called(zone="CET", at={"hour": 2})
    rows = [{"prompt": [CHAT[1], {"role": "assistant", "tool_calls": [call]}], "answer": 4} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = open_source(DataConfig(source=str(tmp_path / "rows.parquet"), eval_size=0), 0)
    assert [source.row(i).prompt[1]["tool_calls"] for i in range(2)] in (
        [[calls[0]], [calls[1]]],
        [[calls[1]], [calls[0]]],
    )


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_the_tools_of_a_row_stand_beside_its_prompt(tmp_path):
    flat = {"type": "function", **TOOL["function"]}
    rows = [
        {"prompt": CHAT, "tools": [TOOL], "answer": 1},
        {"prompt": CHAT, "tools": json.dumps([TOOL]), "answer": 1},
        {"prompt": CHAT, "answer": 1},
    ]
    source = open_source(DataConfig(source=jsonl(tmp_path, rows), eval_size=0), 0)
    assert sorted(str(source.row(i).tools) for i in range(3)) == ["None", str([TOOL]), str([TOOL])]
    nested = [{"responses_create_params": {"input": CHAT, "tools": [flat]}, "answer": 1, "tools": "not these"}]
    settings = {"source": jsonl(tmp_path, nested), "prompt_key": "responses_create_params.input", "eval_size": 0}
    assert open_source(DataConfig(**settings), 0).row(0).tools == [TOOL]
    assert open_source(DataConfig(**settings, tools_key=None), 0).row(0).tools is None


def test_tools_of_a_row_that_cannot_be_read_or_shown_are_refused_with_the_way_out(tmp_path):
    rows = jsonl(tmp_path, [{"prompt": "Weather?", "tools": [TOOL], "answer": 1}])
    refused("has tools, which a chat template shows, but its prompt is a text: .* data.tools_key=null", rows)
    assert open_source(DataConfig(source=rows, eval_size=0, system_prompt=""), 0).row(0).tools == [TOOL]
    rows = jsonl(tmp_path, [{"prompt": CHAT, "tools": ["calculator"], "answer": 1}])
    refused("has tools that cannot be read .a tool is neither .* correct 'tools', or set data.tools_key=null", rows)


@pytest.mark.parametrize("text", ["[1, 2] sorted?", "[1, 2]", "{1: 2}", "[['a']]", r"['\d'] matches?", '{"a": 1}'])
def test_a_text_that_begins_with_a_bracket_is_a_text(text, recwarn):
    assert prompt_or_none(text) == text and not [*recwarn]


texts = st.text(min_size=1, max_size=8)
arguments = st.dictionaries(texts, st.recursive(texts, lambda inner: st.lists(inner, max_size=2), max_leaves=4))
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "output_text", "refusal"])},
    optional={"text": texts, "value": texts | st.none() | st.lists(texts)},
)
functions = st.fixed_dictionaries(
    {"name": texts, "arguments": arguments | arguments.map(json.dumps) | texts | st.none()}
)
calls = functions | functions.map(lambda function: {"type": "function", "function": function})
messages = st.fixed_dictionaries(
    {},
    optional={"role": st.sampled_from(["user", "assistant", "tool"]), "from": st.sampled_from(["human", "gpt", "x"])},
).flatmap(
    lambda head: st.fixed_dictionaries(
        {}, optional={"content": texts | st.none() | st.lists(parts), "value": texts, "tool_calls": st.lists(calls)}
    ).map(lambda rest: head | rest)
)


def leaves(value):
    """All texts in a value, those of JSON texts among them as what they write."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [*leaves(item), *([key] if key not in KEYS else [])]]
    if isinstance(value, list):
        return [text for item in value for text in leaves(item)]
    if isinstance(value, str) and value.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            return leaves(json.loads(value))
    return [value] if isinstance(value, str) else []


KEYS = {"role", "from", "type", "content", "value", "text", "tool_calls", "function", "name", "arguments"}
KINDS = {"human", "gpt", "user", "text", "input_text", "output_text", "function", "tool", "assistant"}


@given(st.lists(messages, min_size=1, max_size=3))
def test_what_is_read_of_messages_has_every_text_of_them_or_is_refused(value):
    prompt = prompt_or_none(value)
    if prompt is not None:
        shown = "\0".join(leaves(prompt))
        assert not [text for text in leaves(value) if text not in shown and text not in KINDS]


PNG = png(6, 4, 0)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
SEEN = {"type": "image", "digest": digest_of(PNG), "width": 6, "height": 4}
ASKED = {"type": "text", "text": "x?"}
PICTURED = {
    "as verl stores Geometry3K": {"prompt": [{"role": "user", "content": "<image>x?"}], "images": [{"bytes": PNG}]},
    "as TRL takes it": {"prompt": [{"role": "user", "content": [{"type": "image"}, ASKED]}], "image": {"bytes": PNG}},
    "one, as the hub stores it": {"prompt": "x?", "image": {"bytes": PNG, "path": None}},
    "paths": {"prompt": "<image>x?", "images": ["pictures/1.PNG"]},
    "paths in objects, as verl takes them": {"prompt": "<image>x?", "images": [{"image": "file://pictures/1.PNG"}]},
    "as MathVista has it": {"prompt": "x?", "image": "images/1.jpg", "decoded_image": {"bytes": PNG, "path": "1.jpg"}},
    "a data URL": {"prompt": "x?", "image": URL},
    "a data URL without the kind": {"prompt": "x?", "image": URL.replace("/png", "")},
    "as OpenAI writes it": {
        "prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, ASKED]}]
    },
}


@pytest.mark.parametrize("row", PICTURED.values(), ids=PICTURED)
def test_pictures_are_read_in_the_forms_of_published_data_sets(tmp_path, row):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.PNG").write_bytes(PNG)
    pq.write_table(pa.Table.from_pylist([{**row, "answer": "1"}]), tmp_path / "rows.parquet")
    read = open_source(DataConfig(source=str(tmp_path / "rows.parquet"), eval_size=0), 0).row(0)
    assert read.prompt == [{"role": "user", "content": [SEEN, ASKED]}]
    assert read.pictures == (PNG,) and prompt_text(read.prompt) == "<image>x?"
    assert read.fields == {"prompt": read.prompt, "answer": "1", DIGESTS: [digest_of(PNG)]}


def test_pictures_of_the_hub_are_the_files_as_they_were_and_a_bomb_is_not_decoded(tmp_path):
    import datasets

    jpeg = io.BytesIO()
    Image.new("CMYK", (6, 4)).save(jpeg, "JPEG")
    files = {"few": jpeg.getvalue(), "none": None, "bomb": bomb(9_000, 8_000)}
    rows = [
        {"prompt": f"{name}?", "answer": "1", "images": [{"bytes": file}] if file else []}
        for name, file in files.items()
    ]
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
    )
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    for source in tmp_path / "saved", tmp_path / "rows.parquet":
        opened = open_source(DataConfig(source=str(source), eval_size=0), 0)
        order = [opened.key(i) for i in range(3)]
        assert opened.row(order.index(0)).pictures == (files["few"],)
        assert opened.row(order.index(1)).pictures == () and opened.row(order.index(1)).prompt == "none?"
        with pytest.raises(UserError, match="it has 9000 x 8000 = 72000000 pixels"):
            opened.row(order.index(2))


def test_several_pictures_without_marks_come_first_as_in_trl(tmp_path):
    row = {"prompt": [{"role": "system", "content": "y"}, {"role": "user", "content": "x?"}], "images": [URL, URL]}
    read = open_source(DataConfig(source=jsonl(tmp_path, [{**row, "answer": "1"}]), eval_size=0), 0).row(0)
    assert read.prompt[1:] == [{"role": "user", "content": [SEEN, SEEN, ASKED]}] and read.pictures == (PNG, PNG)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>?", "images": ["none.png"]}, "picture that cannot be read .*No such file"),
        ({"prompt": "<image>?", "images": ["rows.png"]}, "picture that cannot be read .it is no picture in one of the"),
        ({"prompt": "<image><image>?", "images": [URL]}, "more places for pictures than pictures"),
        ({"prompt": "<image>?", "images": [URL, URL]}, "more pictures than places"),
        ({"prompt": "<image>?", "images": ["https://a.example/b.png"]}, "is not on this machine"),
        ({"prompt": "<image>?", "images": [URL[:-3]]}, "its data URL is not base64"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text"}]}], "images": [URL]},
            "not one text",
        ),
        ({"prompt": "?", DIGESTS: [digest_of(PNG)]}, "'picture_digests', which name pictures that the row has"),
    ],
)
def test_a_picture_that_cannot_be_used_is_told(tmp_path, row, message):
    (tmp_path / "rows.png").write_text("no picture")
    refused(message, jsonl(tmp_path, [{**row, "answer": "1"}]), eval_size=0)


def test_rows_with_the_same_text_and_other_pictures_are_other_problems(tmp_path):
    urls = [f"data:image/png;base64,{base64.b64encode(png(6, 4, seed)).decode()}" for seed in (1, 2, 2)]
    rows = [{"prompt": "How many?", "answer": "1", "image": url} for url in urls]
    source = open_source(DataConfig(source=jsonl(tmp_path, rows), eval_size=1), 0)
    assert source.size in (1, 2) and all(
        source.row(i).pictures != source.heldout(0).pictures for i in range(source.size)
    )


@pytest.mark.parametrize("image", [None, [], "python:3.11", "registry.local/a.b/tools"])
def test_a_field_named_image_without_a_picture_is_a_field_like_any_other(tmp_path, image):
    rows = [{"prompt": "x", "answer": "1", "image": image, "images": None}]
    assert open_source(DataConfig(source=jsonl(tmp_path, rows), eval_size=0), 0).row(0).fields["image"] == image


def test_a_held_out_prompt_is_known_again_in_another_form(tmp_path):
    rows = [{"prompt": "2 + 2?", "answer": 4}, {"prompt": json.dumps(CHAT), "answer": 4}, {"prompt": "x", "answer": 4}]
    eval_source = jsonl(tmp_path, [{"prompt": [CHAT[1]], "answer": 4}], "eval.jsonl")
    source = open_source(DataConfig(source=jsonl(tmp_path, rows), eval_source=eval_source, eval_size=1), 0)
    assert [source.row(i).prompt for i in range(source.size)] == ["x"]


def test_a_data_set_of_a_hub_that_cannot_be_reached_is_refused_at_once_and_no_name_is_blamed(tmp_path):
    code = "from areal.config.data_section import DataConfig; from areal.data.sources import open_source\n"
    code += "open_source(DataConfig(source='hf:me/rows', eval_size=0), 0)"
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    sentence = refused.stderr.strip().splitlines()[-1]
    assert "is not in this machine's cache, and the hub is not there (127.0.0.1 cannot be reached: Conn" in sentence
    assert "Retrying" not in refused.stderr

"""Queries on the rollouts of a run, and how they are printed."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rollout_files import sample, write_model, write_pictured_run, write_run

from areal.__main__ import main
from areal.base.errors import UserError
from areal.extensions.desk import rollout_queries as rollouts
from areal.extensions.desk.pieces import pieces
from areal.extensions.desk.rollout_queries import COLUMNS, Rollouts, Where, condition, sql_condition
from areal.storage.record import KeptRollouts, Record
from areal.storage.rollout_files import SCHEMA


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    run = tmp_path_factory.mktemp("it's a run, [x]")
    write_run(run)
    write_model(run)
    return run


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path)
    return tmp_path


def ids(rows) -> list[tuple[str, int, int]]:
    return [(row["group"], row["sample"], row["branch"]) for row in rows.rows]


def rows(run, where: Where, sort: str | None = "step", descending: bool = False, limit: int = 50, offset: int = 0):
    return Rollouts(Record(run)).page(where, sort, descending, limit, offset)


def test_a_page_counts_all_and_has_the_rows_of_its_place(written):
    results = rows(written, Where(), limit=3, offset=1)
    assert (results.fates, results.steps) == ({"trained": 13, "filtered": 2}, 3)
    assert ids(results) == [("g0.0", 1, 0), ("g1.0", 0, 0), ("g1.0", 0, 1)]
    assert results.rows[0]["completion"] == "say 1" and "tokens" not in results.rows[0]
    assert rows(written, Where(), limit=3, offset=100).rows == []


@pytest.mark.parametrize("descending", [False, True])
def test_every_shown_column_sorts_and_null_comes_last(written, descending):
    for column in rollouts.SORTED_BY:
        results = [row[column] for row in rows(written, Where(), column, descending).rows]
        known_values = [value for value in results if value is not None]
        assert known_values == sorted(known_values, reverse=descending) and results[len(known_values) :] == [None] * (
            15 - len(known_values)
        )
    with pytest.raises(UserError, match="cannot be sorted by 'tokens'"):
        rows(written, Where(), "tokens")


def test_random_rows_are_different_rows(written):
    assert len(set(ids(rows(written, Where(), None)))) == 15


@pytest.mark.parametrize(
    ("filters", "number"),
    [
        ({}, 15),
        ({"step_min": "2", "step_max": "2"}, 4),
        ({"step": "2", "fate": ""}, 4),
        ({"reward_min": "0.6"}, 5),
        ({"fate": "filtered", "prompt_index": "9"}, 2),
        ({"reason": "all rewards are equal"}, 2),
        ({"staleness_max": "1e9"}, 13),
        ({"text": "tool: é"}, 1),
        ({"text": "' OR 1=1 --"}, 0),
        ({"group": "g1.0' OR 'a'='a"}, 0),
        ({"group": "g1.0"}, 3),
    ],
)
def test_filters_of_the_page_find_rows(written, filters, number):
    assert sum(rows(written, condition(filters)).fates.values()) == number


@pytest.mark.parametrize(
    "filters", [{"reward_min": "x"}, {"step_max": "nan"}, {"tokens_min": "1"}, {'a" = 1 OR "b': "1"}]
)
def test_what_is_no_filter_is_refused(filters):
    with pytest.raises(UserError, match="filter"):
        condition(filters)


def test_sql_of_the_user_may_use_all_columns(written):
    where = sql_condition(
        "reward >= 0.5 and step < 3 and len(tokens) > 3 and json_extract(row, '$.prompt') = '\"2+2\"'"
    )
    assert ids(rows(written, where)) == [("g0.0", 0, 0), ("g1.0", 0, 0), ("g1.0", 0, 1)] + [
        (group, n, 0) for group in ("g2.0", "g3.0") for n in (0, 1)
    ]


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("rewrd > 1", 'Referenced column "rewrd" not found'),
        ("", "The rollouts cannot be queried"),
        ("reward > 1) OR (true", "syntax error"),
        ("true; COPY (SELECT 1) TO 'x.csv'", "more than one statement"),
        ("true; SET threads = 9", "more than one statement"),
        ("true LIMIT 1", "modifier"),
        ("step IN (SELECT 1 FROM read_text('/etc/passwd'))", "Cannot access file"),
        ("step IN (SELECT 1 FROM read_parquet('{other}'))", "Cannot access file"),
        ("step IN (SELECT 1 FROM '{run}/config.yaml')", "config.yaml"),
        ("step IN (SELECT 1 FROM read_csv('http://127.0.0.1:1/x.csv'))", "Cannot access file"),
        ("step IN (WITH a AS (COPY (SELECT 1) TO '{run}/rollouts/x.parquet') SELECT 1 FROM a)", "top level"),
    ],
)
def test_sql_of_the_user_reads_only_the_rollouts_and_its_mistakes_are_told(written, tmp_path, where, sentence):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    files_before = sorted(written.rglob("*"))
    filled = where.format(other=tmp_path / "other.parquet", run=str(written).replace("'", "''"))
    with pytest.raises(UserError) as caught:
        rows(written, sql_condition(filled))
    assert sentence in str(caught.value) and "prompt_index" in str(caught.value)
    assert sorted(written.rglob("*")) == files_before


def test_nothing_can_be_set_or_written_on_the_connection(written, tmp_path):
    connection = Rollouts(Record(written))._connection
    for sql in (
        "SET threads = 9",
        "SET enable_external_access = true",
        f"COPY (SELECT 1) TO '{tmp_path}/x.csv'",
        "INSTALL httpfs",
        f"ATTACH '{tmp_path}/x.db'",
    ):
        with pytest.raises(Exception, match="configuration"):
            connection.execute(sql)


def test_a_query_that_takes_too_long_is_stopped(written, monkeypatch):
    monkeypatch.setattr(rollouts, "SECONDS", 0.05)
    with pytest.raises(UserError, match="was stopped"):
        rows(written, sql_condition("(SELECT count(*) FROM range(1000000) a, range(1000000) b) = step"))


@pytest.mark.parametrize(
    ("where", "status"),
    [("jaro_similarity(repeat('a', 9000000), repeat('b', 9000000)) > step", 2), ("length(repeat('a', 9)) > 0", 0)],
)
def test_a_command_ends_also_where_a_function_of_sql_does_not(written, where, status):
    words = ["rollouts", str(written), "--where", where, "--show", "0"]
    code = f"""if True:
        from areal.__main__ import main
        from areal.extensions.desk import rollout_queries as rollouts
        rollouts.SECONDS = rollouts.GRACE_SECONDS = {1 if status else 20}
        raise SystemExit(main({words!r}))
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    message = "The query took longer than 1 s and was stopped: ask for less, for example for fewer steps.\n"
    assert (ran.returncode, ran.stderr) == (status, message if status else "")


def test_a_file_that_is_removed_meanwhile_does_not_matter(run, monkeypatch):
    listed = [sorted((run / "rollouts").glob("*.parquet")), sorted((run / "rollouts").glob("*.parquet"))[1:]]
    listed[0][0].unlink()
    (run / "rollouts" / "000004.tmp").write_bytes(b"PAR1")
    monkeypatch.setattr(KeptRollouts, "files", lambda kept: listed.pop(0))
    assert rows(run, Where()).fates == {"trained": 8, "filtered": 2}


def test_a_run_without_rollouts_and_a_broken_file_are_told(run, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UserError, match="is not the folder of a run"):
        rows(empty, Where())
    (empty / "config.yaml").touch()
    with pytest.raises(UserError, match="has no rollouts"):
        rows(empty, Where())
    (run / "rollouts" / "000004.parquet").write_bytes(b"PAR1 half of it")
    with pytest.raises(UserError, match=r"000004\.parquet"):
        rows(run, Where())


def test_one_row_has_everything_and_its_group_is_beside_it(written):
    rollouts_of_run = Rollouts(Record(written))
    row = rollouts_of_run.row("g1.0", 0, 1)
    assert list(row) == SCHEMA.names
    assert (row["completion"], row["shared"], row["versions"].count(-1)) == ("other", 10, 10)
    group = rollouts_of_run.group("g1.0")
    assert [(item["sample"], item["branch"], item["reward"]) for item in group] == [
        (0, 0, 0.5),
        (0, 1, 0.5),
        (1, 0, 0.25),
    ]
    with pytest.raises(UserError, match="no sample 7"):
        rollouts_of_run.row("g1.0", 7, 0)


def test_a_prompt_is_followed_through_the_run_by_its_row_of_the_data(written):
    points = Rollouts(Record(written)).prompt("g4.0")
    assert [(p["group"], p["start_version"], p["samples"], p["mean"]) for p in points] == [
        ("g0.0", 0, 2, 0.625),
        ("g1.0", 0, 2, 0.375),
        ("g2.0", 1, 2, 0.5),
        ("g3.0", 1, 2, 0.5),
        ("g4.0", 2, 2, 0.75),
        ("g5.0", 2, 2, 0.75),
    ]
    assert (points[0]["low"], points[0]["high"]) == (0.25, 1.0)
    assert [p["samples"] for p in Rollouts(Record(written)).prompt("g9.0")] == [2]
    assert Rollouts(Record(written)).prompt("none") == []


def test_pieces_are_the_turns():
    result = sample([("ab", False), ("c", True), ("d", False), ("ef", True)])
    assert pieces(result.versions) == [(False, 0, 2), (True, 2, 3), (False, 3, 4), (True, 4, 6)]


def test_rollouts_are_printed_with_their_turns_and_cannot_steer_the_terminal(written, capsys):
    assert (
        main(["rollouts", str(written), "--where", "\"group\" = 'g0.0'", "--sort", "reward desc", "--show", "1"]) == 0
    )
    printed = capsys.readouterr().out
    assert printed.startswith("2 rollouts of 1 steps: trained 100.0%\n")
    assert "step 1 · group g0.0 · prompt 0 · sample 0" in printed and "reward 1 (exact 1)" in printed
    for turn in ("prompt, 10 tokens\nuser: 2+2", "sampled, 5 tokens\ncall", "given, 9 tokens\ntool: é"):
        assert turn in printed
    assert "4 <b>[red]\\x1b[2J\n" in printed and "\x1b" not in printed


def test_without_the_tokenizer_whole_texts_are_printed(run, capsys):
    assert main(["rollouts", str(run), "--random", "--show", "99"]) == 0
    printed = capsys.readouterr().out
    assert "completion, 2 turns, which only the model's tokenizer can separate\ncall\ntool: é" in printed


def test_a_mistake_in_the_command_is_one_line(run, capsys):
    for wrong in (["--where", "rewrd < 1"], ["--sort", "reward down"], ["--show", "-1"]):
        assert main(["rollouts", str(run), *wrong]) == 2
        error_text = capsys.readouterr().err
        assert error_text.count("\n") == 1 and "reward" in error_text


MISSING = "rollouts of this format have other columns reward"
OTHER = "have columns that this version does not know, or that have other types here: "


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.drop_columns(["reward"]), MISSING),
        (
            lambda table: table.set_column(
                table.schema.get_field_index("step"), "step", table["step"].cast(pa.string())
            ),
            f"{OTHER}step",
        ),
        (lambda table: table.append_column("novelty", pa.nulls(table.num_rows)), f"{OTHER}novelty"),
    ],
    ids=["a column is missing", "a column is of another type", "a column is not known"],
)
def test_a_file_with_other_columns_is_told_in_one_sentence(run, capsys, change, said):
    (file,) = (run / "rollouts").glob("*1.parquet")
    pq.write_table(change(pq.read_table(file)), file)
    assert main(["rollouts", str(run)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    with pytest.raises(UserError, match=said):
        list(Record(run).rollouts.rows(["group"]))


LATER = ["routes", "advantages"]


@pytest.mark.parametrize("earlier", ["1", "[123]"], ids=["of one file", "of all files"])
def test_a_column_that_files_of_an_earlier_version_lack_is_null_in_their_rows(run, capsys, earlier):
    whole = {
        (row["group"], row["sample"], row["branch"]): row
        for row in Record(run).rollouts.rows(["group", "sample", "branch"])
    }
    for file in (run / "rollouts").glob(f"*{earlier}.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(LATER), file)
    rows = list(Record(run).rollouts.rows(["group", "sample", "branch", "step", *LATER]))
    assert len(rows) == len(whole) and all(row["advantages"] is None for row in rows if row["step"] == 1)
    assert [step for step, _ in Record(run).rollouts.batches()] == [1, 2, 3]
    rollouts = Rollouts(Record(run))
    for name in LATER:
        (count,) = rollouts.sql(f"SELECT count(*) AS rows FROM rollouts WHERE step = 1 AND {name} IS NULL")
        assert count["rows"] == sum(row["step"] == 1 for row in rows)
    (first,) = rollouts.sql("SELECT * FROM rollouts WHERE step = 1 LIMIT 1")
    assert set(first) == set(COLUMNS) and rollouts.row(first["group"], first["sample"], 0).keys() == first.keys()
    assert main(["rollouts", str(run), "--where", "advantages is null", "--sort", "step", "--show", "1"]) == 0
    assert "step 1 · group g0.0" in capsys.readouterr().out


def test_of_pictures_their_files_are_printed(tmp_path, capsys):
    write_pictured_run(tmp_path, ["0a" * 16])
    assert main(["rollouts", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"── picture {tmp_path}/pictures/{'0a' * 16}\n" in printed

"""The dashboard's page of rollouts."""

from __future__ import annotations

import base64
import io
import json
import os

import pytest
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image
from support.rollout_files import write_model, write_pictured_run, write_run
from support.tiny_pictures import bomb, png

from actors.watching.dashboard import application
from areal.extensions.desk.run_view import RunView
from areal.samples.pictures import digest_of


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    write_model(folder)
    return folder


def client(run, token: str | None = None) -> TestClient:
    return TestClient(TestServer(application(RunView(run), token)))


async def asked(page: TestClient, path: str, /, **query: str) -> dict:
    answer = await page.get(f"/rollouts/{path}", params=query)
    assert answer.status == 200, await answer.text()
    return await answer.json()


async def test_the_page_stands_alone_and_sets_no_html(run):
    async with client(run) as page:
        answer = await page.get("/rollouts?reward_max=0.1")
        text = (await answer.text()).replace("https://github.com/leeoniya/uPlot", "")  # in its licence's line
        assert not any(word in text for word in ("src=", "href=", "http", "innerHTML", "insertAdjacentHTML"))
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")


async def test_the_list_has_the_rows_that_the_filters_of_the_address_leave(run):
    async with client(run) as page:
        results = await asked(page, "list", reward_min="0.5", fate="trained", sort="reward", order="asc", text="say")
        assert (results["fates"], results["steps"], results["start"]) == ({"trained": 8}, 2, 0)
        assert [row["reward"] for row in results["rows"]] == [0.5] * 4 + [0.75] * 4
        assert not {"tokens", "logprobs", "row"} & set(results["rows"][0])
        assert await asked(page, "list", page="7") == {
            "fates": {"trained": 13, "filtered": 2},
            "steps": 3,
            "rows": [],
            "start": 350,
            "notation": "",
        }


async def test_each_row_has_the_answer_that_was_right_where_its_data_has_one(run):
    async with client(run) as page:
        results = await asked(page, "list", sort="step")
    answers = {(row["group"], row["answer"]) for row in results["rows"]}
    assert ("g9.0", "6") in answers and ("g0.0", None) in answers


async def test_the_sums_of_the_quickstart_are_explained_where_they_are_shown(tmp_path):
    write_run(tmp_path)
    (tmp_path / "config.yaml").write_text("data: {source: addition}\n")
    async with client(tmp_path) as page:
        assert "the answer is these digits" in (await asked(page, "list"))["notation"]


async def test_one_row_has_its_turns_and_the_text_and_numbers_of_each_token(run):
    async with client(run) as page:
        row = await asked(page, "row", group="g0.0", sample="0", branch="0")
        assert ["".join(row["texts"][a:b]) for _, a, b in row["pieces"]] == [
            "user: 2+2\n",
            "call\n",
            "tool: é\n",
            "4 <b>[red]\\x1b[2J",
        ]
        assert [sampled for sampled, _, _ in row["pieces"]] == [False, True, False, True]
        assert (row["logprobs"][10], row["proximal_logprobs"][10], row["advantages"][10]) == (-0.5, 0.19315, 0.25)
        assert (row["versions"][0], row["versions"][10], row["returns"]) == (-1, 0, None)


async def test_the_group_and_the_prompt_of_a_row_are_beside_it(run):
    async with client(run) as page:
        group = await asked(page, "group", group="g1.0")
        assert [(item["sample"], item["branch"], item["completion"]) for item in group] == [
            (0, 0, "one"),
            (0, 1, "other"),
            (1, 0, "say 1"),
        ]
        assert [point["samples"] for point in await asked(page, "prompt", group="g1.0")] == [2] * 6


async def test_the_pictures_of_a_prompt_are_shown_small_and_nothing_outside_their_folder(tmp_path):
    large, other = png(600, 300, 1), png(5, 5, 2)
    script = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"
    hostile = {name: content for content in (script, bomb(9_000, 8_000)) for name in [digest_of(content)]}
    files = {digest_of(large): large, digest_of(other): b"changed", **hostile}
    (tmp_path / "pictures").mkdir()
    for name, content in files.items():
        (tmp_path / "pictures" / name).write_bytes(content)
    (tmp_path / digest_of(b"") / "x").mkdir(parents=True)
    os.mkfifo(tmp_path / "pictures" / ("1" * 32))
    names = [digest_of(large), digest_of(large), digest_of(other), *hostile, "0a" * 16, "1" * 32]
    write_pictured_run(tmp_path, names)
    async with client(tmp_path) as page:
        first, *others = (await asked(page, "row", group="g0.0", sample="0", branch="0"))["pictures"]
    kind, _, encoded = first.partition(",")
    assert kind == "data:image/png;base64" and Image.open(io.BytesIO(base64.b64decode(encoded))).size == (256, 128)
    whys = [
        "is damaged",
        "no picture in one of the formats",
        "72000000 pixels, more than",
        "No such file",
        "is damaged",
    ]
    assert len(others) == len(whys) and all(why in text for why, text in zip(whys, others, strict=True))


async def test_without_the_tokenizer_a_row_has_only_numbers_of_tokens(tmp_path):
    write_run(tmp_path)
    (tmp_path / "config.yaml").write_text("name: demo\nmodel: somebody/else\n")
    async with client(tmp_path) as page:
        row = await asked(page, "row", group="g0.0", sample="0", branch="0")
        assert row["texts"] is None and len(row["tokens"]) == row["pieces"][-1][2]


async def test_a_run_without_rollouts_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("name: demo\n")
    async with client(tmp_path) as page:
        assert (await page.get("/rollouts")).status == 200
        answer = await page.get("/rollouts/list")
        assert answer.status == 400 and "has no rollouts" in await answer.text()


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("list", {"where": "true"}),
        ("list", {"reward_min": "1) OR (true"}),
        ("list", {"sort": "tokens"}),
        ("list", {"sort": 'step" DESC; SELECT "1'}),
        ("list", {"page": "-1"}),
        ("list", {"page": "9" * 20}),
        ("row", {"group": "g0.0", "sample": "x"}),
        ("row", {"group": "g0.0' OR true --", "sample": "0"}),
        ("row", {}),
    ],
)
async def test_what_the_page_would_not_ask_is_refused(run, path, query):
    async with client(run) as page:
        assert (await page.get(f"/rollouts/{path}", params=query)).status == 400


async def test_any_text_may_be_looked_for(run):
    async with client(run) as page:
        for text in ("%00", "%ED%A0%80", "%27%22%3B--", "%F0%9F%99%82" * 500):
            answer = await page.get(f"/rollouts/list?text={text}")
            assert answer.status == 200 and json.loads(await answer.text())["rows"] == []


@pytest.mark.parametrize(
    "path", ["/rollouts", "/rollouts/list", "/rollouts/row", "/rollouts/group", "/rollouts/prompt"]
)
async def test_nobody_sees_rollouts_without_the_token_or_from_another_page(run, path):
    async with client(run, token="mine") as page:
        assert (await page.get(path)).status == 403
    async with client(run) as page:
        assert (await page.get(path, headers={"Host": "evil.example.org"})).status == 403
        assert (await page.get(path, headers={"Origin": "https://evil.example.org"})).status == 403

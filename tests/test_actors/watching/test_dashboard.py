"""The live page on a run."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import TestClient, TestServer

from actors.watching.dashboard import application
from areal.__main__ import main
from areal.extensions.desk.panels import COLOURS
from areal.extensions.desk.run_view import RunsView, RunView
from areal.storage.records import line_of


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text("name: demo\nsteps: 9\nmax_staleness: 4\n")
    return tmp_path


def add(folder, file: str, *records: dict) -> None:
    with (folder / file).open("a") as out:
        out.write("".join(map(line_of, records)))


def client(folder, token: str | None = None) -> TestClient:
    return TestClient(TestServer(application(RunView(folder), token)))


async def test_the_page_stands_alone_and_asks_for_what_is_new(folder):
    add(folder, "metrics.jsonl", {"step": 1, "reward_mean": 0.5, "prompts": [7]}, {"step": 2, "reward_mean": math.inf})
    async with client(folder) as page:
        answer = await page.get("/")
        text = await answer.text()
        assert not re.search(r"src=|href=|url\(|@import|/\* (include|data|colours)", text)
        assert json.dumps(COLOURS) in text and "REPORT = null" in text and "uPlot" in text
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; connect-src 'self'; ")
        data = await (await page.get("/data")).json()
        assert (data["run"], data["step"], data["total"], data["ended"], data["last"]) == ("demo", 2, 9, None, 2)
        assert [plot["lines"][0]["points"] for plot in data["plots"]] == [[0.5, None]]
        same = await (await page.get("/data", params={"stamp": data["stamp"]})).json()
        assert "plots" not in same and "configuration" not in same and same["actors"] == []
        add(folder, "metrics.jsonl", {"step": 3, "reward_mean": 0.7})
        newer = await (await page.get("/data", params={"stamp": data["stamp"]})).json()
        assert newer["plots"][0]["lines"][0]["x"] == [1, 2, 3]


async def test_a_browser_can_read_whatever_is_recorded(folder):
    report = {"time": 1.0, "actor": "trainer/0", "state": "healthy", "activity": "", "stats": {"lr": math.nan}}
    add(folder, "metrics.jsonl", {"step": 1, "reward_parts": {"format": -math.inf}})
    add(folder, "evaluations.jsonl", {"version": 1, "accuracy": math.nan})
    add(folder, "events.jsonl", report)
    json.dumps(RunView(folder).since(), allow_nan=False)


async def test_actors_are_shown_as_they_last_were_until_they_are_gone(folder):
    def said(at: float, actor: str, activity: str, state: str = "healthy") -> dict:
        return {"time": at, "actor": actor, "state": state, "activity": activity, "stats": {}}

    add(folder, "events.jsonl", said(1.0, "trainer/0", "waiting"), said(2.0, "reward/0", "scoring"))
    add(folder, "events.jsonl", said(3.0, "trainer/0", "training"), said(4.0, "reward/0", "killed", "gone"))
    add(folder, "events.jsonl", {"time": 3.0, "actor": "trainer/0", "span": "train", "seconds": 1.0})
    data = RunView(folder).since()
    assert [(actor["actor"], actor["activity"]) for actor in data["actors"]] == [("trainer/0", "training")]
    lanes = {lane["actor"]: lane["spans"] for lane in data["lanes"]}
    assert ["waiting", "waiting", 3.0, 2.0, False] in lanes["trainer/0"]
    assert ["train", "work", 1.0, 1.0, True] in lanes["trainer/0"]
    assert lanes["reward/0"] == [["scoring", "work", 2.0, 2.0, False]]


def test_the_head_says_how_long_the_run_has_taken_and_will_take(folder):
    event = {"actor": "master/0", "state": "healthy", "activity": "", "stats": {}}
    add(folder, "events.jsonl", event | {"time": 100.0}, event | {"time": 400.0})
    add(folder, "metrics.jsonl", {"step": 3, "step_seconds_median": 60.0})
    data = RunView(folder).since()
    assert (data["elapsed"], data["left"]) == ("5 min", "6 min")


def test_the_numbers_of_actors_have_units_and_few_of_them_a_column(folder):
    stats = {"memory": 123e6, "loop_delay": 0.014, "kv_use": 0.008, "running": 3.0}
    add(folder, "events.jsonl", {"time": 1.0, "actor": "a/0", "state": "healthy", "activity": "", "stats": stats})
    (actor,) = RunView(folder).since()["actors"]
    assert actor["numbers"] == [
        ["Memory", 123e6, "bytes", 6],
        ["Loop delay", 0.014, "s", -1],
        ["Kv use", 0.008, "share", -1],
        ["Running", 3.0, "", 0],
    ]


@pytest.mark.parametrize(("ok", "state"), [(True, "finished"), (False, "ended early")])
def test_the_actors_of_a_run_that_is_over_are_no_longer_healthy(folder, ok, state):
    report = {
        "time": 1.0,
        "actor": "generator/0",
        "state": "healthy",
        "activity": "generating",
        "stats": {"running": 2.0},
    }
    add(folder, "events.jsonl", report)
    assert RunView(folder).since()["cards"] == []
    add(folder, "summary.json", {"ok": ok, "reason": "the run reached its end", "samples_trained": 3072})
    data = RunView(folder).since()
    assert (data["ended"], data["silent"]) == (f"{state}: the run reached its end", None)
    (actor,) = data["actors"]
    assert (actor["actor"], actor["state"], actor["activity"]) == ("generator/0", state, "")
    assert ["samples trained", "3,072"] in data["cards"]


def test_a_run_that_was_killed_is_said_to_be_silent(folder):
    add(folder, "events.jsonl", {"time": 1.0, "actor": "a/0", "state": "healthy", "activity": "", "stats": {}})
    assert RunView(folder).since()["silent"] is None
    os.utime(folder / "events.jsonl", (0, time.time() - 100))
    data = RunView(folder).since()
    assert data["ended"] is None and data["silent"].startswith("silent for 100 s")


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_run_that_goes_on_is_not_said_to_be_silent_where_its_host_has_another_clock(folder, ahead, monkeypatch):
    add(folder, "events.jsonl", {"time": 1.0, "actor": "a/0", "state": "healthy", "activity": "", "stats": {}})
    now = [1e6]
    monkeypatch.setattr(
        "areal.extensions.desk.run_view.time", SimpleNamespace(time=lambda: 1e9, monotonic=lambda: now[0])
    )
    view = RunView(folder)
    for second in range(3):
        now[0] += 1.0
        os.utime(folder / "events.jsonl", (0, 1e9 + ahead + second))
        silent = view.since()["silent"]
    assert silent is None
    now[0] += 70.0
    assert view.since()["silent"].startswith("silent for 70 s")


async def test_alerts_come_with_their_rollouts_if_the_run_keeps_any(folder):
    sound = [{"step": step, "cut_share": 0.0} for step in range(1, 16)]
    add(folder, "metrics.jsonl", *sound, *({"step": step, "cut_share": 0.5} for step in range(16, 26)))
    view = RunView(folder)
    (alert,) = view.since()["alerts"]
    assert alert["name"] == "cut completions" and alert["query"] is None
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "000001.parquet").touch()
    (alert,) = view.since()["alerts"]
    assert alert["query"] == "step_min=16&step_max=25&finish=length"
    add(folder, "metrics.jsonl", *({"step": step, "cut_share": 0.0} for step in range(26, 31)))
    assert view.since()["alerts"] == []


@pytest.mark.parametrize("query", ["", "?token=", "?token=other"])
async def test_nobody_sees_anything_without_the_token(folder, query):
    async with client(folder, token="mine") as page:
        assert (await page.get("/" + query)).status == 403
        assert (await page.get("/data" + query)).status == 403
        assert (await page.get("/data?token=mine")).status == 200


LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8090"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8090"}, 200),
        ({"Host": "evil.example.org"}, 403),
        ({"Host": "127.0.0.1.example.org:8090"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost/.evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost:80:90"}, 403),
        ({"Host": "localhost:8090", "Origin": "http://localhost:8090"}, 200),
        ({"Host": "localhost:8090", "Origin": "https://evil.example.org"}, 403),
        ({"Host": "localhost:8090", "Origin": "null"}, 403),
        ({"Host": "localhost:8090", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Host": "localhost:8090", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
        ({"Host": "localhost:8090", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Host": "localhost:8090", **LINK}, 200),
    ],
)
async def test_no_other_web_page_reads_this_one(folder, headers, status):
    async with client(folder) as page:
        for path in ("/", "/data"):
            assert (await page.get(path, headers=headers)).status == status


async def test_with_a_token_the_page_may_have_any_name(folder):
    async with client(folder, token="mine") as page:
        assert (await page.get("/data?token=mine", headers={"Host": "node7.example.org:8090"})).status == 200


async def test_who_does_not_finish_a_request_is_cut_off(folder):
    server = TestServer(application(RunView(folder), None))
    await server.start_server(keepalive_timeout=0.2)  # as `serve` gives it to aiohttp, which takes it for headers too
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET /data HTTP/1.1\r\nHost: localhost\r\nX-")
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()
    await server.close()


@pytest.mark.parametrize(("host", "secret"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_elsewhere_than_on_this_machine_there_is_a_token(folder, host, secret, monkeypatch, capsys):
    monkeypatch.setattr("aiohttp.web.run_app", lambda app, host, port, keepalive_timeout, print: print(""))
    assert main(["dashboard", str(folder), "--host", host]) == 0
    assert ("?token=" in capsys.readouterr().out) == secret


async def test_several_runs_are_one_page_that_asks_for_what_is_new_of_each(tmp_path):
    folders = [tmp_path / name for name in ("slow", "fast")]
    for lr, run_folder in enumerate(folders):
        run_folder.mkdir()
        (run_folder / "config.yaml").write_text(f"name: {run_folder.name}\nseed: {lr}\ntrainer: {{lr: {lr}}}\n")
        add(run_folder, "metrics.jsonl", *({"step": step, "reward_mean": 0.5, "staleness_max": lr} for step in (1, 2)))
    add(folders[1], "evaluations.jsonl", {"version": 0, "accuracy": 0.25})
    async with TestClient(TestServer(application(RunsView(folders), None))) as page:
        text = await (await page.get("/")).text()
        assert "REPORT = null" in text and "uPlot" in text
        data = await (await page.get("/data")).json()
        assert [(run["run"], run["colour"], run["ended"]) for run in data["runs"]] == [
            ("slow", "#3b82d6", None),
            ("fast", "#e07b28", None),
        ]
        both = ["slow", "fast"]
        assert [[line["label"] for line in plot["lines"]] for plot in data["plots"]] == [both, ["fast"], both]
        cells = [dict(zip(data["columns"], run["cells"], strict=True)) for run in data["runs"]]
        names = ("trainer.lr", "reward, last 10 steps", "staleness, max", "held-out accuracy")
        assert [[run_folder[name] for name in names] for run_folder in cells] == [
            ["0", "0.500", "0.0", "–"],
            ["1", "0.500", "1.0", "0.250"],
        ]
        assert "plots" not in await (await page.get("/data", params={"stamp": data["stamp"]})).json()
        add(folders[0], "metrics.jsonl", {"step": 3})
        assert "plots" in await (await page.get("/data", params={"stamp": data["stamp"]})).json()


def test_a_folder_without_a_run_is_the_users_mistake(tmp_path, capsys):
    for folders in ([tmp_path], [tmp_path, tmp_path]):
        assert main(["dashboard", *map(str, folders)]) == 2
        assert "is not the folder of a run" in capsys.readouterr().err

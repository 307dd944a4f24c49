"""The reward `judge`, against a server that says what the test wants."""

from __future__ import annotations

import contextlib

import pytest
from aiohttp import web

from areal.config import UserError
from areal.rewards.functions import resolve
from areal.rewards.result import RewardError


@contextlib.asynccontextmanager
async def judge(*answers: str | int, **options):
    """The reward, whose judge gives these answers in turn (a number: that status), and the requests that it got."""
    requests, waiting = [], [*answers]

    async def answer(request: web.Request) -> web.Response:
        requests.append((await request.json()) | {"key": request.headers["Authorization"]})
        said = waiting.pop(0)
        if isinstance(said, int):
            return web.json_response({"error": {"message": "busy"}}, status=said, headers={"retry-after-ms": "1"})
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        told = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return web.json_response(told)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield resolve("judge", {"url": f"http://127.0.0.1:{port}/v1", "model": "wise", **options}), requests
    finally:
        await runner.cleanup()


CHOICES = {"verdict": "choice", "choices": {"A": 1, "AB": 0.5, "none": 0}}


@pytest.mark.parametrize(
    ("said", "options", "score"),
    [
        ("Good: 3 of 4 steps.\n7", {}, 0.7),
        ("-1.5", {"low": -2, "high": 2}, 0.125),
        ("A is tempting, but AB is best: AB.", CHOICES, 0.5),
        ("It is none.", CHOICES, 0.0),
        ('{"score": 1} no: {"why": {"x": 2}, "score": 8}', {"verdict": "json"}, 0.8),
        ("no number", {}, None),
        ("11", {}, None),
        ("ABBA", CHOICES, None),
        ('{"score": ', {"verdict": "json"}, None),
    ],
)
async def test_a_verdict_is_read_by_its_rule_and_one_that_cannot_be_read_is_no_score(said, options, score):
    async with judge(said, **options) as (reward, _):
        if score is None:
            with pytest.raises(RewardError, match="no verdict"):
                await reward("p", "c", {})
        else:
            assert (await reward("p", "c", {})) == (pytest.approx(score), {"tokens": 100})


async def test_the_score_is_the_mean_of_several_judgements_which_are_asked_again_while_the_judge_is_busy():
    options = {"samples": 2, "template": "{{ row.a }} {{ prompt }} {{ completion }}", "sampling": {"temperature": 0.5}}
    async with judge(503, "4", "8", **options, api_key="mine") as (reward, requests):
        assert (await reward("p", "c", {"a": 1})) == (pytest.approx(0.6), {"tokens": 200})
    assert len(requests) == 3
    assert requests[0]["messages"] == [{"role": "user", "content": "1 p c"}]
    assert (requests[0]["model"], requests[0]["temperature"], requests[0]["key"]) == ("wise", 0.5, "Bearer mine")


async def test_a_judge_that_does_not_answer_gives_no_score():
    async with judge(503, 503, retries=1) as (reward, _):
        with pytest.raises(RewardError, match="did not answer"):
            await reward("p", "c", {})


@pytest.mark.parametrize("options", [{"verdict": "poem"}, {"verdict": "choice"}, {"samples": 0}, {"template": "{{"}])
def test_options_that_do_not_fit_are_told_before_the_start(options):
    with pytest.raises(UserError, match="reward judge"):
        resolve("judge", {"url": "http://127.0.0.1:1/v1", "model": "m", **options})

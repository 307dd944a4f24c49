"""The reward `reward_model`, against a server that answers as vLLM's /classify does."""

from __future__ import annotations

import contextlib

import pytest
from aiohttp import web

from areal.rewards.functions import RewardError
from areal.rewards.lookup import resolve


@contextlib.asynccontextmanager
async def reward_model(*answers: int | list[float], **options):
    """The reward, whose model gives these outputs in turn (a number: that status), and the requests that it got."""
    requests, waiting = [], [*answers]

    async def classify(request: web.Request) -> web.Response:
        requests.append(await request.json())
        outputs = waiting.pop(0)
        if isinstance(outputs, int):
            return web.json_response({}, status=outputs, headers={"retry-after-ms": "1"})
        data = {"index": 0, "label": "LABEL_0", "probs": outputs, "num_classes": len(outputs)}
        usage = {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
        return web.json_response({"id": "1", "model": "m", "data": [data], "usage": usage})

    app = web.Application()
    app.router.add_post("/classify", classify)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield resolve("reward_model", {"url": url, "model": "m", **options}).function, requests
    finally:
        await runner.cleanup()


async def test_the_score_is_the_model_s_raw_output_for_the_chat_also_after_the_server_was_busy():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    async with reward_model(503, [-2.5], [0.5]) as (reward, requests):
        assert await reward("p", "c", {}) == (-2.5, {"tokens": 7})
        assert await reward("s\n\np", "c", {"prompt": chat}) == (0.5, {"tokens": 7})
    answered = {"role": "assistant", "content": "c"}
    assert (
        requests[0]
        == requests[1]
        == {"model": "m", "use_activation": False, "messages": [{"role": "user", "content": "p"}, answered]}
    )
    assert requests[2]["messages"] == [*chat, answered]


async def test_a_text_may_be_scored_and_another_output_be_the_score():
    async with reward_model([0.25, 0.75], chat=False, output=1, activation=True) as (reward, requests):
        assert await reward("2+2=", "4", {}) == (0.75, {"tokens": 7})
    assert requests == [{"model": "m", "use_activation": True, "input": "2+2=4"}]


@pytest.mark.parametrize("answer", [404, []])
async def test_without_an_output_there_is_no_score(answer):
    async with reward_model(answer) as (reward, _):
        with pytest.raises(RewardError, match="did not answer" if answer else "gives no output 0"):
            await reward("p", "c", {})

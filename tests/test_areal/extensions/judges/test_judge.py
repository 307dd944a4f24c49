"""The reward `judge`, against a server that says what the test wants."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import UserError
from areal.extensions.judges.verdict_reading import choice_in, field_in, number_in, number_of
from areal.rewards.functions import RewardError
from areal.rewards.lookup import check, resolve


@contextlib.asynccontextmanager
async def judge(*answers: str | int, reward: str = "judge", **options):
    """The reward, whose judge gives these answers in turn (a number: that status), and the requests that it got."""
    requests, waiting = [], [*answers]

    async def answer(request: web.Request) -> web.Response:
        requests.append((await request.json()) | {"key": request.headers["Authorization"]})
        text = waiting.pop(0)
        if isinstance(text, int):
            return web.json_response({"error": {"message": "busy"}}, status=text, headers={"retry-after-ms": "1"})
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "length" if text.endswith("…") else "stop", "message": message}
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield resolve(reward, {"url": f"http://127.0.0.1:{port}/v1", "model": "wise", **options}), requests
    finally:
        await runner.cleanup()


CHOICES = {"verdict": "choice", "choices": {"A": 1, "AB": 0.5, "none": 0}}


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("Good: 3 of 4 steps.\n7", {}, 0.7),
        ("-1.5", {"low": -2, "high": 2}, 0.125),
        ("Score: 5e-1", {}, 0.05),
        ("A is tempting, but AB is best: AB.", CHOICES, 0.5),
        ("It is none.", CHOICES, 0.0),
        ('{"score": 1} no: {"why": {"x": 2}, "score": 8}', {"verdict": "json"}, 0.8),
        ("no number", {}, None),
        ("Score: 8/10.", {}, 0.8),
        ("Of 3 aims it has 2: 7.5 out of 10", {}, 0.75),
        ("11", {}, None),
        ("ABBA", CHOICES, None),
        ('{"score": ', {"verdict": "json"}, None),
        ('It says "score: 10". It is wrong.\n0', {}, 0.0),
        ("Well written.\n9,5", {}, 0.95),
        ("Score: **8**/10", {}, 0.8),
        ("Score: 3 (from 0 to 10)", {}, 0.3),
        ("9 (out of 10)", {}, 0.9),
        ("Score: 2\nConfidence: 9", {}, 0.2),
        ("<think>maybe 9</think>\n4", {}, 0.4),
        ("<think>maybe 9, or 10", {}, None),
        ("1. Good\n2. Clear\nFinal: 8", {}, 0.8),
        ("It has 3 of 5 parts.", {}, None),
        ("90%", {}, None),
        ("10-1", {}, None),
        ("Verdict: A. none is better than AB.", CHOICES, 1.0),
        ("A (the scale is A, AB, none)", CHOICES, 1.0),
        ("This is not AB.", CHOICES, None),
        ("NOT GOOD", {"verdict": "choice", "choices": {"GOOD": 1, "POOR": 0}}, None),
        ("good", {"verdict": "choice", "choices": {"GOOD": 1, "POOR": 0}}, 1.0),
        ('{"score": 9, "criteria": [{"score": 1}, {"score": 2}]}', {"verdict": "json"}, 0.9),
        ('{"criteria": [{"score": 1}], "score": 9}', {"verdict": "json"}, 0.9),
        ('{"score": 9, "criteria": [{"score": 1},', {"verdict": "json"}, None),
        ('{"Score": "8/10"}', {"verdict": "json"}, 0.8),
        ('{"score": "8"}', {"verdict": "json"}, 0.8),
        ("NOT CORRECT", {"verdict": "choice", "choices": {"CORRECT": 1, "INCORRECT": 0}}, None),
        ("Verdict: B. A better answer would be short.", {"verdict": "choice", "choices": {"A": 1, "B": 0}}, 0.0),
        ('{"score": NaN}', {"verdict": "json"}, None),
    ],
)
async def test_a_verdict_is_read_by_its_rule_and_one_that_cannot_be_read_is_no_score(text, options, score):
    async with judge(text, **options) as (reward, _):
        if score is None:
            with pytest.raises(RewardError, match="no verdict|not a finite number"):
                await reward.function("p", "c", {})
        else:
            assert (await reward.function("p", "c", {})) == (pytest.approx(score), {"tokens": 100})


async def test_the_score_is_the_mean_of_several_judgements_which_are_asked_again_while_the_judge_is_busy():
    options = {"samples": 2, "template": "{{ row.a }} {{ prompt }} {{ completion }}", "sampling": {"temperature": 0.5}}
    async with judge(503, "4", "8", **options, api_key="mine") as (reward, requests):
        assert (await reward.function("p", "c", {"a": 1})) == (pytest.approx(0.6), {"tokens": 200})
    assert len(requests) == 3
    assert requests[0]["messages"] == [{"role": "user", "content": "1 p c"}]
    assert (requests[0]["model"], requests[0]["temperature"], requests[0]["key"]) == ("wise", 0.5, "Bearer mine")


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_a_judge_gets_the_limit_of_tokens_that_it_takes(limit):
    sampling = {} if limit == "max_tokens" else {limit: 512}
    async with judge("4", sampling=sampling) as (reward, requests):
        await reward.function("p", "c", {})
    assert {key: value for key, value in requests[0].items() if key.startswith("max")} == {limit: 512}


async def test_an_answer_that_was_cut_is_no_verdict_whatever_numbers_it_has():
    async with judge("Of its 3 steps 2 are…") as (reward, _):
        with pytest.raises(RewardError, match="the judge's answer was cut at its max_tokens, 512: raise them"):
            await reward.function("p", "c", {})


async def test_a_judge_that_does_not_answer_gives_no_score():
    async with judge(503, 503, retries=1) as (reward, _):
        with pytest.raises(RewardError, match="did not answer"):
            await reward.function("p", "c", {})


@pytest.mark.parametrize(
    "template", ["{{ row.answer + 1 }}", "{{ row.answer.text.more }}", "{{ 1 // (prompt | length - 1) }}"]
)
async def test_a_template_that_fails_on_a_row_gives_no_score_and_asks_nothing(template):
    async with judge(template=template) as (reward, requests):
        with pytest.raises(RewardError, match="the judge's template cannot be rendered: [A-Z][A-Za-z]+Error: "):
            await reward.function("p", "c", {"answer": "4"})
    assert not requests


@pytest.mark.parametrize(
    "options",
    [
        {"verdict": "poem"},
        {"verdict": "choice"},
        {"samples": 0},
        {"template": "{{"},
        {"url": "scorrer:big"},
        {"model": ""},
    ],
)
def test_options_that_do_not_fit_are_told_before_the_start(options):
    with pytest.raises(UserError, match="reward 'judge/strict': "):
        check("judge/strict", {"url": "http://127.0.0.1:1/v1", "model": "m", **options})


async def test_a_group_is_ranked_with_the_best_first_and_one_completion_without_asking():
    async with judge("[3, 1] is wrong, I say [2, 3, 1].", reward="group_judge") as (reward, requests):
        results = await reward.call("p", ["a", "b", "c"], {"answer": "a"})
        assert [result.score for result in results] == [0, 1, 0.5] and results[0].parts == {
            "tokens": pytest.approx(100 / 3)
        }
        assert (
            '<reference>\na\n</reference>\n<response number="1">\na\n</response>'
            in requests[0]["messages"][0]["content"]
        )
        assert await reward.call("p", ["a"], {}) == [(0.5, {})]


async def test_several_rankings_begin_with_other_completions_so_that_a_place_alone_wins_nothing():
    template = "{{ prompt }}{% for completion in completions %} {{ completion }}{% endfor %}"
    in_order = ["[1, 2, 3, 4]"] * 2
    async with judge(*in_order, reward="group_judge", samples=2, template=template) as (reward, requests):
        results = await reward.call("p", ["a", "b", "c", "d"], {})
    assert sorted(request["messages"][0]["content"] for request in requests) == ["p a b c d", "p c d a b"]
    assert [result.score for result in results] == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3])


async def test_a_ranking_that_leaves_one_out_is_no_score():
    async with judge("[2, 3]", reward="group_judge") as (reward, _):
        with pytest.raises(RewardError, match="no verdict"):
            await reward.call("p", ["a", "b", "c"], {})


words = st.text(alphabet="ab .,:;!?()*_#\n'\"[]", max_size=12)
LINES = ["{}", "**{}**", "Score: {}", "Final verdict: {}.", "My rating is {}", "## Grade\n{}", "- {} -"]


@given(words, st.integers(0, 10), st.sampled_from(LINES), st.sampled_from(["", "\n"]))
def test_a_verdict_in_a_line_of_its_own_is_the_number_whatever_was_reasoned_before(reasoning, number, line, end):
    assert number_in(f"{reasoning}\n\n{line.format(number)}{end}") == number
    thought = f"<think>{reasoning} 7 of 9</think>{line.format(number)}{end}"
    assert number_in(thought) == number


pieces = st.lists(
    st.sampled_from(["7", "3.5", "-2", "/10", "%", "A", "B", "not", "Verdict:", "score", "the", "\n", "of", "."])
)


@given(pieces)
def test_a_verdict_stands_in_the_answer_or_there_is_none(pieces):
    text = " ".join(pieces)
    number, choice = number_in(text), choice_in(text, ["A", "B"])
    assert number is None or number in [float(digits) for digits in re.findall(r"-?\d+(?:\.\d+)?", text)]
    assert choice is None or re.search(rf"\b{choice}\b", text)
    assert not choice or not re.fullmatch(rf"\W*not[^\w\n]+{choice}\W*", text)


fields = st.dictionaries(st.sampled_from(["score", "why", "parts"]), st.integers(0, 10) | st.text(max_size=4))


@given(words, fields, st.dictionaries(st.just("score"), st.integers(11, 20)), words)
def test_a_field_is_that_of_the_object_and_not_of_one_in_it(before, verdict, inner, after):
    text = f"{before} {json.dumps(verdict | {'inner': inner})} {after}"
    read = field_in(text, "score")
    value = verdict.get("score")
    assert read == (number_of(value) if isinstance(value, str) else value)

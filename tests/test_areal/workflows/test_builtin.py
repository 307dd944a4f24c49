"""What workflows make of several turns: one sample, its tokens as they were sampled, one reward."""

from __future__ import annotations

import functools

import pytest
from fakes.scripted_policy import EOS, Characters, Session, byte_tokenizer

from areal.base.errors import UserError
from areal.base.text import python_call
from areal.data.rows import Row
from areal.workflows.builtin import FEEDBACK
from areal.workflows.named_workflows import resolve_workflow, texts_of

ROW = Row(index=0, prompt="1+1=", answer="2", reward=None, fields={"prompt": "a75b48=", "answer": "132"})


def plain(session, row):
    return None


@functools.wraps(plain)
async def wrapped(session, row):
    return plain(session, row)


class Callable:
    async def __call__(self, session, row):
        return None


called, partly = Callable(), functools.partial(wrapped)


@pytest.mark.parametrize("name", ["wrapped", "called", "partly"])
def test_a_workflow_is_async_whatever_it_is_wrapped_in(name):
    resolve_workflow(f"{__file__}:{name}", {})


@pytest.mark.parametrize("name", ["plain", "Callable", "EOS"])
def test_what_is_not_async_is_no_workflow(name):
    with pytest.raises(UserError, match=f":{name}' is no async function: write `async def`"):
        resolve_workflow(f"{__file__}:{name}", {})


def test_the_texts_that_a_workflow_writes_are_known():
    assert texts_of("multi_turn", {}) == ["That is not correct. Try again."]
    assert texts_of("multi_turn", {"feedback": "{prompt}"}) == [""]
    assert "```output" in texts_of("python_tool", {})[0] and texts_of("single_turn", {}) == []


async def run(name: str, session: Session, **options):
    return await resolve_workflow(name, options)(session, ROW)


def said(trajectory) -> str:
    """What of a trajectory was sampled."""
    return Characters().decode(trajectory.tokens[trajectory.sampled].tolist(), skip_special_tokens=True)


async def test_single_turn_is_one_scored_completion():
    outcome = await run("single_turn", Session("2", scores={"2": 1.0}))
    assert outcome.tokens.tolist() == [*map(ord, "1+1=2"), EOS]
    assert outcome.versions.tolist() == [-1] * 4 + [7] * 2
    assert (outcome.reward, outcome.finish) == (1.0, "stop")


@pytest.mark.parametrize(
    ("turns", "reward", "attempts"),
    [(["2"], 1.0, 1), (["3", "2"], 0.5, 2), (["3", "4", "2"], 0.25, 3), (["3"] * 3, 0, 3)],
)
async def test_an_attempt_after_feedback_is_worth_less(turns, reward, attempts):
    session = Session(*turns, scores={"2": 1.0})
    outcome = await run("multi_turn", session, max_turns=3, discount=0.5, feedback=" no: {prompt}")
    assert (outcome.reward, len(session.prompts)) == (reward, attempts)
    assert said(outcome) == "".join(turns)
    if attempts > 1:
        assert session.prompts[1] == "1+1=3 no: 1+1="


async def test_a_score_that_falls_short_of_pass_score_counts_where_no_attempt_is_left():
    assert (await run("multi_turn", Session("a", "b", scores={"a": 0.2, "b": 0.4}), max_turns=2)).reward == 0.4
    assert (await run("multi_turn", Session("a", scores={"a": 0.2}), pass_score=0.1)).reward == 0.2


async def test_no_turn_follows_one_that_was_cut():
    outcome = await run("multi_turn", Session("3…"), max_turns=3)
    assert (said(outcome), outcome.finish) == ("3", "length")


async def test_a_sample_without_room_for_another_turn_ends_with_the_turns_it_has():
    outcome = await run("multi_turn", Session("3", "…", scores={"3": 0.3}), max_turns=3)
    assert (outcome.tokens[-2:].tolist(), outcome.reward) == ([ord("3"), EOS], 0.3)


CALL = "Let me see.\n```python\nprint(2)\n```"


async def test_what_code_prints_is_told_and_not_trained():
    session = Session(CALL, "2", scores={"2": 1.0})
    outcome = await run("python_tool", session)
    assert session.ran == ["print(2)\n"]
    assert session.prompts[1] == f"1+1={CALL}```output\nran 9\n```\n"
    assert (said(outcome), outcome.reward) == (CALL + "2", 1.0)


async def test_what_the_policy_imagines_a_call_to_print_is_not_sampled():
    session = Session(CALL + "```output\n7```", "2")
    assert said(await run("python_tool", session)) == CALL + "2"


async def test_the_turn_after_the_last_call_is_scored_whatever_it_is():
    session = Session(CALL, CALL, scores={CALL: 0.5})
    assert (await run("python_tool", session, max_calls=1)).reward == 0.5
    assert len(session.prompts) == 2


async def test_long_output_is_cut():
    session = Session(CALL, "2")
    await run("python_tool", session, max_output=3)
    assert session.prompts[1].endswith("```output\nran\n[2 more characters]\n```\n")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("2", None),
        ("<tool>f()</tool> so", "f()"),
        ("```python\nx\n```\n```python\ny\n```", "x\n"),
        ("```\nx\n```", None),
    ],
)
def test_a_call_is_a_python_block_or_stands_between_tool_tags(text, code):
    assert python_call(text) == code


async def test_acting_in_an_environment_earns_the_sum_of_its_rewards():
    session = Session("a7512", "b4813")
    outcome = await run("environment", session, environment="column_addition")
    assert session.prompts == ["a75=", "a75=a7512b48="]
    assert (said(outcome), outcome.reward) == ("a7512b4813", 1.0)


async def test_a_forgotten_carry_ends_the_addition():
    session = Session("a7512", "b4812")
    assert (await run("environment", session, environment="column_addition")).reward == 0.5


class Countdown:
    """Counts a number down to 0; `closed` tells that it was cleared away."""

    closed = 0

    def __init__(self, start: int = 2) -> None:
        self.left = start

    async def reset(self, row):
        return [{"role": "user", "content": f"{self.left}"}]

    async def step(self, action):
        if action == "!":
            raise RuntimeError("broken")
        self.left -= 1
        return f"{self.left}", 0.25, self.left == 0

    async def close(self):
        Countdown.closed += 1


async def test_an_environment_of_the_users_own_takes_options_and_is_closed_at_any_end(monkeypatch):
    monkeypatch.setattr(Countdown, "closed", 0)
    item = {"environment": f"{__name__}:Countdown", "environment_options": {"start": 3}}
    assert (await run("environment", Session("x", "x", "x"), **item)).reward == 0.75
    assert (await run("environment", Session("x", "x"), **item, max_turns=2)).reward == 0.5
    with pytest.raises(RuntimeError, match="broken"):
        await run("environment", Session("!"), **item)
    assert Countdown.closed == 3


async def my_workflow(session, row, *, depth: int):
    return depth


async def of_a_session(session):
    return 1.0


async def test_a_workflow_of_the_users_own_gets_its_options():
    assert await resolve_workflow(f"{__name__}:my_workflow", {"depth": 4})(None, None) == 4


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("triple_turn", {}, "there is no workflow 'triple_turn': name one of single_turn, multi_turn"),
        ("single_turn", {"max_turns": 2}, "it takes no options"),
        ("multi_turn", {"turns": 2}, "it takes max_turns, discount"),
        ("multi_turn", {"max_turns": 0}, "max_turns is 0: Input should be greater"),
        ("multi_turn", {"discount": "much"}, "discount is 'much'"),
        ("environment", {}, "'environment': besides a session and a row it takes environment, environment_options"),
        ("environment", {"environment": "chess"}, "name one of column_addition, gymnasium:, openenv:, docker"),
        ("environment", {"environment": "areal.data:Row"}, "has no async reset"),
        (
            "environment",
            {"environment": f"{__name__}:Countdown", "environment_options": {"end": 1}},
            "does not take these environment_options: got an unexpected keyword argument 'end'",
        ),
        (f"{__name__}:my_workflow", {}, "'depth': besides a session and a row it takes depth"),
        (f"{__name__}:of_a_session", {}, "arguments: besides a session and a row it takes no options"),
    ],
)
def test_a_mistake_in_the_options_is_told_before_anything_runs(name, options, sentence):
    with pytest.raises(UserError) as error:
        resolve_workflow(name, options)
    assert sentence in str(error.value)


LOOK_UP = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": {}}}


@pytest.mark.parametrize("workflow", ["single_turn", "multi_turn", "python_tool", "environment"])
async def test_the_policy_sees_the_tools_of_its_row_and_its_tokens_stay_exact(workflow):
    of = byte_tokenizer()
    row = Row(0, [{"role": "user", "content": "Weather?"}], "7", None, {}, tools=[LOOK_UP])
    session = Session('<tool_call>{"name": "look_up"}</tool_call>', "7", tokenizer=of, scores={"7": 1.0})
    options = {"environment": f"{__file__}:Asks", "max_turns": 2} if workflow == "environment" else {}
    outcome = await resolve_workflow(workflow, options)(session, row)
    answers = ['<tool_call>{"name": "look_up"}</tool_call>', "7"]
    between = {"multi_turn": FEEDBACK, "environment": "And?"}.get(workflow)
    messages = [*row.prompt]
    for answer in answers[: 1 if between is None else 2]:
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": between})
    whole = of.apply_chat_template(messages[:-1], tools=[LOOK_UP], tokenize=False)
    assert outcome.tokens.tolist() == of.encode(whole, add_special_tokens=False)
    assert session.prompts[0].startswith("tools look_up")


class Asks:
    """Asks twice."""

    async def reset(self, row):
        return row.prompt

    async def step(self, action):
        return "And?", 0.0, action == "7"


async def test_a_model_without_a_template_that_shows_tools_fails_the_sample_of_a_row_with_tools():
    row = Row(0, [{"role": "user", "content": "Weather?"}], "7", None, {}, tools=[LOOK_UP])
    with pytest.raises(ValueError, match="the model's chat template shows it no tools"):
        await resolve_workflow("single_turn", {})(Session("7"), row)

"""Environments of the Gymnasium library, where that is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import queue
import threading

import pytest
from fakes.scripted_policy import Session

from areal.base.errors import UserError
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.workflows.named_workflows import rehearse, resolve_workflow

installed = pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
# Not slippery: the agent goes where it wants to.
LAKE = {"render_mode": "ansi", "is_slippery": False}
LEFT, DOWN, RIGHT = "0", "1", "2"


def row(prompt="", **fields) -> Row:
    return Row(index=3, prompt=prompt, answer=None, reward=None, fields=fields)


async def play(world: str, session: Session, given: Row | None = None, max_turns: int = 8, **options):
    name = f"gymnasium:{world}"
    workflow = resolve_workflow(
        "environment", {"environment": name, "environment_options": options, "max_turns": max_turns}
    )
    return await workflow(session, given or row())


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is not None, reason="gymnasium is installed")
def test_without_the_library_the_user_is_told_how_to_install_it():
    with pytest.raises(UserError, match="pip install 'gymnasium"):
        rehearse("environment", {"environment": "gymnasium:FrozenLake-v1"}, SandboxConfig())


@pytest.fixture
def shout():
    """A game in texts: the policy has to shout the letter that it is shown, as often as the seed says."""
    import gymnasium
    from gymnasium.spaces import Text

    class Shout(gymnasium.Env):
        observation_space, action_space = Text(20), Text(5, min_length=0)

        def reset(self, *, seed=None, options=None):
            self.left = seed
            return "a", {}

        def step(self, action):
            if action == "crash":
                raise RuntimeError("the game is broken")
            if action == "wait":
                raise TimeoutError("no player answers")
            self.left -= 1
            return "a", float(action == "A"), self.left == 0, False, {}

    gymnasium.register("Shout-v0", Shout)
    yield
    del gymnasium.registry["Shout-v0"]


@installed
async def test_an_answer_that_ends_in_a_number_is_that_action_and_the_board_is_shown():
    turns = [f"I go {where}" for where in (DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT)]
    session = Session(*turns)
    outcome = await play("FrozenLake-v1", session, row("Cross the lake."), **LAKE)
    assert session.prompts[0].startswith("Cross the lake.\n") and "FHFH" in session.prompts[0]
    assert "(Down)" in session.prompts[1] and "(Right)" in session.prompts[3]
    assert (outcome.reward, len(session.prompts)) == (1.0, 6)


@installed
async def test_an_observation_that_is_no_text_is_shown_as_its_str():
    session = Session(RIGHT, RIGHT)
    await play("FrozenLake-v1", session, max_turns=2, is_slippery=False)
    assert session.prompts == ["0", "021"]


@installed
@pytest.mark.parametrize("text", ["somewhere", "4", "-1"])
async def test_an_answer_without_an_action_costs_what_the_user_has_set_and_is_told(text):
    session = Session(text, RIGHT)
    outcome = await play("FrozenLake-v1", session, max_turns=2, unparsed_reward=-0.5, **LAKE)
    assert "That is no action. Actions are: Discrete(4)." in session.prompts[1]
    assert outcome.reward == -0.5


def by_name(text: str) -> int | None:
    return {"left": 0, "down": 1, "right": 2, "up": 3}.get(text.strip().lower())


@installed
async def test_a_function_of_the_users_own_reads_actions():
    session = Session("down", "0", "right")
    await play("FrozenLake-v1", session, max_turns=3, action=f"{__name__}:by_name", **LAKE)
    assert "(Down)" in session.prompts[1] and "no action" in session.prompts[2]


@installed
async def test_the_seed_comes_from_the_row(shout):
    assert (await play("Shout-v0", Session("A", "a", "A"))).reward == 2.0  # the index is 3
    assert (await play("Shout-v0", Session("A"), row(seed=1))).reward == 1.0


@installed
async def test_chat_messages_of_the_row_end_with_the_first_observation(shout):
    session = Session("A")
    await play("Shout-v0", session, row([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], seed=1))
    assert session.prompts == ["s\n\nu\na"]


@installed
async def test_an_environment_that_fails_is_no_score(shout):
    with pytest.raises(RuntimeError, match="the game is broken"):
        await play("Shout-v0", Session("crash"))
    with pytest.raises(TimeoutError, match="^no player answers$"):
        await play("Shout-v0", Session("wait"))


@pytest.fixture
def slow():
    """Environments whose only step waits for the gate. Each tells that it has come there, and that it was closed."""
    import gymnasium
    from gymnasium.spaces import Text

    class Slow(gymnasium.Env):
        observation_space, action_space = Text(20), Text(20)
        gate = threading.Event()
        came = queue.SimpleQueue()
        closed = queue.SimpleQueue()

        def reset(self, *, seed=None, options=None):
            return "go", {}

        def step(self, action):
            self.came.put(self)
            self.gate.wait()
            return "x", 1.0, True, False, {}

        def close(self):
            self.closed.put(self)

    gymnasium.register("Slow-v0", Slow)
    yield Slow
    Slow.gate.set()
    del gymnasium.registry["Slow-v0"]


@installed
async def test_a_step_that_does_not_end_fails_its_sample_and_the_environment_is_closed_when_it_does(slow):
    with pytest.raises(TimeoutError, match="gymnasium:Slow-v0 took longer than timeout_seconds"):
        await play("Slow-v0", Session("x"), timeout_seconds=0.1)
    assert slow.closed.empty()
    slow.gate.set()
    await asyncio.to_thread(slow.closed.get)


@installed
async def test_environments_that_are_slow_hold_no_other_episode_up(slow, shout):
    held = [asyncio.create_task(play("Slow-v0", Session("x"), timeout_seconds=300)) for _ in range(128)]
    for _ in held:
        await asyncio.to_thread(slow.came.get)
    free = await asyncio.gather(*(play("Shout-v0", Session("A", "A", "A")) for _ in range(128)))
    assert [outcome.reward for outcome in free] == [3.0] * 128
    assert not any(task.done() for task in held)
    slow.gate.set()
    assert [outcome.reward for outcome in await asyncio.gather(*held)] == [1.0] * 128


@installed
@pytest.mark.parametrize(
    ("world", "options", "sentence"),
    [
        ("Chess-v7", {}, "cannot be made with these environment_options: Environment `Chess` doesn't exist"),
        ("no_such_module:Go-v0", {}, "is not installed (No module named 'no_such_module'"),
        ("FrozenLake-v1", {"size": 9}, "unexpected keyword argument 'size'"),
        ("FrozenLake-v1", {"action": f"{__name__}:no_such"}, "has no no_such"),
        ("Pendulum-v1", {}, "takes neither texts nor numbers but Box(-2.0, 2.0"),
    ],
)
def test_a_mistake_in_the_options_is_told_before_anything_runs(world, options, sentence):
    with pytest.raises(UserError) as error:
        rehearse("environment", {"environment": f"gymnasium:{world}", "environment_options": options}, SandboxConfig())
    assert sentence in str(error.value)

"""Environments that a real OpenEnv server serves, where that library is installed."""

from __future__ import annotations

import importlib.util
import threading
import time

import pytest
from fakes.scripted_policy import Session

from areal.base.errors import UserError
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.workflows.named_workflows import rehearse, resolve_workflow

installed = pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="openenv is not installed")


@pytest.fixture
def url(free_port):
    """A server of a game: the number that the policy has to guess is the seed."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    gate = threading.Event()  # a step that guesses 99 waits for it

    class Guess(Action):
        number: int

    class Told(Observation):
        text: str

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, hint="", **keywords):
            self.secret = seed
            return Told(text=f"Guess. {hint}")

        def step(self, action, timeout_s=None, **keywords):
            if action.number < 0:
                raise ValueError("numbers are positive")
            if action.number == 99:
                gate.wait()
            right = action.number == self.secret
            return Told(text="Higher." if action.number < self.secret else "Lower.", reward=float(right), done=right)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=2)
    server = uvicorn.Server(uvicorn.Config(app, port=free_port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{free_port}"
    gate.set()
    server.force_exit = server.should_exit = True
    thread.join()


def row(**fields) -> Row:
    return Row(index=3, prompt="A game.", answer=None, reward=None, fields=fields)


async def play(url: str, session: Session, given: Row | None = None, **options):
    chosen = {"action": "number", "observation": "text", **options}
    workflow = resolve_workflow("environment", {"environment": f"openenv:{url}", "environment_options": chosen})
    return await workflow(session, given or row())


@installed
async def test_an_episode_is_played_in_a_session_with_the_server(url):
    session = Session("1", "7", "3")
    outcome = await play(url, session)
    assert session.prompts == ["A game.\nGuess. ", "A game.\nGuess. 1Higher.", "A game.\nGuess. 1Higher.7Lower."]
    assert outcome.reward == 1.0


@installed
async def test_seed_and_what_else_a_reset_takes_come_from_the_row(url):
    session = Session("5")
    assert (await play(url, session, row(seed=5, reset={"hint": "It is odd."}))).reward == 1.0
    assert session.prompts == ["A game.\nGuess. It is odd."]


@installed
async def test_an_action_that_the_server_does_not_take_is_told(url):
    session = Session("three", "3")
    outcome = await play(url, session, unparsed_reward=-0.5)
    assert "That is no action: number: Input should be a valid integer" in session.prompts[1]
    assert outcome.reward == 0.5


def by_word(text: str) -> dict | None:
    return {"number": 3} if text == "three" else None


@installed
async def test_a_function_of_the_users_own_makes_actions_and_observations_may_be_shown_whole(url):
    session = Session("3", "three")
    assert (await play(url, session, action=f"{__name__}:by_word", observation=None)).reward == 1.0
    assert session.prompts[0] == 'A game.\n{"metadata": {}, "text": "Guess. "}'
    assert session.prompts[1].endswith("That is no action.")


@installed
async def test_an_error_of_the_environment_is_no_score(url):
    with pytest.raises(RuntimeError, match=r"numbers are positive \(EXECUTION_ERROR\)"):
        await play(url, Session("-1"))


@installed
async def test_a_step_that_does_not_end_fails_its_sample(url):
    with pytest.raises(TimeoutError, match="took longer than timeout_seconds"):
        await play(url, Session("99"), timeout_seconds=1.0)


@installed
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"action": "guess"}, "have no field 'guess' but metadata, number"),
        ({}, "missing a required argument: 'action'"),
    ],
)
def test_a_mistake_in_the_options_is_told_before_anything_runs(url, options, sentence):
    with pytest.raises(UserError) as error:
        rehearse("environment", {"environment": f"openenv:{url}", "environment_options": options}, SandboxConfig())
    assert sentence in str(error.value)


def test_without_a_server_the_user_is_told(free_port):
    url = f"http://127.0.0.1:{free_port}"
    with pytest.raises(UserError, match=f"No OpenEnv server answers at {url}"):
        rehearse(
            "environment",
            {"environment": f"openenv:{url}", "environment_options": {"action": "number"}},
            SandboxConfig(),
        )

"""The workflow `verifiers`, and its agent, which does a task of the verifiers library and reports the reward."""

import os
from typing import Any

from areal.data.rows import Row
from areal.extensions.agents.agents import Seconds, agent
from areal.extensions.environments import verifiers_tasks
from areal.samples.trajectory import LARGEST_REWARD, Trajectory
from areal.workflows.session import Session


async def solve(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Has the library's environment play the row's task, with the tools that its tasks share. Returns the mean reward
    of what the trained agent did. Raises RuntimeError if that fails, or if more than one agent would be trained."""
    from verifiers.v1 import EvalClientConfig, ModelContext

    name, options = row["environment"], row["environment_options"]
    task = verifiers_tasks.tasks(name, options)[row["task"]]
    environment = verifiers_tasks.load_environment(name, options)
    variable = f"AREAL_KEY_{api_key}"  # the library takes keys from the environment only
    os.environ[variable] = api_key
    client = EvalClientConfig(base_url=base_url, api_key_var=variable)
    try:
        async with environment.serving():
            episode = await environment.run_episode(task, ModelContext(model="policy", client=client))
    finally:
        del os.environ[variable]
    what = f"task set {name!r}"
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"{what}: {errors[-1].message if errors else 'no result'}")
    by_policy = [trace for trace in episode.traces if trace.agent.config.client == client]
    if untrained := {trace.agent.name for trace in by_policy if not trace.agent.trainable}:
        role = sorted(untrained)[0]
        raise RuntimeError(
            f"{what}: {role} is not to be trained: give it a model, data.options.{role}.model and .client"
        )
    if len(roles := {trace.agent.name for trace in by_policy}) != 1:
        raise RuntimeError(
            f"{what}: the policy plays {', '.join(sorted(roles)) or 'nobody'}, but one agent can be trained: give the "
            f"others a model, data.options.AGENT.model and .client"
        )
    return sum(float(trace.reward) for trace in by_policy) / len(by_policy)


async def verifiers(session: Session, row: Row, *, timeout_seconds: Seconds = 600.0) -> Trajectory:
    """Does a task of the verifiers library, which also gives the rows (data.source verifiers:NAME)."""
    return await agent(
        session,
        row,
        agent=f"{__name__}:solve",
        timeout_seconds=timeout_seconds,
        agent_reward=True,
        reward_range=[-LARGEST_REWARD, LARGEST_REWARD],
    )

"""The workflow `verifiers`, and its agent, which does a task of the verifiers library and reports the reward."""

import json
import os
from typing import Any

from areal.data.rows import Row
from areal.extensions.agents.agents import Seconds, agent
from areal.extensions.environments import verifiers_tasks
from areal.samples.trajectory import LARGEST_REWARD, Trajectory
from areal.workflows.session import Session


async def solve(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Runs the library's agent, a program, on the row's task. Raises RuntimeError if it fails."""
    import verifiers.v1 as library

    task = verifiers_tasks.tasks(row["environment"], row["environment_options"])[row["task"]]
    # The program chats and calls the task's tools; it runs no code of the policy, so it needs no container.
    chosen = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    chosen |= json.loads(row["environment_options"]).get("agent", {})
    variable = f"AREAL_KEY_{api_key}"  # the library takes keys from the environment only
    os.environ[variable] = api_key
    try:
        client = library.EvalClientConfig(base_url=base_url, api_key_var=variable)
        agent = library.make_agent(library.AgentConfig(**chosen, model="policy", client=client))
        trace = await agent.run(task)
    finally:
        del os.environ[variable]
    if not trace.ok:
        raise RuntimeError(
            f"task set {row['environment']!r}: {trace.errors[-1].message if trace.errors else 'no result'}"
        )
    return float(trace.reward)


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

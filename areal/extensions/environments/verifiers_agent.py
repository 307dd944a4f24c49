"""The workflow `verifiers`. Its agent does a task of the verifiers library and reports the rewards."""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from areal.data.rows import Row
from areal.extensions.agents.agents import Seconds, agent
from areal.extensions.environments import verifiers_tasks
from areal.samples.trajectory import LARGEST_REWARD, Trajectory
from areal.workflows.session import Session


async def solve(base_url: str, api_key: str, row: dict[str, Any], reward_key: str) -> float:
    """Have the library's environment play the row's task, with the tools that tasks share. A trained agent gets the
    reward of its own trace. Return the mean reward of the trained agents. Raises RuntimeError if the episode fails, or
    if no agent is trained."""
    from aiohttp import ClientSession  # a web library, which few runs need
    from verifiers.v1 import EvalClientConfig, ModelContext

    name, options = row["environment"], row["environment_options"]
    task = verifiers_tasks.tasks(name, options)[row["task"]]
    environment = verifiers_tasks.load_environment(name, options)
    variable = f"AREAL_KEY_{api_key}"  # the library takes keys from the environment only
    os.environ[variable] = api_key
    client = EvalClientConfig(base_url=base_url, api_key_var=variable)
    discarded: list[Any] = []
    try:
        async with environment.serving():
            context = ModelContext(model="policy", client=client)
            episode = await environment.run_episode(task, context, on_discard=discarded.append)
    finally:
        del os.environ[variable]
    what = f"task set {name!r}"
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"{what}: {errors[-1].message if errors else 'no result'}")
    rewards = _rewards([*episode.traces, *discarded], client, row["trained_agents"])
    values = [body["reward"] for body in rewards if body["reward"] is not None]
    trained = {body["agent"] for body in rewards if body["reward"] is not None}
    if untrained := {*(row["trained_agents"] or ())} - trained or ({"nobody"} if not values else set()):
        raise RuntimeError(
            f"{what}: {', '.join(sorted(trained)) or 'no agent'} can be trained in this task, not "
            f"{' and '.join(sorted(untrained))}: correct rollout_manager.workflow_options.train"
        )
    headers = {"Authorization": f"Bearer {api_key}"}
    async with ClientSession(raise_for_status=True, headers=headers) as http:
        for body in rewards:
            await http.post(f"{base_url}/reward", json=body | {"key": reward_key})
    return sum(values) / len(values)


def _rewards(traces: Sequence[Any], client: Any, trained: Collection[str] | None) -> list[dict[str, Any]]:
    """Return the rewards of all traces of the policy, in the endpoint's form. The library names calls by the ids of
    their traces. trained: names of agents; None: as the environment says. A discarded trace is not trained."""
    bodies = []
    for trace in traces:
        if trace.agent.config.client == client:
            agent = trace.agent.name
            is_trained = (
                trace.ok and trace.agent.trainable and trace.num_turns and (trained is None or agent in trained)
            )
            bodies.append({"session": trace.id, "agent": agent, "reward": float(trace.reward) if is_trained else None})
    return bodies


async def verifiers(
    session: Session, row: Row, *, timeout_seconds: Seconds = 600.0, train: list[str] | None = None
) -> Trajectory:
    """Do a task of the verifiers library, which also gives the rows (data.source verifiers:NAME). train: names of the
    trained agents; None: as the environment says. The policy plays all further agents, untrained."""
    return await agent(
        session,
        replace(row, fields=row.fields | {"trained_agents": train}),
        agent=f"{__name__}:solve",
        timeout_seconds=timeout_seconds,
        agent_reward=True,
        reward_range=[-LARGEST_REWARD, LARGEST_REWARD],
    )

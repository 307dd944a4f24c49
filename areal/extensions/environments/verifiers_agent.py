"""An agent (areal.extensions.agents.agents) that does a task of the verifiers library and reports its reward."""

import json
import os
from typing import Any

from areal.extensions.environments import verifiers_tasks


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

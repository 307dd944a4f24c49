"""Writes the small sibling's rows, and turns of a careless clerk, in the environment of tau2."""

import json
from random import Random

from episodes import FOLDER
from loguru import logger
from tau2 import TextRunConfig
from tau2.data_model.message import ToolCall
from tau2.runner import build_text_orchestrator, get_tasks
from tau2.utils.llm_utils import to_litellm_messages

CONVERSATIONS, RIGHT, KEPT = 1500, 0.3, 0.95
CALLS = [
    {"name": "create_task", "arguments": {"user_id": "user_1", "title": "Important Meeting"}},
    {"name": "update_task_status", "arguments": {"task_id": "task_1", "status": "completed"}},
    {"name": "update_task_status", "arguments": {"task_id": "task_2", "status": "completed"}},
    {"name": "transfer_to_human_agents", "arguments": {"summary": "This is not possible."}},
]
TASKS = {
    "create_task_1": 0,
    "update_task_1": 1,
    "update_task_with_message_history": 2,
    "update_task_with_initialization_actions": 2,
    "update_task_with_history_and_env_assertions": 2,
    "impossible_task_1": 3,
}
"""Tasks of the mock domain, and the place of the right call."""


def turns(name: str, random: Random) -> list[dict]:
    """Return two turns of a clerk: a call, which is right with RIGHT and else random, and a text after the result."""
    (task,) = get_tasks("mock", task_ids=[name])
    conversation = build_text_orchestrator(TextRunConfig(domain="mock", llm_agent="", llm_user=""), task)
    conversation.initialize()
    state = conversation.agent_state
    said = " ".join(word for word in str(task.user_scenario).split(" ") if random.random() < KEPT)
    messages = [*to_litellm_messages([*state.system_messages, *state.messages]), {"role": "user", "content": said}]
    call = CALLS[TASKS[name]] if random.random() < RIGHT else random.choice(CALLS)
    text = f"<tool_call>{json.dumps(call)}</tool_call>"
    result = conversation.environment.get_response(ToolCall(id="1", **call)).content
    after = [*messages, {"role": "assistant", "content": text}, {"role": "tool", "content": result}]
    tools = [tool.openai_schema for tool in conversation.agent.tools]
    return [{"prompt": p, "completion": c, "tools": tools} for p, c in ((messages, text), (after, "Done."))]


def write(name: str, rows: list[dict]) -> None:
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    logger.remove()
    random = Random(0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write("taught", [turn for _ in range(CONVERSATIONS) for turn in turns(random.choice([*TASKS]), random)])
    rows = [{"domain": "mock", "task": name, "split": "base"} for name in TASKS]
    write("rows", [{"prompt": f"{row['task']}, {n}", **row} for n in range(100) for row in rows])
    write("held_out", [{"prompt": f"{row['task']}, held out {n}", **row} for n in range(4) for row in rows])

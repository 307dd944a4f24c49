"""A conversation of tau2's retail domain: the policy is the clerk, a model at another endpoint is the customer.

`agent.py rows SPLIT` writes the tasks as rows. A run starts `agent.py` once per sample, with a row on standard input.
The program needs the package tau2, in a separate environment (Python 3.12).
"""

import json
import os
import sys
import urllib.request

REWARD_KEY = os.read(int(os.environ["AREAL_REWARD_FD"]), 99).decode() if "AREAL_REWARD_FD" in os.environ else ""
DOMAIN = "retail"


def write_rows(split: str) -> None:
    from tau2.runner import get_tasks

    for task in get_tasks(DOMAIN, task_split_name=split):
        print(json.dumps({"prompt": f"{DOMAIN} task {task.id}", "task": task.id, "split": split}))


def play(row: dict) -> float:
    """Return the task's reward: 1 if the database and the clerk's statements agree with the task, else 0."""
    from tau2 import TextRunConfig
    from tau2.runner import build_text_orchestrator, get_tasks, run_simulation

    config = TextRunConfig(
        domain=DOMAIN,
        llm_agent="openai/policy",
        llm_args_agent={"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
        llm_user=f"openai/{os.environ['TAU2_USER_MODEL']}",
        llm_args_user={
            "api_base": os.environ["TAU2_USER_URL"],
            "api_key": os.environ.get("TAU2_USER_KEY", "none"),
            "temperature": 0.0,
        },
        max_steps=60,
    )
    (task,) = get_tasks(DOMAIN, task_split_name=row["split"], task_ids=[row["task"]])
    return run_simulation(build_text_orchestrator(config, task)).reward_info.reward


def post(reward: float) -> None:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"reward": reward, "key": REWARD_KEY}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/reward", body, headers), timeout=60)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        write_rows(sys.argv[2])
    else:
        post(play(json.loads(sys.stdin.readline())))

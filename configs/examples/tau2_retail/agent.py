"""A conversation of a domain of tau2: the policy is the clerk, a model at another endpoint is customer and judge.

`agent.py rows DOMAIN SPLIT` writes the tasks as rows. A run starts `agent.py` once per sample, with a row on standard
input. The program needs the package tau2, in a separate environment (Python 3.12).
"""

import json
import os
import sys
import urllib.request

# Removed from the environment: tau2 has statements judged by gpt-4.1 at OPENAI_BASE_URL, which is the policy here.
POLICY = {"api_base": os.environ.pop("OPENAI_BASE_URL", ""), "api_key": os.environ.pop("OPENAI_API_KEY", "")}
REWARD_KEY = os.read(int(os.environ["AREAL_REWARD_FD"]), 99).decode() if "AREAL_REWARD_FD" in os.environ else ""
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else each sample fetches a list of prices


def write_rows(domain: str, split: str) -> None:
    from tau2.runner import get_tasks

    for task in get_tasks(domain, task_split_name=split):
        print(json.dumps({"prompt": f"{domain} task {task.id}", "domain": domain, "task": task.id, "split": split}))


def play(row: dict, policy: dict, **changes) -> float:
    """Return the task's reward: 1 if the database and the clerk's statements agree with the task, else 0."""
    from tau2 import TextRunConfig
    from tau2.evaluator import evaluator_nl_assertions as statements
    from tau2.runner import build_text_orchestrator, get_tasks, run_simulation

    model = f"openai/{os.environ.get('TAU2_USER_MODEL')}"
    place = {"api_base": os.environ.get("TAU2_USER_URL"), "api_key": os.environ.get("TAU2_USER_KEY", "none")}
    arguments = {**place, "temperature": 0.0}
    statements.DEFAULT_LLM_NL_ASSERTIONS, statements.DEFAULT_LLM_NL_ASSERTIONS_ARGS = model, arguments
    config = TextRunConfig(
        domain=row["domain"],
        llm_agent="openai/policy",
        llm_args_agent=policy,
        llm_user=model,
        llm_args_user=arguments,
        max_steps=60,
        seed=None,  # the endpoint refuses seeds: samples of a task have to differ
        **changes,
    )
    (task,) = get_tasks(row["domain"], task_split_name=row["split"], task_ids=[row["task"]])
    conversation = build_text_orchestrator(config, task)
    try:
        return run_simulation(conversation).reward_info.reward
    except ValueError:  # tau2 refuses an empty turn, such as the clerk's after its last token
        if conversation.done or conversation.to_role != "agent":
            raise
        return 0.0


def post(reward: float) -> None:
    headers = {"Authorization": f"Bearer {POLICY['api_key']}", "Content-Type": "application/json"}
    body = json.dumps({"reward": reward, "key": REWARD_KEY}).encode()
    urllib.request.urlopen(urllib.request.Request(POLICY["api_base"] + "/reward", body, headers), timeout=60)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        write_rows(*sys.argv[2:4])
    else:
        post(play(json.loads(sys.stdin.readline()), POLICY))

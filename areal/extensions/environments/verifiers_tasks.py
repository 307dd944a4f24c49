"""Loads environments of the verifiers library (0.4), and rows of their task sets. verifiers_agent.py does the tasks.

The library is not a dependency of this project: users install it together with the task sets that they need.
"""

import functools
import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from areal.base.errors import UserError, explain
from areal.config.data_section import SourceConfig
from areal.data.prompt_sources import Draw, Table, make_row
from areal.data.rows import Row
from areal.data.sources import table, with_first_row

# The default program of an agent chats and calls tools. A program without code of the policy needs no container.
CHAT, HERE = {"id": "null"}, {"type": "subprocess"}


def load_environment(name: str, options: str) -> Any:
    """Return the environment of the task set `name`. options: JSON with the keys of the library's `env`: `taskset`,
    `id`, and a mapping for each agent. Agents chat on this machine unless configured otherwise. Raises UserError."""
    what = f"data.source 'verifiers:{name}'"
    with explain(ImportError, f"{what} needs the verifiers library ({{why}}): pip install 'verifiers==0.4.0'."):
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        agent_config_fields = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields
    # Loading runs the task set's own code, which may raise anything.
    with explain(Exception, f"{what} does not load ({{why}}): install it, or correct data.options."):
        chosen = json.loads(options)
        chosen["taskset"] = {"id": name, **chosen.get("taskset", {})}
        kind = loaders.env_config_type(name, chosen.get("id", ""))
        declared = {role: field.default for role, field in kind.model_fields.items()}
        for role in agent_config_fields(declared.items()):
            program = {} if declared[role].harness else {"harness": CHAT}
            chosen[role] = {"runtime": HERE, **program, **chosen.get(role, {})}
        loaded = loaders.load_environment(loaders.resolve_env_config(chosen))
        agents = agent_config_fields(loaded.config)
        running = [role for role, agent in agents.items() if loaders.harness_class(agent.harness.id).EXECUTES_CODE]
    for role in running:
        if "runtime" not in json.loads(options).get(role, {}):
            raise UserError(
                f"{what}: the program of {role} runs commands of the policy: say where by data.options.{role}.runtime, "
                f"such as {{type: docker}}, or {{type: subprocess}} if this machine may be changed by them."
            )
    return loaded


class Tasks:
    """The tasks of a task set, by number. An endless task set is read as far as needed."""

    def __init__(self, name: str, options: str) -> None:
        """Load the task set. Raises UserError."""
        taskset = load_environment(name, options).taskset
        self.bounded: bool = taskset.bounded
        self._read: list[Any] = [*taskset] if self.bounded else []
        self._coming: Iterator[Any] = iter(()) if self.bounded else iter(taskset)

    def __len__(self) -> int:
        return len(self._read)

    def __getitem__(self, number: int) -> Any:
        """Return a task. Raises IndexError if there are fewer tasks."""
        while number >= len(self._read):
            try:
                self._read.append(next(self._coming))
            except StopIteration:
                raise IndexError(number) from None
        return self._read[number]


tasks = functools.cache(Tasks)


def open_source(config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str) -> Table | Draw:
    """Open the source `verifiers:NAME`. A row has the ids of its task, and the fields that `solve` needs."""
    encoded = json.dumps(dict(options))
    of_set = tasks(name, encoded)

    def fields(number: int) -> dict[str, Any]:
        task = of_set[number]
        ids = {"task": number, "task_id": task.data.id, "task_name": task.data.name, "task_key": task.key}
        shared = {"answer": None, "environment": name, "environment_options": encoded}
        return {"prompt": task.data.prompt_text, **ids, **shared}

    if of_set.bounded:
        from datasets import Dataset  # takes seconds

        return table(config, Dataset.from_list([fields(number) for number in range(len(of_set))]), what)
    config = config.model_copy(update={"prompt_key": "prompt", "answer_key": "answer"})

    def draw(side: str, number: int, attempt: int) -> Row:
        return make_row(fields(2 * (number + attempt) + (side == "held_out")), config, f"{what}, row {number},")

    return with_first_row(draw, (Exception,), what)

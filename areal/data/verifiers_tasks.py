"""Loads environments of the verifiers library (0.1) and task sets of its 0.4, and their rows.
areal.workflows.verifiers_policy plays the environments, areal.workflows.verifiers_agent the tasks.

The library is not a dependency of this project: users install it together with the environments that they need.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import signal
import types
from collections.abc import Mapping
from typing import Any

from areal.config import UserError, explain


@functools.cache
def load(name: str, options: str) -> Any:
    """Return the environment `name`, of options in JSON; the same options give the same object. Raises UserError."""
    what = _what(name)
    with explain(ImportError, f"{what} needs the verifiers library ({{why}}): pip install 'verifiers==0.1.14'."):
        library = importlib.import_module("verifiers")
        module = importlib.import_module("verifiers.envs.environment")
    # Only the actor handles signals. An environment would install its own handler for SIGTERM, and could then be made
    # in the main thread only.
    vars(module)["signal"] = types.SimpleNamespace(**vars(signal) | {"signal": lambda *_: None})
    # Loading runs the environment's own code, which may raise anything.
    with explain(Exception, f"{what} does not load ({{why}}): install it, or correct data.options."):
        environment = library.load_environment(name, **json.loads(options))
    if environment.requires_group_rollouts:
        raise UserError(f"{what} scores whole groups, which is not supported here: choose another one.")
    return environment


@functools.cache
def has_tasks() -> bool:
    """True if the installed library has task sets, as from 0.4 on, and no environments of 0.1."""
    installed = importlib.util.find_spec("verifiers") is not None
    return installed and importlib.util.find_spec("verifiers.envs") is None


@functools.cache
def tasks(name: str, options: str) -> list[Any]:
    """Return the tasks of the task set `name` (0.4), which `taskset` in the options, in JSON, configures. Raises
    UserError."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    # Loading runs the task set's own code, which may raise anything.
    with explain(Exception, f"{_what(name)} does not load ({{why}}): install it, or correct data.options."):
        chosen = loaders.taskset_config_type(name).model_validate(
            {"id": name, **json.loads(options).get("taskset", {})}
        )
        taskset = loaders.load_taskset(chosen)
        task_list = list(taskset) if taskset.bounded else None
    if task_list is None or taskset.toolsets(taskset.config):
        raise UserError(f"{_what(name)} has no end or shares tools between tasks, which is not supported here.")
    return task_list


def _what(name: str) -> str:
    return f"data.source 'verifiers:{name}'"


def rows(name: str, options: Mapping[str, Any], side: str) -> Any:
    """Return the environment's data set (`side`: train or eval), or the task set as one, whatever the side. Each row
    has what `play` needs. Raises UserError."""
    encoded = json.dumps(dict(options))
    if has_tasks():
        from datasets import Dataset  # takes seconds

        dataset = Dataset.from_list(
            [{"prompt": task.data.prompt_text, "task": i} for i, task in enumerate(tasks(name, encoded))]
        )
    else:
        world = load(name, encoded)
        dataset = world.get_eval_dataset() if side == "eval" else world.get_dataset()
    columns: dict[str, str | None] = {"environment": name, "environment_options": encoded}
    if "answer" not in dataset.column_names:
        columns["answer"] = None
    for column, value in columns.items():
        dataset = dataset.add_column(column, [value] * len(dataset))
    return dataset

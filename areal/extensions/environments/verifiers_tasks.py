"""Loads task sets of the verifiers library (0.4), and their rows. verifiers_agent.py does the tasks.

The library is not a dependency of this project: users install it together with the task sets that they need.
"""

import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from areal.base.errors import UserError, explain
from areal.config.data_section import SourceConfig
from areal.data.sources import Table, table


@functools.cache
def tasks(name: str, options: str) -> list[Any]:
    """The tasks of the task set `name`, configured by `taskset` in the options (JSON). Raises UserError."""
    what = f"data.source 'verifiers:{name}'"
    with explain(ImportError, f"{what} needs the verifiers library ({{why}}): pip install 'verifiers==0.4.0'."):
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
    # Loading runs the task set's own code, which may raise anything.
    with explain(Exception, f"{what} does not load ({{why}}): install it, or correct data.options."):
        chosen = loaders.taskset_config_type(name).model_validate(
            {"id": name, **json.loads(options).get("taskset", {})}
        )
        taskset = loaders.load_taskset(chosen)
        task_list = list(taskset) if taskset.bounded else None
    if task_list is None or taskset.toolsets(taskset.config):
        raise UserError(f"{what} has no end or shares tools between tasks, which is not supported here.")
    return task_list


def rows(name: str, options: Mapping[str, Any]) -> Any:
    """Return the task set as a data set. Each row has what `solve` needs. Raises UserError."""
    encoded = json.dumps(dict(options))
    task_list = tasks(name, encoded)
    from datasets import Dataset  # takes seconds

    shared = {"answer": None, "environment": name, "environment_options": encoded}
    return Dataset.from_list(
        [{"prompt": task.data.prompt_text, "task": i} | shared for i, task in enumerate(task_list)]
    )


def open_source(config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str) -> Table:
    """The source `verifiers:NAME`."""
    return table(config, rows(name, options), what)

"""The settings of a call of `train` or `start`: a configuration, and functions that stay in this process."""

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from actors.api import objective
from actors.api import python_rows as rows
from actors.api.function_pool import FunctionPool
from areal.base import extensions
from areal.base.errors import UserError
from areal.config import Config, overridden, validated
from areal.config.reading import CONFIGS, merged, read_values, write_yaml
from areal.config.role_sections import EXTERNAL
from areal.data.sources import open_source
from areal.rewards.first_call import check_calls
from areal.rewards.functions import RewardFunction
from areal.rewards.lookup import of_object
from areal.storage.claim import check_room, claim
from areal.storage.disk import replace
from areal.workflows.named_workflows import bound_workflow

QUICKSTART = CONFIGS / "quickstart.yaml"
# The keys of a run without a configuration: required keys, and keys with a better value for a first try.
DEFAULTS: dict[str, Any] = {
    "name": "notebook",
    "steps": 100,
    "batch_size": 8,
    "group_size": 8,
    "max_staleness": 2,
    "data": {},
    "sampling": {"max_new_tokens": 256},
    "trainer": {"lr": 1e-5, "advantage_mean": "group", "advantage_std": "group"},
}
FILE = "start.yaml"
# Keys of `data` that belong to the rows of one source.
OF_SOURCE = ("options", "split", "eval_source", "eval_size", "size", "sources")

Workflow = Callable[..., Awaitable[Any]]
RewardLike = Any
"""A function, an object with a method `score`, a class of such objects, a name; or a list, or a dict with weights."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`file`: the configuration, for run.py. `rewards`, `workflow`: the functions that stay in this process."""

    config: Config
    file: Path
    rewards: Mapping[str, RewardFunction]
    workflow: Workflow | None


def settings_of(
    config: Config | Mapping[str, Any] | str | Path | None,
    data: Any,
    reward: RewardLike | None,
    workflow: Workflow | str | None,
    keys: Mapping[str, Any],
) -> Settings:
    """Return the settings of a run, after making the run folder and its files. Raises UserError."""
    weights, functions = named_rewards(reward)
    chosen: dict[str, Any] = {}
    if weights:
        groups = [name for name, kind in functions.items() if kind.groups]
        chosen = {"reward.functions": weights, "reward.external": [*functions], "reward.groups": groups}
    function = None if isinstance(workflow, str) else workflow
    if workflow is not None:
        chosen["rollout_manager.workflow"] = workflow if function is None else EXTERNAL
    for key, value in keys.items():
        if value is not None or key not in ("model", "steps"):
            chosen[key] = str(value) if isinstance(value, Path) else value
    _check_given_once(chosen)
    values = _values(config, chosen)
    source_of_objective = objective.take_source(chosen)
    own_rows = not isinstance(data, str | Path | None)
    if own_rows and config is None and workflow is None and not any("reward" in key for key in chosen):
        raise UserError("Rows of your own need a reward: reward=FUNCTION, or the name of one (areal docs rewards).")
    if data is not None:
        values = _with_source(values, rows.FILE if own_rows else str(data))
    complete = _configured(values, chosen)
    if function is not None:
        bound_workflow(name_of(function, "workflow"), function, complete.rollout_manager.workflow_options)
    folder = complete.folder
    with tempfile.TemporaryDirectory() as place:
        if own_rows:
            file, has_answers = rows.write_rows(data, Path(place))
            complete = _configured(_with_source(values, str(file), has_answers), chosen)
            rows.check(complete, file)
        if functions:
            row = open_source(complete.data, complete.seed).row(0)
            check_calls(FunctionPool(functions, complete.reward), {n: f.groups for n, f in functions.items()}, row)
        check_room(folder, resume=False)
        os.close(claim(folder))  # an earlier run of the name is moved
        if own_rows:
            shutil.move(file, folder / rows.FILE)
            complete = _configured(_with_source(values, str((folder / rows.FILE).absolute()), has_answers), chosen)
    if source_of_objective:
        complete = objective.write(complete, source_of_objective)
    replace(folder / FILE, write_yaml(complete.model_dump(mode="json", exclude_unset=True)), mode=0o600)
    return Settings(complete, (folder / FILE).absolute(), functions, function)


def _check_given_once(settings: Mapping[str, Any]) -> None:
    """Raises UserError if a key with dots is also in a section that is chosen as a dict."""
    for key in (key for key in settings if "." in key):
        *sections, last = key.split(".")
        value: Any = settings
        for section in sections:
            value = value.get(section) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and last in value:
            raise UserError(f"The call has {key!r} twice, also in {sections[0]}={{...}}: leave one of them out.")


def _configured(values: Mapping[str, Any], chosen: Mapping[str, Any]) -> Config:
    """Return the configuration of `values`, overridden by the chosen keys, which may have dots. Raises UserError."""
    dotted = {key: value for key, value in chosen.items() if "." in key}
    plain = {key: value for key, value in chosen.items() if "." not in key}
    config: Config = validated(overridden(merged(dict(values), plain), settings=dotted), "the call")
    return config


def named_rewards(reward: RewardLike | None) -> tuple[dict[str, float], dict[str, RewardFunction]]:
    """Return the weights of rewards by name, and the functions of this process by name. Raises UserError."""
    if reward is None:
        return {}, {}
    is_single = isinstance(reward, str) or not isinstance(reward, Iterable)
    pairs = (
        reward.items()
        if isinstance(reward, Mapping)
        else [(entry, 1.0) for entry in ([reward] if is_single else reward)]
    )
    weights: dict[str, float] = {}
    functions = {}
    for entry, weight in pairs:
        name = name_of(entry)
        while not isinstance(entry, str) and (name in weights or extensions.entry("reward", name)):
            name += "_"
        if not isinstance(weight, Real):
            raise UserError(f"The weight of reward {name!r} is {weight!r:.60}: write {{reward: number}}.")
        weights[name] = float(weight)
        if not isinstance(entry, str):
            functions[name] = of_object(name, entry)
    return weights, functions


def name_of(value: Any, kind: str = "reward") -> str:
    """Return a name, or the name of a function or of an object's class; `kind` for a lambda."""
    name = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
    return kind if name == "<lambda>" else str(name)


def _values(config: Config | Mapping[str, Any] | str | Path | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    match config:
        case None:
            return read_values(QUICKSTART) if chosen.get("model") == "quickstart" else DEFAULTS
        case Config():
            return config.model_dump(mode="json", exclude_unset=True)
        case Mapping():
            return dict(config)
        case "quickstart":
            raise UserError('config is a YAML file or its keys; the quickstart is a model: model="quickstart".')
        case str() | Path():
            return read_values(Path(config))
    raise UserError(f"config is of type {type(config).__name__}: give a Config, its keys, or the name of a YAML file.")


def _with_source(values: Mapping[str, Any], source: str, has_answers: bool = True) -> dict[str, Any]:
    """Return the values with another source of rows, without settings for the rows of the source before."""
    section = {key: value for key, value in values.get("data", {}).items() if key not in OF_SOURCE}
    if not has_answers:
        section.setdefault("answer_key", None)
    return {**values, "data": {**section, "source": source}}

"""Runs from Python: `train`, `start` and `join` return a `LiveRun`."""

import asyncio
import atexit
import contextlib
import functools
import html
import inspect
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from actors.api.call_settings import RewardLike, Settings, Workflow, name_of, settings_of
from actors.api.function_pool import FunctionPool
from actors.api.local_actors import LocalActors
from actors.api.run_process import LOOK_SECONDS, RunFailed, RunProcess, launch
from actors.reward import Reward
from actors.rollout_manager.rollout_manager import RolloutManager
from actors.runtime.actor import Actor
from actors.runtime.bound_addresses import locate
from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config import Config
from areal.rewards.functions import RewardFunction
from areal.rewards.lookup import check_groups, of_object
from areal.storage.claim import claimed_address
from areal.storage.record import Record
from areal.storage.records import new_steps
from areal.storage.run_folder import config_of_run, last_checkpoint, read_summary
from areal.workflows.named_workflows import bound_workflow
from protocols.membership_messages import AddReward, AskStatus

P = ParamSpec("P")
T = TypeVar("T")


def _named(function: Callable[P, T]) -> Callable[P, T]:
    """Have a call with wrong arguments raise UserError."""

    @functools.wraps(function)
    def call(*values: P.args, **keys: P.kwargs) -> T:
        signature = inspect.signature(function)
        names = ", ".join(signature.parameters)
        with explain(TypeError, f"areal.{function.__name__}: {{why}}: write NAME=VALUE, of {names}."):
            signature.bind(*values, **keys)
        try:
            return function(*values, **keys)
        except UserError as error:  # the user's own lines are enough
            raise error.with_traceback(None) from None

    return call


@_named
def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | None = None,
    data: Any = None,
    reward: RewardLike | None = None,
    workflow: Workflow | str | None = None,
    steps: int | None = None,
    **keys: Any,
) -> "LiveRun":
    """Start a run as `start` does, print the progress, and return the run after its end. An interrupt stops the run,
    and so does any end of this process; a run of `start` continues without this process. Raises UserError, and
    RunFailed if the run fails."""
    settings = settings_of(config, data, reward, workflow, {"model": model, "steps": steps, **keys})
    with _start(settings, show=True) as run:
        run.wait()
    return run


@_named
def start(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | None = None,
    data: Any = None,
    reward: RewardLike | None = None,
    workflow: Workflow | str | None = None,
    steps: int | None = None,
    **keys: Any,
) -> "LiveRun":
    """Start a run on this machine, in processes of its own.

    config: a YAML file, its keys, or a Config; by default some keys that suit a first try. data: rows (dicts, a
    datasets.Dataset, a DataFrame) or the name of a source. reward: a function (prompt, completion, row), an object with
    such a method `score`, the name of a reward, or several as a list or as a dict with weights. workflow: a coroutine
    function (session, row), or the name of a workflow. Functions run in this process. keys: further keys of the
    configuration, such as batch_size=8 or trainer={"lr": 1e-5}. Raises UserError.
    """
    return _start(settings_of(config, data, reward, workflow, {"model": model, "steps": steps, **keys}), show=False)


def _start(settings: Settings, show: bool) -> "LiveRun":
    run = LiveRun(settings.config.folder, settings.config, launch(settings, outlives=not show), show)
    try:
        run._find_master(LOOK_SECONDS)
        run._serve(settings.rewards)
        if settings.workflow is not None:
            run.serve_workflow(settings.workflow)
    except BaseException:
        run._stop()
        if not (run.folder / "config.yaml").exists():  # the start was refused: no run has begun
            shutil.rmtree(run.folder)
            with contextlib.suppress(OSError):  # the folder has other runs
                run.folder.parent.rmdir()
        raise
    return run


@_named
def join(folder: str | Path, patience: float = 10.0) -> "LiveRun":
    """Return the run in a folder of this machine, in progress or over. patience: seconds until it begins. Raises
    UserError."""
    folder = Path(folder)
    config = config_of_run(folder)
    run = LiveRun(folder, config.model_copy(update={"run_dir": folder.parent, "name": folder.name}))
    if read_summary(folder) is None:
        run._find_master(patience)
    return run


class LiveRun:
    """A run in `folder`. The record can be read at any time, also after the run's end. process: the run's, if this
    process has started the run. show: whether the run's console is printed here while this process waits."""

    def __init__(
        self, folder: Path, config: Config, process: subprocess.Popen[bytes] | None = None, show: bool = False
    ) -> None:
        self.folder = folder
        self.config = config
        self._process = RunProcess(folder, config, process, show)
        self._new_steps = new_steps(folder)
        self._version = 0
        self._member: LocalActors | None = None
        self._functions: dict[str, RewardFunction] = {}

    def __repr__(self) -> str:
        return f"<areal run in {self.folder}, step {self.version} of {self.config.steps}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Leave the run. A run that this process has started is stopped."""
        if self._process.is_own:
            self._stop()
        self.leave()

    @property
    def version(self) -> int:
        """The number of trained steps."""
        for record in self._new_steps():
            self._version = record["step"]
        return self._version

    @property
    def metrics(self) -> Any:
        """The numbers of each step (areal docs observe): a pandas DataFrame, or a list of dicts without pandas."""
        return _table(Record(self.folder).metrics.records)

    @property
    def rollouts(self) -> "RolloutTable":
        return RolloutTable(Record(self.folder))

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, a model folder; None if there is none."""
        return last_checkpoint(self.folder)

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run has ended; None if it has not."""
        return read_summary(self.folder)

    @property
    def status(self) -> dict[str, Any]:
        """The status of the run, from the master. Raises UserError."""
        values: dict[str, Any] = self._membership.ask(AskStatus()).values
        return values

    def report(self) -> Path:
        """Write report.html, with the curves and sample completions, and return its path. Raises UserError."""
        from areal.extensions.desk.report import write_report

        return write_report(self.folder)

    def figure(self) -> "NotebookPage":
        """The report as it would be now, in the output of a notebook."""
        from areal.extensions.desk.report import report_of

        return NotebookPage(report_of(self.folder))

    async def step(self, number: int) -> None:
        """Wait until `number` steps are trained. Raises RunFailed if the run ends before."""
        while not self._has_trained(number):  # noqa: ASYNC110 - another process trains
            await asyncio.sleep(LOOK_SECONDS)

    def wait(self, step: int | None = None) -> None:
        """Wait until `step` steps are trained; None: until the run has ended. Raises RunFailed if the run ends before,
        or has not reached its end."""

        def is_over() -> bool:
            return self._has_ended() if step is None else self._has_trained(step)

        def status(patience: float) -> Any:
            return self._member and self._member.ask(AskStatus(), patience).values

        self._process.wait_until(is_over, status)

    def stop(self) -> Any:
        """Stop the run, which saves a checkpoint and can be resumed (`--resume`), and wait until it has ended:
        `await run.stop()` in coroutines and notebooks. Raises UserError if the run is in progress elsewhere."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._stop()
        return loop.run_in_executor(None, self._stop)

    def _stop(self) -> None:
        if not self._process.ended:
            self._process.stop()
            self.leave()

    def _has_trained(self, number: int) -> bool:
        ended = self._process.ended
        if self.version >= number:
            return True
        if ended:
            raise RunFailed(f"The run ended at step {self.version}: {self._process.reason}")
        return False

    def _has_ended(self) -> bool:
        ended = self._process.ended
        if ended and not (self.summary or {}).get("ok"):
            raise RunFailed(self._process.reason)
        return ended

    def serve_reward(self, reward: RewardLike, weight: float | None = None, name: str | None = None) -> None:
        """Have this process score for the run, until `leave`. An earlier reward with the name is replaced.

        name: the function's name by default. weight: the reward's, from the next prompt on; a reward that the run does
        not know needs a weight. Raises UserError.
        """
        name = name or name_of(reward)
        if weight is None and name not in {*self.config.rewards, *self.status["rewards"]}:
            raise UserError(f"The run has no reward {name!r}: give it a weight (0: it is only recorded), or its name.")
        self._serve({name: of_object(name, reward)})
        if weight is not None:
            self._membership.ask(AddReward(name=name, weight=weight))

    def serve_workflow(self, workflow: Workflow) -> None:
        """Have this process sample for a run with the workflow `external`, until `leave`. Raises UserError."""
        section = self.config.rollout_manager
        if not section.external:
            raise UserError(f"The workflow of the run is {section.workflow!r}, not `external`: it runs elsewhere.")
        workflow = bound_workflow(name_of(workflow, "workflow"), workflow, section.workflow_options)
        self._join(RolloutManager, workflow=workflow)
        if self.config.evaluates:
            self._join(extensions.need("role", "evaluator", "data.eval_size").load(), workflow=workflow)

    def leave(self) -> None:
        """Stop scoring and sampling for the run. The run continues, and waits for another process to do both."""
        if self._member is not None:
            self._member.leave()
            self._functions.clear()

    def _serve(self, rewards: Mapping[str, RewardFunction]) -> None:
        check_groups(rewards, self.config.reward)
        new = tuple(name for name in rewards if name not in self._functions)
        self._functions.update(rewards)
        if new:
            self._join(Reward, functions=new, make_pool=lambda names, config: FunctionPool(self._functions, config))

    def _join(self, kind: type[Actor], **options: Any) -> None:
        """Have an actor join, and wait until the actor is ready, while the run still loads engines. Raises UserError
        and RunFailed."""
        ready = self._membership.add(kind, **options)
        while not ready.done():
            self._process.pause_while_it_runs()
        ready.result()

    def _find_master(self, patience: float) -> None:
        """Wait until the run has a master. patience: seconds, but no limit while a process started here prepares the
        run, which may download a model. Raises UserError and RunFailed."""
        while self._process.is_own and claimed_address(self.folder) is None:
            self._process.pause_while_it_runs()
        self._member = LocalActors(*locate(str(self.folder.absolute()), patience))
        atexit.register(self._member.leave)

    @property
    def _membership(self) -> LocalActors:
        if self._member is None or self._process.ended:
            raise UserError(f"The run in {self.folder} is over: {self._process.reason}")
        return self._member


class NotebookPage(str):
    """A page of HTML. A notebook shows the page in a frame without access to anything else."""

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 50rem; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self)}"></iframe>'


class RolloutTable:
    """The rollouts of a run: all kept samples (areal docs observe)."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def sql(self, query: str) -> Any:
        """Return the rows of a query on the table `rollouts`: "SELECT step, avg(reward) FROM rollouts GROUP BY step
        ORDER BY step". A DataFrame, or a list of dicts without pandas. Raises UserError."""
        from areal.extensions.desk.rollout_queries import Rollouts

        return _table(Rollouts(self._record).sql(query))


def _table(records: list[dict[str, Any]]) -> Any:
    if find_spec("pandas") is None:
        return records
    import pandas

    return pandas.DataFrame(records)

"""The run on the nodes of a Ray cluster: an actor of Ray for the run, and a task of Ray for each of its processes.

    RayRun (a detached actor)     a placement group with a bundle for each process, a task in each bundle, the end
      keep_process (a task)       starts the process as `run.py --role` does, and again when it dies

Ray gets all bundles or none. A bundle is on a single node, also for several ranks. Bundles are spread over nodes.

| lost | what follows |
|---|---|
| a process | its task starts the process again on the node |
| a node, or a worker of Ray | Ray places bundle and task anew once a node has room for them; leases expire |
| the node of the master | as before; the master resumes the run, and its new address is in the folder (*) |
| the node of the actor | all tasks end with the actor; the actor begins anew, and the run resumes |

(*) The tasks of all further processes read the address there, and start their processes again after a change.

Folder RUN_FOLDER/launch: `ray.json` has the processes, `address` and `rendezvous` say where master and trainer are now,
`stop` ends the run, `output/` has the processes' output, `ray.log` the actor's. Only texts and numbers pass Ray.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal.base.children import kill_group
from areal.base.errors import UserError
from areal.base.processes import tied
from areal.base.text import error_text, shown
from areal.extensions.launch.gang import free_port
from areal.extensions.launch.ray_plan import ADDRESS, LOG, PLAN, RENDEZVOUS, STOP
from areal.storage.disk import replace

LOOK_SECONDS, RESTART_SECONDS = 1.0, 5.0
# So many deaths in a row, each within STEADY_SECONDS of the process's start, end the run.
DEATHS, STEADY_SECONDS = 5, 60.0
# Seconds for a process to leave after its master has moved, and for all processes after the master's end.
LEAVE_SECONDS, END_SECONDS = 10.0, 20.0
# Seconds for which the actor of an unplaced run waits for a question about the reason.
ASKED_SECONDS = 60.0
MOVED = "moved"

Plan = dict[str, Any]


def plan_in(folder: Path) -> Plan:
    """Return the plan of a launch. Raises UserError if this node does not see the folder."""
    try:
        plan: Plan = json.loads((folder / PLAN).read_text())
    except OSError:
        node = ray.util.get_node_ip_address()
        raise UserError(f"The node {node} does not see {folder}: let all nodes share the folder of run_dir.") from None
    return plan


@ray.remote(max_retries=-1)
def keep_process(folder: str, number: int) -> tuple[int, str]:
    """Keep a process of the plan until its end. Returns its exit code, and a sentence if the run has to end."""
    try:
        return KeptProcess(Path(folder), number).keep()
    except UserError as error:
        return 2, str(error)


class KeptProcess:
    """The process `number` of a plan, on this node."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, plan = folder, plan_in(folder)
        self._process: dict[str, Any] = plan["processes"][number]
        self._project, self._settings = plan["project"], plan["environment"]
        self._host, self._port = ray.util.get_node_ip_address(), plan["port"]
        self._rendezvous_port = plan["rendezvous_port"]
        self._output = folder / "output" / f"{self._process['name']}.log"
        self._output.parent.mkdir(exist_ok=True)

    def keep(self) -> tuple[int, str]:
        self._announce()
        deaths = 0
        while True:
            began = time.monotonic()
            code = self._run()
            if code == MOVED:
                continue
            if code in self._process["final"]:
                return int(code), self._refusal(int(code))
            deaths = deaths + 1 if time.monotonic() - began < STEADY_SECONDS else 1
            if deaths == DEATHS:
                words = last_words(self._output)
                return int(code), f"{self._process['name']} died {DEATHS} times in a row. Its last words: {words}"
            time.sleep(RESTART_SECONDS)

    def _announce(self) -> None:
        """Write the master's address, or the trainer's first node, for all other processes."""
        if self._process["name"] == "master":
            replace(self._folder / ADDRESS, f"tcp://{self._host}:{free_port('', self._port)}")
        elif self._process["leads"]:
            replace(self._folder / RENDEZVOUS, f"{self._host}:{free_port('', self._rendezvous_port)}")

    def _places(self) -> dict[str, str] | None:
        """Return the present addresses for the variables in the command, or None before they are there."""
        command = " ".join(self._process["command"])
        names = [name for name in (ADDRESS, RENDEZVOUS) if f"${name}" in command]
        with suppress(FileNotFoundError):
            return {f"${name}": (self._folder / name).read_text() for name in names}
        return None

    def _run(self) -> int | str:
        """Start the process once. Returns its exit code, or MOVED."""
        while (places := self._places()) is None:
            time.sleep(LOOK_SECONDS)
        words = [sys.executable, *(_with_places(word, places) for word in self._process["command"])]
        with self._output.open("ab") as output:
            process = subprocess.Popen(
                tied(*words),
                cwd=self._project,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return self._watch(process, places)
        finally:
            kill_group(process)

    def _watch(self, process: subprocess.Popen[bytes], places: Mapping[str, str]) -> int | str:
        stopping = False
        while (code := process.poll()) is None:
            time.sleep(LOOK_SECONDS)
            if self._places() not in (None, places):
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LEAVE_SECONDS)
                return MOVED
            if self._process["name"] == "master" and not stopping and (self._folder / STOP).exists():
                stopping = True
                process.terminate()
        return code

    def _environment(self) -> dict[str, str]:
        """Return the environment of the process, which is no worker of Ray. Ray sets OMP_NUM_THREADS, but the run has
        settings for threads. The devices are the bundle's, for any CUDA_VISIBLE_DEVICES here."""
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k != "OMP_NUM_THREADS"}
        return {**inherited, **self._settings, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}

    def _refusal(self, code: int) -> str:
        """Return a sentence if the user has to change something, else ""."""
        return f"{self._process['name']} was refused: {last_words(self._output)}" if code == 2 else ""


class RayRun:
    """A launched run in a Ray cluster, with the launch in `folder`. The actor ends itself after the run."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = Path(folder), name
        self._actor = ray.get_runtime_context().current_actor
        self._answered = threading.Event()
        self._state, self._failure = "waits for resources", ""
        threading.Thread(target=self._drive, daemon=True).start()

    def state(self) -> tuple[str, str]:
        """Return the actor's state, and the reason of a failed start. After a failure, the question ends the actor."""
        if self._failure:
            self._answered.set()
        return self._state, self._failure

    def _drive(self) -> None:
        group = None
        try:
            plan = plan_in(self._folder)
            group = self._place(plan)
            self._keep(plan, group)
        except UserError as error:
            self._failure = str(error)
        except Exception as error:  # ray raises many types
            self._failure = error_text(error)
        if self._failure:
            self._say(self._failure)
        if group is not None:
            remove_placement_group(group)
        if self._failure:
            self._answered.wait(ASKED_SECONDS)
            time.sleep(LOOK_SECONDS)
        ray.kill(self._actor, no_restart=True)

    def _place(self, plan: Plan) -> Any:
        """Return the run's placement group with all its nodes. Raises UserError after `start_seconds`."""
        with suppress(ValueError):  # a group of this actor from before its move
            remove_placement_group(get_placement_group(self._name))
        bundles = [process["resources"] for process in plan["processes"]]
        group = placement_group(bundles, strategy="SPREAD", name=self._name)
        if not group.wait(plan["start_seconds"]):
            remove_placement_group(group)
            raise UserError(lacks(plan["processes"], ray.nodes(), plan["start_seconds"]))
        return group

    def _keep(self, plan: Plan, group: Any) -> None:
        """Start all processes, and wait for the end of the run."""
        tasks = {}
        for number, process in enumerate(plan["processes"]):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            resources = process["resources"]
            options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
            task = keep_process.options(name=process["name"], scheduling_strategy=strategy, **options)
            tasks[task.remote(str(self._folder), number)] = process["name"]
        self._state = f"runs as {len(tasks)} processes"
        self._say(self._state)
        waiting = list(tasks)
        while True:
            ended, waiting = ray.wait(waiting, num_returns=1)
            code, why = ray.get(ended[0])
            self._say(why or f"{tasks[ended[0]]} has ended with {code}")
            if tasks[ended[0]] == "master":
                break
            if why:
                (self._folder / STOP).touch()
        if waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=END_SECONDS)
        for task in waiting:
            ray.cancel(task, force=True)
        if waiting:
            ray.wait(waiting, num_returns=len(waiting), timeout=END_SECONDS)

    def _say(self, line: str) -> None:
        with suppress(OSError), (self._folder / LOG).open("a") as log:
            log.write(f"{time.strftime('%F %T')} {line}\n")


def lacks(processes: Sequence[Mapping[str, Any]], nodes: Iterable[Mapping[str, Any]], seconds: float) -> str:
    """Return the reason why the nodes of a cluster (ray.nodes) did not take all processes within `seconds`."""
    rooms = [dict(node["Resources"]) for node in nodes if node["Alive"]]
    had = "; ".join(_amounts(room) for room in rooms) or "no node is alive"
    homeless = [*_homeless(processes, rooms)]
    why = f"no node has room for {', '.join(homeless)}" if homeless else "other jobs hold what it needs"
    return (
        f"Ray has not placed the run within {seconds:g} s, since {why}. Its nodes have {had}: add nodes, or lower what "
        f"the run asks for."
    )


def _homeless(processes: Iterable[Mapping[str, Any]], rooms: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield the processes without room, with their needs."""
    for process in processes:
        needs = process["resources"]
        room = next((room for room in rooms if all(room.get(kind, 0) >= n for kind, n in needs.items())), None)
        if room is None:
            yield f"{process['name']} ({_amounts(needs)})"
        else:
            room.update({kind: room[kind] - n for kind, n in needs.items()})


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in resources) or "nothing"


def last_words(file: Path) -> str:
    """Return the last line in a process's output."""
    with file.open("rb") as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        lines = output.read().decode(errors="replace").split("\n")
    return shown(next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"))


def _with_places(word: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word

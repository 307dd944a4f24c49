"""The target `ray`: a run in the Ray cluster of this machine, or at RAY_ADDRESS.

A detached actor of Ray (`ray_run.py`) keeps the run, so all processes of this machine may end. `ray job submit --
python -m areal launch ray run.yaml` does the same from another machine.
"""

import importlib.util
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.extensions.launch.ray_plan import ADDRESS, LOG, PLAN, RENDEZVOUS, STOP, plan_of
from areal.extensions.launch.targets import Launch

NAMESPACE = "areal"
# Seconds for an answer of Ray, and for the start of an actor.
ANSWER_SECONDS, ACTOR_SECONDS = 20.0, 120.0
LOOK_SECONDS = 0.5


class RayCluster:
    def check(self, launch: Launch) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserError("Ray is not installed here: pip install the version of ray that the cluster has.")
        if len(launch.cluster.nodes) > 1:
            raise UserError("Ray chooses the nodes by their devices: give cluster.nodes one kind.")

    def render(self, launch: Launch) -> dict[str, str]:
        return {PLAN: json.dumps(plan_of(launch), indent=1) + "\n"}

    def submit(self, launch: Launch) -> str:
        ray, job = connected(), f"areal-{launch.config.name}"
        if _actor(job) is not None:
            raise UserError(f"The Ray cluster has a run {job} already: areal stop it, or take another name.")
        for name in (STOP, ADDRESS, RENDEZVOUS):
            (launch.folder / name).unlink(missing_ok=True)
        from areal.extensions.launch.ray_run import RayRun

        actor = start(RayRun, launch.folder, job, ray.get_runtime_context().get_node_id())
        try:
            _until_placed(actor, launch.cluster.start_seconds + ACTOR_SECONDS)
        except BaseException:
            ray.kill(actor, no_restart=True)
            raise
        return job

    def status(self, job: str) -> str:
        connected()
        if (actor := _actor(job)) is None:
            return ""
        try:
            return _answer(actor, ANSWER_SECONDS)[0]
        except UserError as error:
            # The actor ends itself with its run.
            return "" if _actor(job) is None else str(error)

    def logs(self, launch: Launch, job: str) -> str:
        return f"tail -F {launch.config.folder}/launch/{LOG} {launch.config.folder}/launch/output/*"

    def stop(self, job: str, folder: Path) -> None:
        ray = connected()
        (folder / STOP).touch()
        if not (folder / ADDRESS).exists() and (actor := _actor(job)) is not None:
            ray.kill(actor, no_restart=True)


def start(actor: type, folder: Path, job: str, node: str) -> Any:
    """Start the actor of a run, if possible on this node of Ray. The actor outlives this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node, soft=True)
    options = {"name": job, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    return ray.remote(actor).options(scheduling_strategy=place, **options).remote(str(folder), job)


def connected() -> Any:
    """Return the module ray, connected to the cluster. Raises UserError."""
    try:
        import ray
    except ImportError as error:
        raise UserError(f"Ray is not installed here ({error}): pip install the version that the cluster has.") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            _knock(address)
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # ray raises many types
            if "ersion mismatch" in str(error):
                why = " ".join(str(error).split())
                raise UserError(f"{why}: install the same versions of Ray and Python as the cluster has.") from None
            where = "on this machine" if address == "auto" else f"at {address} (RAY_ADDRESS)"
            raise UserError(
                f"No Ray cluster answers {where}: call areal launch on a node of the cluster, after `ray start`, or by "
                f"`ray job submit`."
            ) from None
    return ray


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()


def _actor(job: str) -> Any:
    """Return the actor of a run, or None."""
    import ray

    try:
        return ray.get_actor(job, namespace=NAMESPACE)
    except ValueError:
        return None


def _answer(actor: Any, seconds: float) -> tuple[str, str]:
    """Return the state of a run's actor, and the reason of a failed start. Raises UserError without an answer."""
    import ray

    try:
        state: tuple[str, str] = ray.get(actor.state.remote(), timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise UserError(f"the actor of the run did not answer within {seconds:g} s") from None
    except ray.exceptions.ActorUnavailableError:
        return "is placed anew", ""
    except ray.exceptions.RayError as error:
        words = " ".join(str(error).split())
        raise UserError(
            f"The nodes of the Ray cluster cannot run this program ({words[-300:]}): install the same version on all, "
            f"with what it needs."
        ) from None
    return state


def _until_placed(actor: Any, seconds: float) -> None:
    """Wait until the run has all its nodes. Raises UserError if the run does not get them."""
    until = time.monotonic() + seconds
    while True:
        state, failure = _answer(actor, max(1.0, until - time.monotonic()))
        if failure:
            raise UserError(failure)
        if state.startswith("runs"):
            return
        time.sleep(LOOK_SECONDS)

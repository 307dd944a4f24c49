"""A trainer ends with the weights it should: killed and started again, with those of one that was not, and so the one
of a fork; on two nodes, with those of one; and where training goes wrong, with nothing of that. Real trainer processes
with a real DeepSpeed, a real master and its journal, and the test in the place of the rollout manager."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.networks import keys_folder, network
from support.small_disks import flip_a_bit
from support.small_runs import read_jsonl, ten_steps

from actors.master.master import Master
from actors.runtime.actor import Ending
from actors.ways_back.fork import configuration_of_fork, fork
from areal.__main__ import main
from areal.config import Config
from areal.config.trainer_section import GuardConfig
from areal.samples.trajectory import Trajectory
from areal.storage.journal import Journal
from areal.storage.run_folder import RunFolder, checkpoint_of
from areal.storage.stored_groups import batches
from areal.training.training_engine import TrainingEngine
from protocols.bus import Bus
from protocols.membership_messages import AskStatus, Join
from protocols.messages import AskPermits, GroupAccepted, Permit, ScoredSample, StoreSamples

STEPS = 4
SECONDS = 240.0
SHARE = "rank_00000-of-00001.safetensors"


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path, free_port: int) -> Config:
    trainer = {"minibatches": 2, "lr": 1e-3, "checkpoint_every": 2, "warmup_steps": 6, "zero_stage": 3, "adam_eps": 0.1}
    return ten_steps(
        model=str(tiny_model),
        run_dir=tmp_path / "runs",
        steps=STEPS,
        max_staleness=1,
        trainer=trainer,
        guard={"logprob_gap": 100.0, "effective_sample_size": 0.0, "patience": 1},  # the log-probs are made up
        master={"address": f"tcp://127.0.0.1:{free_port}", "lease_seconds": 600},
    )


def samples_of(permit: Permit, poison: float = 0.0) -> Iterator[StoreSamples]:
    """Samples that depend on the permit alone, with mixed rewards; `poison` is added to their log-probs."""
    rng = np.random.default_rng([permit.prompt_index, permit.min_version])
    for place in range(2):
        tokens = rng.integers(1, 16, 10, dtype=np.int32)
        versions = np.where(np.arange(10) < 4, -1, permit.min_version).astype(np.int32)
        logprobs = np.where(versions < 0, 0, poison - rng.random(10)).astype(np.float32)
        frame = Trajectory(tokens, logprobs, versions, float(place), "stop").frame()
        sample = ScoredSample(place=place, frame=np.frombuffer(frame, np.uint8))
        yield StoreSamples(group=permit.group, prompt_index=permit.prompt_index, row="", samples=(sample,))


class Manager:
    """The test, as a member of the run."""

    def __init__(self, master: str) -> None:
        self.bus = Bus("rollout_manager/0#test", network())
        self.master = master
        # The master fences a member at whose address nobody listens.
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    async def ask(self, message):
        return await self.bus.peer(self.master).ask(message, 30.0)

    async def until_trained(self, version: int) -> None:
        async with asyncio.timeout(SECONDS):
            while (await self.status())["version"] < version:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.1)

    async def status(self) -> dict:
        return (await self.ask(AskStatus())).values

    async def trainer(self, not_this: str = "") -> str:
        """The address of a healthy trainer."""
        async with asyncio.timeout(SECONDS):
            while True:
                welcome = await self.ask(Join(role="rollout_manager", index=0, address=self._address))
                self.bus.identity.name = welcome.identity
                for member in welcome.snapshot.members:
                    if member.role == "trainer" and member.state == "healthy" and member.address != not_this:
                        return member.address
                await asyncio.sleep(0.1)

    async def feed(self, trainer: str, poison: float = 0.0) -> list[StoreSamples]:
        """One batch of groups. Returns their samples."""
        fed = []
        for permit in (await self.ask(AskPermits(count=2))).permits:
            for sample in samples_of(permit, poison):
                assert await self.bus.peer(trainer).ask(sample, 30.0) == GroupAccepted(accepted=True)
                fed.append(sample)
        return fed


def start_master(config: Config) -> asyncio.Task[Ending]:
    folder = RunFolder(config)
    journal = Journal.open(folder.path / "journal.db")
    return asyncio.create_task(
        Master(Bus(f"master/0#{config.name}", network()), config, journal=journal, folder=folder).run()
    )


def start_trainer(config: Config, run, rendezvous: int | None) -> list:
    """The process of a trainer, or where there is a port for their rendezvous, those of its two nodes."""
    arguments = ["--role", "trainer", "--master", config.master.address, "--keys", keys_folder()]
    if rendezvous is None:
        return [run(*arguments).process]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", f"127.0.0.1:{rendezvous}", "--"]
    return [run(*arguments, launcher=torchrun).process for _ in range(2)]


async def train(
    config: Config,
    run,
    name: str,
    kill_at: int | None = None,
    rendezvous: int | None = None,
    first: int = 0,
    fed: list[StoreSamples] | None = None,
) -> Path:
    """The checkpoint that a run ends with, which begins with version `first`; its trainer is killed after step
    `kill_at`, and then a bit flips in the last checkpoint. fed: the samples are added to it."""
    fed = [] if fed is None else fed
    config = config.model_copy(update={"name": name})
    master = start_master(config)
    manager = Manager(config.master.address)
    processes = start_trainer(config, run, rendezvous)
    trainer = await manager.trainer()
    for version in range(first, STEPS):
        fed += await manager.feed(trainer)
        await manager.until_trained(version + 1)
        if version + 1 == kill_at:
            async with asyncio.timeout(SECONDS):
                while not (saved := checkpoint_of(config.folder, 2)).exists():  # noqa: ASYNC110 - beside step 3
                    await asyncio.sleep(0.1)
            processes[0].kill()
            flip_a_bit(saved / "training" / SHARE)
            processes = start_trainer(config, run, rendezvous)
            trainer = await manager.trainer(not_this=trainer)
            assert (await manager.status())["lineage"] == 1
    await manager.bus.close()
    ending = await asyncio.wait_for(master, SECONDS)
    assert ending.ok
    assert [process.wait(60) for process in processes] == [0] * len(processes)
    return config.folder / "checkpoints" / f"step_{STEPS:06}" / "model.safetensors"


@pytest.mark.slow  # test_chaos.py replays a run whose trainer was killed, and another checkpoint damaged
async def test_a_trainer_that_is_killed_learns_from_the_samples_that_it_was_fed_what_a_replay_does_to_the_bit(
    config, run
):
    fed: list[StoreSamples] = []
    killed = (await train(config, run, "killed", kill_at=3, fed=fed)).parents[2]
    trained = [
        sample for _, groups in batches(killed / "rollouts") for group in groups for sample in group.trajectories
    ]
    inputs = [Trajectory.of_frame(sample.frame.data) for message in fed for sample in message.samples]
    assert len(trained) == len(inputs) == 2 * 2 * STEPS
    for first, second in zip(trained, inputs, strict=True):  # each once, in their order
        np.testing.assert_array_equal(first.tokens, second.tokens)
        np.testing.assert_array_equal(first.logprobs, second.logprobs)
        assert first.reward == second.reward
    # The last checkpoint then is that of step 2. It is damaged, so all steps since the model were redone.
    assert main(["replay", str(killed)]) == 0


@pytest.mark.slow  # what is redone is compared with a replay above
async def test_a_trainer_that_is_killed_and_that_of_a_fork_learn_the_same_to_the_bit_as_one_that_is_not(config, run):
    undisturbed = await train(config, run, "undisturbed")
    # So does a fork that is given the same samples, of which a replay begins with its checkpoint.
    forked = configuration_of_fork(undisturbed.parents[2], 2, [])
    forked.folder.mkdir()
    await asyncio.to_thread(fork, forked, undisturbed.parents[2], 2)
    again = await train(forked, run, forked.name, first=2)
    assert again.read_bytes() == undisturbed.read_bytes()
    assert [record["step"] for record in read_jsonl(forked.folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert main(["replay", str(forked.folder)]) == 0
    assert [record["step"] for record in read_jsonl(forked.folder / "replays/unchanged/metrics.jsonl")] == [3, 4]
    killed = await train(config, run, "killed", kill_at=3)
    assert killed.read_bytes() == undisturbed.read_bytes()
    saved, again = (load_file(checkpoint_of(end.parents[2], 2) / "training" / SHARE) for end in (undisturbed, killed))
    assert again.keys() == saved.keys()  # the facts in the headers of the files are in any order
    assert all(torch.equal(again[name], saved[name]) for name in saved)


@pytest.mark.slow  # the simulator has both: who leaves, and the verdict of the guard on a step that is redone
async def test_a_trainer_that_is_told_to_leave_saves_its_last_step_and_the_next_one_redoes_none(config, run):
    """The next one then meets a step that is not a number, which ends the run with the last sound checkpoint."""
    config = config.model_copy(update={"steps": 5})
    master = start_master(config)
    manager = Manager(config.master.address)
    arguments = "--role", "trainer", "--master", config.master.address, "--keys", keys_folder()
    leaving = run(*arguments)
    trainer = await manager.trainer()
    for version in range(3):
        await manager.feed(trainer)
        await manager.until_trained(version + 1)
    leaving.process.terminate()
    output = await asyncio.to_thread(leaving.wait, SECONDS)
    assert leaving.code == 0
    assert "told to leave by SIGTERM; the trainer has finished step 3 and saved its checkpoint; " in output

    going_on = run(*arguments)
    trainer = await manager.trainer(not_this=trainer)
    await manager.feed(trainer)
    await manager.until_trained(4)
    await manager.feed(trainer, poison=-1e38)  # the square of pi_prox / pi_behav is beyond every number
    await manager.bus.close()
    ending = await asyncio.wait_for(master, SECONDS)
    output = await asyncio.to_thread(going_on.wait, SECONDS)
    assert "restored" in output
    assert "redone=0" in output
    checkpoint = checkpoint_of(config.folder, 4)
    assert not ending.ok
    assert ending.reason.startswith("The guard stopped the run at step 5: effective_sample_size is nan, for this step")
    assert f"The last checkpoint is {checkpoint}: resume from it with --resume {config.folder}" in ending.reason
    assert going_on.code == 1 and "Traceback" not in output
    assert [step["step"] for step in read_jsonl(config.folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted((config.folder / "checkpoints").iterdir()) == [checkpoint_of(config.folder, n) for n in (2, 3, 4)]
    assert not list((config.folder / "weights").glob("*-v000005*"))
    TrainingEngine(Path(config.model), config.trainer, seed=0).storage.load(checkpoint)


@pytest.mark.slow
async def test_a_run_whose_engines_compute_its_first_weights_otherwise_ends_at_its_first_step(config, run):
    config = config.model_copy(update={"guard": GuardConfig(effective_sample_size=0.0, patience=3)})
    master = start_master(config)
    manager = Manager(config.master.address)
    started = run("--role", "trainer", "--master", config.master.address, "--keys", keys_folder())
    await manager.feed(await manager.trainer())
    await manager.bus.close()
    ending = await asyncio.wait_for(master, SECONDS)
    output = await asyncio.to_thread(started.wait, SECONDS)
    assert ending.reason.startswith("The guard stopped the run at step 1: log-probs of engine and trainer are ")
    assert "vLLM computes Qwen3ForCausalLM otherwise than the trainer here" in ending.reason
    assert started.code == 1 and "Traceback" not in output
    assert not read_jsonl(config.folder / "metrics.jsonl")
    assert not list((config.folder / "weights").glob("*-v000001*"))


@pytest.mark.slow
async def test_a_trainer_learns_the_same_on_two_nodes(config, run, another_free_port):
    first = load_file(await train(config, run, "one"))
    two = load_file(await train(config, run, "two", rendezvous=another_free_port))
    weights_before = load_file(Path(config.model, "model.safetensors"))
    assert first.keys() == two.keys()
    for name in first:
        torch.testing.assert_close(two[name], first[name], rtol=0, atol=1e-6)  # fp32, on weights that move by 1e-4
    assert any((first[name] - weights_before[name]).abs().max() > 1e-5 for name in first)


OBJECTIVE = """
import os
from areal.training.algorithms.objectives import objective_of

def fails(tokens, config):
    if len(tokens.logp) > 3 and os.environ.get("RANK", "1") == "1":
        raise ValueError(f"no loss of {len(tokens.logp)} tokens, at {id(tokens):#x}")
    return objective_of("ppo")(tokens, config)
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_step_that_fails_twice_in_the_same_way_ends_the_run_with_its_reason(
    config, run, tmp_path, another_free_port, nodes
):
    (tmp_path / "objective.py").write_text(OBJECTIVE)
    trainer = config.trainer.model_copy(update={"objective": f"{tmp_path}/objective.py:fails"})
    config = config.model_copy(update={"trainer": trainer})
    master = start_master(config)
    manager = Manager(config.master.address)
    rendezvous = another_free_port if nodes == 2 else None
    processes = start_trainer(config, run, rendezvous)
    await manager.feed(await manager.trainer())
    codes = [await asyncio.to_thread(process.wait, SECONDS) for process in processes]
    assert codes == ([4] if nodes == 1 else [1, 1])
    assert not master.done()
    start_trainer(config, run, rendezvous)
    ending = await asyncio.wait_for(master, SECONDS)
    await manager.bus.close()
    assert not ending.ok
    assert ending.reason.startswith(f"Step 1 failed twice alike: ValueError: no loss of {12 // nodes} tokens, at 0x")
    assert ending.reason.endswith("No checkpoint was saved before that.")

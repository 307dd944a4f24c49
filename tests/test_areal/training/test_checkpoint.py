"""Checkpoints of four ranks, written by all of them, with real DeepSpeed on a tiny model. More are in test_engine.

Run as a program, this file is a rank of the tests' trainers.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import areal  # noqa: F401  # before torch, as in a run: this file is a program too, and the same kernels have to multiply

# isort: split
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.small_runs import made_once
from support.tiny_training import (
    TEMPERATURE,
    assert_same_state,
    eager,
    make_batch,
    make_kind,
    make_model,
    run_worker,
    settings,
    weights_of,
)
from transformers import AutoModelForCausalLM

from areal.base.errors import UserError
from areal.storage.records import line_of
from areal.training import checkpoint, shards
from areal.training.division import Division
from areal.training.shards import Copied, share_out
from areal.training.training_engine import TrainingEngine

RANKS = 4
BATCHES = [make_batch(groups=2, seed=seed) for seed in range(3)]
CASES = {f"zero{stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)}
CASES |= {f"bf16-zero{stage}": {"zero_stage": stage, "dtype": "bfloat16"} for stage in (1, 3)}
CASES["parallel"] = {"zero_stage": 3, "sequence_parallel": 2}
CASES["offload"] = {"zero_stage": 3, "offload": "all", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose layers are alike and many, so that ranks can write as much of it."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "head_dim": 8, "tie_word_embeddings": True}
    return make_kind("Qwen3", tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module", params=[pytest.param("all cases", marks=pytest.mark.slow)])
def four_ranks(folder, tmp_path_factory):
    """What `save_and_load` wrote on four ranks, and the cases. Slow: four ranks take two cores a minute. Two ranks save
    and load in test_training_engine.py."""

    def make(out):
        run_worker(__file__, "save_and_load", folder, out, *CASES, ranks=RANKS)

    return made_once(tmp_path_factory, "four ranks", make), tuple(CASES)


def test_each_rank_writes_and_reads_a_quarter(four_ranks):
    out, cases = four_ranks
    for case in cases:
        counted = [json.loads((out / f"{case}-{rank}.json").read_text()) for rank in range(RANKS)]
        saved = sum(file.stat().st_size for file in (out / case).rglob("*.safetensors"))
        state = sum(file.stat().st_size for file in (out / case / "training").glob("*.safetensors"))
        for kind, complete in (("written", saved), ("read", state)):
            share = [rank[kind] for rank in counted]
            assert share == [pytest.approx(complete / RANKS, rel=0.1)] * RANKS, (case, kind)
        assert sum(rank["written"] for rank in counted) == saved


def test_a_checkpoint_of_four_ranks_loads_on_one_at_any_stage_and_in_transformers(folder, four_ranks, tmp_path):
    out, cases = four_ranks
    for case in cases:
        second = CASES[case] | {
            "zero_stage": (CASES[case]["zero_stage"] + 2) % 4,
            "sequence_parallel": 1,
            "offload": "none",
        }
        engine = TrainingEngine(folder, settings(**second), seed=1)
        engine.storage.load(out / case)
        assert_same_state(engine.storage.save(tmp_path / case), out / case)
        engine.close()
        assert [file.name for file in (tmp_path / case).glob("model*")] == ["model.safetensors"]
        assert len(list((out / case).glob("model-*-of-00004.safetensors"))) == RANKS
        right = weights_of(out / case)
        for read in (
            load_file(tmp_path / case / "model.safetensors"),
            eager(out / case, right["model.norm.weight"].dtype).state_dict(),
        ):
            assert [name for name in right if not torch.equal(read[name], right[name])] == []


@pytest.mark.slow
def test_two_ranks_at_another_stage_go_on_from_the_checkpoint_of_four(folder, four_ranks):
    out, cases = four_ranks
    run_worker(__file__, "go_on", folder, out, *cases, ranks=2)
    for case in cases:
        assert_same_state(out / f"{case}-on-two", out / case)
        straight, resumed = weights_of(out / f"{case}-straight"), weights_of(out / f"{case}-resumed")
        tolerance = 1e-2 if CASES[case].get("dtype") else 1e-5  # sums over ranks have another order
        for name in straight:
            torch.testing.assert_close(resumed[name], straight[name], rtol=tolerance, atol=tolerance)


def test_a_damaged_checkpoint_is_told_before_anything_is_changed(folder, four_ranks, tmp_path):
    saved = four_ranks[0] / four_ranks[1][0]
    engine = start(folder, {"zero_stage": 2})
    share, second = Path("training/rank_00002-of-00004.safetensors"), Path("training/rank_00001-of-00004.safetensors")

    def shares_lack_a_part(damaged):
        state = load_file(damaged / share)
        state = {name: tensor[:0] if name in checkpoint.KINDS else tensor for name, tensor in state.items()}
        safetensors.torch.save_file(state, damaged / share, {"parts": "[]"})

    def flip(file, place):
        content = bytearray(file.read_bytes())
        content[place] ^= 0x40
        file.write_bytes(content)

    for damage, message in {
        lambda damaged: flip(damaged / share, -40_000): f"{share.name} is .* does not have the checksum",
        lambda damaged: flip(damaged / "training" / "state.json", 10): "state.json",
        lambda damaged: (damaged / share).unlink(): share.name,
        lambda damaged: os.truncate(damaged / share, 10_000): share.name,
        lambda damaged: shutil.copy(damaged / second, damaged / share): "not stored as a whole",
        lambda damaged: safetensors.torch.save_file({}, damaged / share): share.name,
        shares_lack_a_part: "not stored as a whole",
        lambda damaged: (damaged / "training" / "state.json").write_text("{"): "state.json",
    }.items():
        damaged = shutil.copytree(saved, tmp_path / "damaged", dirs_exist_ok=True)
        damage(damaged)
        with pytest.raises(UserError, match=message) as error:
            engine.storage.load(damaged)
        assert "is damaged" in str(error.value) and "\n" not in str(error.value)
    facts = json.loads((saved / "training" / "state.json").read_text())
    del facts["crc"]
    (damaged / "training" / "state.json").write_text(line_of(facts | {"shares": 4, "run": "a"}))
    with pytest.raises(UserError, match="is of another run"):
        engine.storage.load(damaged, "b")
    unchanged = engine.storage.publish(tmp_path / "weights")
    engine.close()
    weights_before = weights_of(folder)
    assert all(torch.equal(tensor, weights_before[name]) for name, tensor in weights_of(unchanged).items())


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_to_go_on_from(tmp_path):
    model = make_model(tmp_path / "model")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, __file__, "die", model, tmp_path], env=environment, timeout=200, check=False
    )
    assert process.returncode == -signal.SIGKILL
    (remaining,) = tmp_path.glob(".second.*")
    assert list(remaining.rglob("rank_*")) and not (tmp_path / "second").exists()
    engine = start(model, {"zero_stage": 2}, seed=1)
    engine.storage.load(tmp_path / "first")
    train(engine, BATCHES[1:])
    engine.storage.save(tmp_path / "second")
    engine.close()
    assert not list(tmp_path.glob(".second*"))
    engine = start(model, {"zero_stage": 2})
    train(engine, BATCHES)
    assert_same_state(engine.storage.save(tmp_path / "straight"), tmp_path / "second")
    engine.close()


def test_ranks_write_about_as_much_and_layers_stay_together_with_what_their_files_need(tmp_path):
    folder = make_kind("Qwen3Moe", tmp_path, num_hidden_layers=6)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    rank_of = share_out({name: tensor.numel() for name, tensor in state.items()}, 3)
    stored, sizes = {}, [0, 0, 0]
    for rank in range(3):
        selected = {name: tensor for name, tensor in state.items() if rank_of[name] == rank}
        sizes[rank] = sum(tensor.numel() for tensor in selected.values())
        stored |= Copied(model, selected, Division(), writers=3, adapters=False).stored()
    right = weights_of(folder)
    assert stored.keys() == right.keys() != state.keys()
    assert [name for name in right if not torch.equal(stored[name], right[name])] == []
    assert max(sizes) < 1.1 * min(sizes)


def train(engine, batches):
    for batch in batches:
        engine.step(batch if engine.rank == 0 else None, version=3, temperature=TEMPERATURE)


def start(folder, changes, seed=0):
    return TrainingEngine(folder, settings(max_tokens_per_microbatch=40, **changes), seed=seed)


class Counter:
    """Counts the bytes that this rank writes into checkpoints and reads of training states."""

    def __init__(self):
        self.written = self.read = 0
        write, open_file, read = safetensors.torch.save_file, checkpoint.safe_open, checkpoint._StoredState._read

        def counted_write(tensors, file, metadata):
            write(tensors, file, metadata)
            self.written += Path(file).stat().st_size

        def counted_open(file, framework):
            with Path(file).open("rb") as opened:
                self.read += 8 + int.from_bytes(opened.read(8), "little")
            return open_file(file, framework)

        def counted_read(*arguments):
            tensor = read(*arguments)
            self.read += tensor.nbytes
            return tensor

        safetensors.torch.save_file = counted_write
        checkpoint.safe_open, checkpoint._StoredState._read = counted_open, counted_read


def save_and_load(folder, out, *cases):
    """A checkpoint that is written beside a step; then back to the checkpoint, and the step again."""
    counter = Counter()
    for case in cases:
        engine = start(folder, CASES[case])
        train(engine, BATCHES[:1])
        counter.written = counter.read = 0
        saving = engine.storage.begin_save(out / case)
        train(engine, BATCHES[1:])
        saving.result()
        written = counter.written
        engine.storage.publish(out / f"{case}-straight")
        engine.storage.load(out / case)
        (out / f"{case}-{engine.rank}.json").write_text(json.dumps({"written": written, "read": counter.read}))
        train(engine, BATCHES[1:])
        engine.storage.publish(out / f"{case}-again")
        straight, again = weights_of(out / f"{case}-straight"), weights_of(out / f"{case}-again")
        assert [name for name in straight if not torch.equal(straight[name], again[name])] == []
        if case == cases[0]:
            tell_what_one_rank_cannot_do(engine, out / case)
        engine.close()


def tell_what_one_rank_cannot_do(engine, saved):
    """The disk is full for one rank, then a share is missing: all ranks say so and go on."""
    limit_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit_before[1]))
    with pytest.raises(UserError, match=r"full cannot be written: .*File too large"):
        engine.storage.save(saved.parent / "full")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit_before)
    assert engine.rank or not list(saved.parent.glob("*full*"))
    if engine.rank == 0:
        (shutil.copytree(saved, saved.parent / "damaged") / "training" / "rank_00003-of-00004.safetensors").unlink()
    dist.barrier()
    with pytest.raises(UserError, match=r"damaged is damaged: rank_00003-of-00004\.safetensors is missing"):
        engine.storage.load(saved.parent / "damaged")
    engine.storage.save(saved.parent / "full")


def go_on(folder, out, *cases):
    for case in cases:
        changes = CASES[case] | {"zero_stage": (CASES[case]["zero_stage"] + 1) % 4, "offload": "none"}
        engine = start(folder, changes, seed=1)
        engine.storage.load(out / case)
        engine.storage.save(out / f"{case}-on-two")
        train(engine, BATCHES[1:])
        engine.storage.publish(out / f"{case}-resumed")
        engine.close()


def die(folder, out):
    """Be killed in the middle of writing a checkpoint, after a step beside it."""
    engine = start(folder, {"zero_stage": 2})
    train(engine, BATCHES[:1])
    engine.storage.save(out / "first")
    train(engine, BATCHES[1:2])
    trained = threading.Event()

    def be_killed(*_):
        trained.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    shards.write_weights = be_killed
    engine.storage.begin_save(out / "second")
    train(engine, BATCHES[2:])
    trained.set()
    signal.pause()


if __name__ == "__main__":
    work = {"save_and_load": save_and_load, "go_on": go_on, "die": die}[sys.argv[1]]
    work(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])

#!/usr/bin/env python3
"""The plan of proof of docs/gpu.md, done by itself on whatever GPUs there are: `make kit`.

    python tests/gpu/kit.py [--folder build/kit] [--only STAGE] [--minutes 40]

Each stage ends with a line of FOLDER/report.jsonl; FOLDER/logs has what its processes printed. A stage that was ok on
this machine is not made again; one that failed or had no time is. A stage that fails stops none of the others. Without
a GPU this is a rehearsal: all stages, with a small model in place of the paper's. Exit code 0: nothing failed and
nothing is left; 1: look at the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # an installed areal may be another one

import psutil  # noqa: E402
from accounts import check_accounts  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from areal.devices import visible_devices  # noqa: E402
from areal.extensions.recipes.recipe_check import write_figures  # noqa: E402
from areal.storage.record import Record  # noqa: E402
from areal.storage.records import read_records  # noqa: E402

REHEARSAL_PATIENCE = 5
"""How much longer a stage may take on a CPU."""
LINES = 12
"""Of its output that are kept of a process that failed."""
LOST_SECONDS = 60.0
LARGE_GIB = 60
"""Memory of a GPU on which 1.5B parameters train with Adam, beside an engine."""
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
}
"""Of DeepSeek-R1-Distill-Qwen-1.5B, from its config.json."""
SMALL_SHAPE = SHAPE | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
MIXTURE = SHAPE | {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
"""A mixture of experts with 1.5B parameters, 0.6B of them active; of no published model."""
SMALL_MIXTURE = SMALL_SHAPE | {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SHAPES = {"paper-1.5b": SHAPE, "mixture": MIXTURE, "small": SMALL_SHAPE, "small-mixture": SMALL_MIXTURE}
"""By the folder of the model."""
# Of runs. The others are the quickstart's.
SHORT = ("steps=8", "batch_size=8", "group_size=8", "max_staleness=2", "data.eval_size=32")
BF16 = ("trainer.dtype=bfloat16", "generator.dtype=bfloat16")
SMALL = (
    "steps=6",
    "batch_size=4",
    "group_size=4",
    "max_staleness=2",
    "data.eval_size=8",
    "sampling.max_new_tokens=100",
    "generator.kv_cache_gib=0.25",
    "generator.memory_share=0.1",
)
QUICKSTART = ("steps=60", "batch_size=16", "max_staleness=4", "data.eval_size=1024")
PAPER_RUN = ("steps=3", "sampling.max_new_tokens=1024", "trainer.max_tokens_per_microbatch=16384")
PAPER = ROOT / "configs" / "paper" / "table7.yaml"
SMALL_PAPER = (
    *SMALL,
    "trainer.max_tokens_per_microbatch=2048",
    "generator.max_concurrent_rollouts=16",
    "trainer.dtype=float32",
    "generator.dtype=float32",
)
RANKS, DIRECT = ("trainer.ranks=2", "trainer.zero_stage=2"), ("weights.transport=direct",)
ZERO_3 = ("trainer.ranks=2", "trainer.zero_stage=3")
GAP = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest `logprob_gap` of a step, nats."""


class StageFailed(Exception):
    """The message says how."""


@dataclass(frozen=True, slots=True)
class Stage:
    """do: returns what was measured, or raises StageFailed. seconds: its deadline on a GPU. gpus: how many it needs;
    without any it is rehearsed."""

    name: str
    do: Callable[[Kit], str]
    seconds: int
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Machine:
    gpus: int
    name: str
    memory_gib: float


def this_machine() -> Machine:
    """By the driver; memory_gib is that of a GPU, 0 if the driver's tool is missing."""
    gpus, name, memory = len(visible_devices()), "GPU", 0.0
    if not gpus:
        return Machine(0, "CPU", 0.0)
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        line = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()[0]
        name, mebibytes = line.rsplit(",", 1)
        memory = float(mebibytes) / 1024
    return Machine(gpus, f"{gpus} x {name}", memory)


class Kit:
    """The stages on one machine. folder: of report, logs and runs. minutes: for all that is not done yet."""

    def __init__(self, folder: Path, machine: Machine, minutes: float) -> None:
        self.folder = folder.resolve()
        self.machine = machine
        self.rehearsal = machine.gpus == 0
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._report = self.folder / "report.jsonl"
        self._end = time.monotonic() + 60 * minutes
        self._deadline = self._end

    def make(self, stages: Sequence[Stage]) -> bool:
        """Make the stages that are not done. Returns whether all that this machine can do are ok."""
        ok = True
        for stage in stages:
            line = self.lines().get(stage.name)
            if line is None or line["result"] != "ok":
                print(f"{stage.name} ...", file=sys.stderr, flush=True)
                line = self._make(stage)
                with self._report.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            print(f"{stage.name}: {line['result']}, {line['seconds']:.0f} s. {line['measured']}", flush=True)
            ok = ok and (line["result"] == "ok" or line["result"] == "skipped" and 0 < self.machine.gpus < stage.gpus)
        return ok

    def _make(self, stage: Stage) -> dict[str, Any]:
        began = time.monotonic()
        seconds = stage.seconds * (REHEARSAL_PATIENCE if self.rehearsal else 1)
        self._deadline = min(began + seconds, self._end)
        if not self.rehearsal and self.machine.gpus < stage.gpus:
            result, measured = "skipped", f"needs {stage.gpus} GPUs"
        elif began >= self._end:
            result, measured = "skipped", "the time was over; the same command goes on from here"
        else:
            try:
                result, measured = "ok", stage.do(self)
            except Exception as error:  # whatever is wrong, the other stages are to be made
                kind = "" if isinstance(error, StageFailed | AssertionError) else f"{type(error).__name__}: "
                result, measured = "FAILED", f"{kind}{error}"
        return {
            "stage": stage.name,
            "result": result,
            "seconds": round(time.monotonic() - began, 1),
            "measured": measured,
            "machine": self.machine.name,
            "time": time.time(),
        }

    def lines(self) -> dict[str, dict[str, Any]]:
        """The last line of each stage that was made on a machine like this one, by its name."""
        text = self._report.read_text() if self._report.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        return {line["stage"]: line for line in lines if line["machine"] == self.machine.name}

    def table(self) -> Table:
        title = f"{self.machine.name}{', a rehearsal' * self.rehearsal}: {self._report}"
        table = Table("stage", "result", "seconds", "measured", title=title, title_justify="left")
        for line in self.lines().values():
            measured = line["measured"].replace("[", r"\[")
            table.add_row(line["stage"], line["result"], f"{line['seconds']:.0f}", measured)
        return table

    # What stages are made of.

    def left(self) -> float:
        """Seconds until the deadline of the stage."""
        return self._deadline - time.monotonic()

    @contextlib.contextmanager
    def process(self, log: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of Python in the kit's folder, which with all that it started is gone afterwards. log: file for
        what it prints, which is added."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        variables |= {"OMP_NUM_THREADS": "1"} if self.rehearsal else {}
        with (self.logs / log).open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=os.environ | variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            below = descendants(process.pid)
            process.kill()
            process.wait()
            for child in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    def wait(self, process: subprocess.Popen[bytes], log: str) -> None:
        """Wait for the end of a process. Raises StageFailed unless that is good, and in time."""
        try:
            code = process.wait(max(self.left(), 0))
        except subprocess.TimeoutExpired:
            raise StageFailed(f"not done within the stage's time: {self.last_words(log)}") from None
        if code:
            raise StageFailed(f"exit code {code}: {self.last_words(log)}")

    def do(self, log: str, *command: str) -> None:
        with self.process(log, *command) as process:
            self.wait(process, log)

    def last_words(self, log: str) -> str:
        lines = [line for line in (self.logs / log).read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-LINES:]) or "it printed nothing"

    def until(self, condition: Callable[[], Any], process: subprocess.Popen[bytes], log: str) -> Any:
        """The first true value of `condition` while a process runs. Raises StageFailed if there is none in time."""
        while not (value := condition()):
            if process.poll() is not None or self.left() < 0:
                ended = "the run ended before" if process.poll() is not None else "not within the stage's time"
                raise StageFailed(f"{ended}: {self.last_words(log)}")
            time.sleep(0.1)
        return value

    def random_model(self) -> Path:
        """A model of the paper's 1.5B shape, or a small one, with random weights and the quickstart's tokenizer."""
        return self._model("small" if self.rehearsal else "paper-1.5b")

    def random_mixture(self) -> Path:
        """The same for a mixture of experts."""
        return self._model("small-mixture" if self.rehearsal else "mixture")

    def _model(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            part = self.folder / f"{name}.part"
            self.do("model.log", __file__, "--part", "model", "--folder", str(part))
            part.rename(folder)
        return folder

    def settings(self) -> list[str]:
        """Those of a short run here, with the quickstart's model or a small one."""
        return [*SMALL, f"model={self.random_model()}"] if self.rehearsal else [*SHORT, *BF16]

    def run_of(self, name: str) -> list[str]:
        return [str(ROOT / "run.py"), *self.settings(), f"name={name}"]

    def judged(self, name: str, gap: float | None = None) -> str:
        """What a run measured, if it did all that it should. gap: the largest that `logprob_gap` may be."""
        records, summary = check_accounts(self.folder / "runs" / name)
        gap = gap or GAP["float32" if self.rehearsal else "bfloat16"]
        largest = summary["logprob_gap_max"]
        if largest is None or not largest <= gap:
            raise StageFailed(f"log-probs of trainer and generators differ by {largest} nats (at most {gap:g})")
        write_figures(f"kit-{name}", [Record(self.folder / "runs" / name)], self.folder / "records", 10.0)
        interrupted = sum(record["sequences_interrupted"] for record in records)
        return (
            f"{len(records)} steps, {summary['samples_trained']} samples in {summary['seconds']:.0f} s; staleness "
            f"{summary['staleness_max']} (at most {summary['max_staleness']}), log-prob gap {largest:.1g} (at most "
            f"{gap:g}), {interrupted} sequences interrupted, held-out accuracy {summary['accuracy_before']:.3f} to "
            f"{summary['accuracy_after']:.3f}"
        )


def descendants(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


# The stages.


def pins(kit: Kit) -> str:
    """The packages that pyproject.toml names are there, and torch, vLLM and DeepSpeed are builds for this machine."""
    if wrong := list(wrong_pins("cpu" if kit.rehearsal else "cuda")):
        raise StageFailed("; ".join(wrong))
    kit.do("pins.log", __file__, "--part", "build")
    return kit.last_words("pins.log").splitlines()[-1]


def wrong_pins(extra: str) -> Iterator[str]:
    """A sentence for each requirement of the project, and of one of its extras, that this environment does not meet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        requirement = Requirement(line)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if version not in requirement.specifier:
            yield f"{requirement.name} is {version}, but must be {requirement.specifier}"


def selftest(kit: Kit) -> str:
    return selftest_of(kit, "selftest")


def paper_shape(kit: Kit) -> str:
    """The self-test's checks of the paper's run on this machine, with a model of its shape."""
    model = kit.random_model()
    few = ("trainer.offload=optimizer",) if kit.machine.memory_gib < LARGE_GIB else ()
    options = SMALL_PAPER if kit.rehearsal else few
    return selftest_of(
        kit,
        "paper-shape",
        "--model-only",
        "--config",
        str(PAPER),
        f"model={model}",
        "generator.count=1",
        f"trainer.ranks={2 if kit.machine.gpus > 2 else 1}",
        *options,
    )


def selftest_of(kit: Kit, name: str, *arguments: str) -> str:
    file = kit.logs / f"{name}.json"
    file.unlink(missing_ok=True)
    seconds = f"{max(kit.left() - 10, 1):.0f}"  # it has to write what it found
    command = ["-m", "areal", "selftest", "--json", str(file), "--seconds", seconds, *arguments]
    with kit.process(f"{name}.log", *command) as process:
        try:
            kit.wait(process, f"{name}.log")
        except StageFailed:
            if not file.exists():
                raise
    findings = json.loads(file.read_text())["findings"]
    failed = [f"{finding['name']}: {finding['measured']}" for finding in findings if finding["result"] == "FAILED"]
    if failed:
        raise StageFailed("; ".join(failed))
    skipped = [finding["name"] for finding in findings if finding["result"] == "skipped"]
    speeds = [
        f"{finding['name']}: {finding['measured']}"
        for finding in findings
        if finding["name"] in ("generation", "training")
    ]
    return f"{len(findings) - len(skipped)} checks; skipped: {', '.join(skipped) or 'none'}; " + "; ".join(speeds)


def trained(name: str, *changes: str, gpu: Sequence[str] = (), gap: float | None = None) -> Callable[[Kit], str]:
    """A stage that is a run with changes to its settings. gpu: those on GPUs alone."""

    def do(kit: Kit) -> str:
        kit.do(f"{name}.log", *kit.run_of(name), *changes, *(() if kit.rehearsal else gpu))
        return kit.judged(name, gap)

    return do


def paper_run(kit: Kit) -> str:
    """A run with a model of the paper's shape, of long samples."""
    offload = ["trainer.offload=optimizer"] * (kit.machine.memory_gib < LARGE_GIB)
    changes = [*BF16, f"model={kit.random_model()}", "trainer.gradient_checkpointing=true"]
    return trained("paper-run", *changes, gpu=[*PAPER_RUN, *offload], gap=GAP["bfloat16"])(kit)


def parallel(name: str, *changes: str) -> Callable[[Kit], str]:
    """A run that needs three GPUs, or two in turns."""
    return lambda kit: trained(name, *changes, *["colocate=true"] * (kit.machine.gpus == 2))(kit)


def experts(kit: Kit) -> str:
    """A mixture of experts, each half of its experts on a rank of its own."""
    return parallel("divided-experts", *RANKS, "trainer.expert_parallel=2", f"model={kit.random_mixture()}")(kit)


def kills(kit: Kit) -> str:
    """One process of each role that has an engine or the journal is killed, one after another."""
    roles = ("generator", "trainer", "master")
    changes = ["steps=14", "trainer.checkpoint_every=3", "master.lease_seconds=10"]
    with kit.process("kills.log", *kit.run_of("kills"), *changes) as run:
        for step, role in zip((2, 5, 8), roles, strict=True):
            kit.until(lambda step=step: steps_of(kit, "kills") >= step, run, "kills.log")
            kit.until(lambda role=role: child_of(run, role), run, "kills.log").kill()
        kit.wait(run, "kills.log")
    log = (kit.logs / "kills.log").read_text()
    if missing := [role for role in roles if f"{role}/0 was killed by SIGKILL, and is started again" not in log]:
        raise StageFailed(f"not started again: {', '.join(missing)}")
    return f"{', '.join(roles)} killed and started again; " + kit.judged("kills")


def resume(kit: Kit) -> str:
    """A run loses its machine, as far as one can: supervisor and roles are killed. Then it is resumed."""
    with kit.process("resume.log", *kit.run_of("resume"), "steps=8", "trainer.checkpoint_every=2") as run:
        kit.until(lambda: steps_of(kit, "resume") >= 3, run, "resume.log")
        lost, roles = descendants(run.pid), psutil.Process(run.pid).children()
        run.kill()
        for process in roles:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, survivors = psutil.wait_procs(lost, min(LOST_SECONDS, max(kit.left(), 0)))
    if survivors:
        raise StageFailed(f"processes outlived their run: {survivors}")
    at = steps_of(kit, "resume")
    kit.do("resume.log", str(ROOT / "run.py"), "--resume", "runs/resume")
    return f"lost at step {at}, and resumed; " + kit.judged("resume")


def steps_of(kit: Kit, name: str) -> int:
    return sum(1 for _ in read_records(kit.folder / "runs" / name / "metrics.jsonl"))


def child_of(run: subprocess.Popen[bytes], role: str) -> psutil.Process | None:
    """The process that a run's supervisor has started for a role."""
    for process in psutil.Process(run.pid).children():
        with contextlib.suppress(psutil.Error):
            if f"--role {role} " in " ".join([*process.cmdline(), ""]):
                return process
    return None


STAGES = (
    Stage("pins", pins, 120),
    Stage("selftest", selftest, 300),
    Stage("paper-shape", paper_shape, 400),
    Stage("paper-run", paper_run, 240),
    Stage("quickstart", trained("quickstart", gpu=QUICKSTART), 360),
    Stage("colocated", trained("colocated", "colocate=true"), 150),
    # The prefix was computed by older weights: a part of the gap is no error (docs/generation.md).
    Stage("kept-kv", trained("kept-kv", "generator.kv_on_update=keep", gap=0.5), 120),
    Stage("offload", trained("offload", "trainer.offload=optimizer", "trainer.zero_stage=1"), 120),
    Stage("kills", kills, 270),
    Stage("resume", resume, 200),
    Stage("direct", trained("direct", *DIRECT), 120, gpus=2),
    Stage("tensor-parallel", parallel("tensor-parallel", "generator.tensor_parallel=2"), 200, gpus=2),
    Stage("zero-3", parallel("zero-3", *ZERO_3), 200, gpus=2),
    Stage("divided-tensors", parallel("divided-tensors", *RANKS, "trainer.tensor_parallel=2"), 200, gpus=2),
    Stage("divided-experts", experts, 200, gpus=2),
    Stage("zero-3-direct", trained("zero-3-direct", *ZERO_3, *DIRECT), 200, gpus=3),
)


# Parts that need torch, each in a process of its own: the kit itself takes no GPU.


def print_build() -> None:
    """Compile for the device, as vLLM does; the last line says what is there."""
    import deepspeed
    import torch
    import vllm
    from vllm.platforms import current_platform

    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if current_platform.device_type != device:
        raise SystemExit(f"vLLM is the build for {current_platform.device_type}, and torch finds {device}.")
    numbers = torch.randn(64, 64, device=device)
    compiled = torch.compile(lambda x: (2 * x + 1).relu().sum(-1))
    torch.testing.assert_close(compiled(numbers), (2 * numbers + 1).relu().sum(-1))
    facts = [f"torch {torch.__version__}", f"DeepSpeed {deepspeed.__version__}", f"vLLM {vllm.__version__}"]
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        facts += [f"CUDA {torch.version.cuda}", f"compute capability {major}.{minor}"]
        if not torch.cuda.is_bf16_supported():
            raise SystemExit("The GPU has no bfloat16.")
    print(f"{', '.join(facts)}; compiled in {time.monotonic() - began:.0f} s", flush=True)
    os._exit(0)  # not through the ends of engines


def write_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from areal.data.warm_start import make_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = make_tokenizer()
    shape = SHAPES[folder.stem]
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, **ends))
    model.to(torch.float32 if device == "cpu" else torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    words = vocabulary["model"]["vocab"]
    words |= {f"<{number}>": number for number in range(len(words), shape["vocab_size"])}  # all that can be sampled
    file.write_text(json.dumps(vocabulary))


def leave(*_: Any) -> None:
    """Leave no process. A second SIGTERM, as `timeout` sends it, must not end this too early."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", type=Path, default=ROOT / "build" / "kit", help="of report, logs and runs (default: build/kit)")
    names = [stage.name for stage in STAGES]
    add("--only", action="append", choices=names, metavar="STAGE", help=f"may be repeated; one of {', '.join(names)}")
    add("--minutes", type=float, default=40.0, help="for all stages together (default: 40)")
    add("--part", choices=("build", "model"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print_build() if options.part == "build" else write_model(options.folder)
        return 0
    signal.signal(signal.SIGTERM, leave)
    kit = Kit(options.folder, this_machine(), options.minutes)
    ok = kit.make([stage for stage in STAGES if not options.only or stage.name in options.only])
    Console(width=None if sys.stdout.isatty() else 160).print(kit.table())
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

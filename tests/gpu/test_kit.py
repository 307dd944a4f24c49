"""The kit's stages: what is made, repeated, skipped and ended. `make kit` rehearses what is in them."""

import json
from importlib import metadata

import kit
import psutil
import pytest
from kit import STAGES, Kit, Machine, Stage, StageFailed

GPU = Machine(1, "1 x H100", 80.0)


def lines(folder):
    return [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]


def test_a_stage_that_fails_stops_none_and_is_alone_made_again(tmp_path):
    instances = []

    def fails(kit):
        instances.append("fails")
        raise StageFailed("the reason")

    stages = [Stage("fails", fails, 9), Stage("breaks", lambda kit: kit.nothing, 9), Stage("fine", instances.append, 9)]
    stages += [Stage("several", instances.append, 9, gpus=2)]
    assert not Kit(tmp_path, GPU, 1.0).make(stages)
    results = {line["stage"]: (line["result"], line["measured"]) for line in lines(tmp_path)}
    assert results["fails"] == ("FAILED", "the reason")
    assert results["breaks"][0] == "FAILED" and results["breaks"][1].startswith("AttributeError: ")
    assert (results["fine"][0], results["several"]) == ("ok", ("skipped", "needs 2 GPUs"))

    again = Kit(tmp_path, GPU, 1.0)
    assert not again.make(stages)
    assert [item for item in instances if not isinstance(item, Kit)] == ["fails", "fails"]
    assert again.make(stages[2:])  # what needs more GPUs than there are is no failure
    assert sum(isinstance(item, Kit) for item in instances) == 1
    Kit(tmp_path, Machine(1, "1 x A100", 80.0), 1.0).make(stages[2:3])
    assert sum(isinstance(item, Kit) for item in instances) == 2  # another machine


def test_without_a_gpu_stages_for_several_are_rehearsed_and_without_time_none_is(tmp_path):
    instances = []
    stage = Stage("several", instances.append, 9, gpus=2)
    assert not Kit(tmp_path, Machine(0, "CPU", 0.0), 0.0).make([stage])
    assert lines(tmp_path)[0]["result"] == "skipped" and not instances
    assert Kit(tmp_path, Machine(0, "CPU", 0.0), 1.0).make([stage])


def test_a_process_that_hangs_is_ended_at_the_deadline_with_what_it_started(tmp_path):
    child = "import time; print('still here', flush=True); time.sleep(1000)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True).wait()"
    seen = []

    def hangs(kit):
        with kit.process("log", "-c", code) as process:
            kit.until(lambda: "still here" in (kit.logs / "log").read_text(), process, "log")
            seen.extend([psutil.Process(process.pid), *kit_descendants(process.pid)])
            kit.wait(process, "log")

    kit_descendants = kit.descendants
    assert not Kit(tmp_path, GPU, 1.0).make([Stage("hangs", hangs, 3)])
    assert lines(tmp_path)[0]["measured"] == "not done within the stage's time: still here"
    assert len(seen) == 2 and not psutil.wait_procs(seen, 10)[1]


def test_a_process_that_fails_says_its_last_words(tmp_path):
    stage = Stage("dies", lambda kit: kit.do("log", "-c", "import sys; print('why'); sys.exit(3)"), 60)
    Kit(tmp_path, GPU, 1.0).make([stage])
    assert lines(tmp_path)[0]["measured"] == "exit code 3: why"


def test_the_stages_of_one_gpu_have_forty_minutes():
    assert sum(stage.seconds for stage in STAGES if stage.gpus <= 1) <= 40 * 60
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_pins_that_are_not_met_are_named(monkeypatch):
    assert not list(kit.wrong_pins("cpu"))
    installed = metadata.version

    def version(name):
        if name == "pyzmq":
            raise metadata.PackageNotFoundError
        return "0.1" if name == "transformers" else installed(name)

    monkeypatch.setattr(kit.metadata, "version", version)
    assert list(kit.wrong_pins("cpu")) == ["pyzmq is missing", "transformers is 0.1, but must be ==5.19.0"]


@pytest.mark.parametrize(("gap", "ok"), [(0.01, True), (0.1, False), (float("nan"), False), (None, False)])
def test_a_run_whose_log_probs_differ_fails(tmp_path, monkeypatch, gap, ok):
    summary = {
        "logprob_gap_max": gap,
        "samples_trained": 64,
        "seconds": 9.0,
        "staleness_max": 1,
        "max_staleness": 2,
        "accuracy_before": 0.5,
        "accuracy_after": 0.6,
    }
    monkeypatch.setattr(kit, "check_accounts", lambda folder: ([{"sequences_interrupted": 3}], summary))
    written = []
    monkeypatch.setattr(kit, "Record", lambda folder: folder)
    monkeypatch.setattr(kit, "write_figures", lambda name, *rest: written.append(name))
    stage = Stage("run", lambda kit: kit.judged("run"), 9)
    assert Kit(tmp_path, GPU, 1.0).make([stage]) == ok
    assert written == ["kit-run"] * ok
    assert ("3 sequences interrupted" if ok else "at most 0.05") in lines(tmp_path)[0]["measured"]

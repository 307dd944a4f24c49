"""What `areal launch slurm` writes: every command in it is one that the programs take."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.start.run_command import parse
from areal.base.errors import UserError
from areal.extensions.launch.launch import plan
from areal.extensions.launch.master import words_of
from areal.extensions.launch.slurm import Slurm, _slurm
from areal.extensions.launch.targets import Launch

CONFIG = "configs/deploy/run.yaml"
MASTER = "areal.extensions.launch.master"


def planned(*overrides: str, **cluster: Any) -> Launch:
    return plan(CONFIG, [*overrides, *(f"cluster.{key}={yaml.safe_dump(value)}" for key, value in cluster.items())])


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parsed arguments of a command. Fails where `run.py` would refuse it."""
    if MASTER in words:
        folder, address, *run = words[words.index(MASTER) + 1 :]
        words = words_of(Path(folder), address, Path(*run or ["runs/deploy"]))
    else:
        words = words[words.index("--role") :]
    monkeypatch.setattr(sys, "argv", ["run.py", *(word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in words)])
    return parse()


def test_a_script_of_slurm_starts_every_process_on_devices_of_its_own(monkeypatch):
    script = Slurm().render(planned(queue="gpu", options=["--account=me"]))["slurm.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "#SBATCH --gpus-per-node=8" in script and "#SBATCH --account=me" in script
    used, roles = Counter(), Counter()
    for line in (line for line in script.splitlines() if line.startswith('keep "')):
        words = shlex.split(line.removesuffix(" &"))
        roles.update(check_command([word.replace("$address", "tcp://h:1") for word in words], monkeypatch).role)
        visible = next((word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE")), "")
        used.update((words[3], device) for device in visible.split(",") if device)
    assert roles == {"master": 1, "trainer": 1, "generator": 6, "rollout_manager": 1, "reward": 1, "evaluator": 1}
    assert used == {(node, str(device)): 1 for node in "01" for device in range(8)}


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("a.sif", "apptainer exec --nv --bind"),
        ("docker://a", "apptainer exec --nv --bind"),
        ("nvcr.io#a", "--container-image='nvcr.io#a' --container-mounts="),
    ],
)
def test_a_container_of_slurm_is_apptainers_or_pyxis(image, words):
    assert words in Slurm().render(planned(image=image))["slurm.sh"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("sbatch: error: Invalid account or account/partition combination specified", "this user may not submit there"),
        ("sbatch: error: User's group not permitted to use this partition", "this user may not submit there"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "no controller of Slurm answers"),
    ],
)
def test_what_sbatch_says_becomes_one_sentence_with_what_to_do(words, sentence):
    with pytest.raises(UserError, match=sentence) as raised:
        _slurm("sh", "-c", f'echo "{words}" >&2; exit 1')
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("target", "overrides", "sentence"),
    [
        (Slurm, ["cluster.nodes.cpu={devices: 0}"], "give cluster.nodes one kind"),
    ],
)
def test_what_a_target_cannot_do_is_said_before_anything_is_written(target, overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        target().check(planned(*overrides))

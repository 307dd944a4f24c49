"""The engine's tests on vLLM's second model runner, its default on GPUs. Its Triton kernels run in numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON = ROOT / "build" / "triton"  # by `make test-runner`; never in .venv, where other tests would import it
AHEAD = "as_gpus_load_and_schedule_tokens_of_dense_models_and_experts_have_the_logprobs_of_their_version"
PATH = os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path(__file__).parent, TRITON]))
needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="`make test-runner` installs Triton, and runs this")

MASKED = """
import torch, triton, triton.language as tl
from interpreted_cpu.driver import InterpretedDriver

@triton.jit
def copy(source, flags, target, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    mask = (places < 3) & ((tl.load(flags) > 0) & (tl.load(flags + 1) > 0))
    tl.store(target + places, tl.load(source + places, mask=mask), mask=mask)

InterpretedDriver.is_active()
target = torch.zeros(4)
copy[(1,)](torch.ones(4), torch.ones(2, dtype=torch.int32), target, SIZE=4)
print(target.tolist())
"""


@pytest.mark.slow
@needs_triton
def test_the_interpreter_takes_a_mask_of_a_block_and_a_number(tmp_path: Path) -> None:
    """As that of vLLM's guesses by n-grams."""
    file = tmp_path / "masked.py"  # Triton reads the source
    file.write_text(MASKED)
    variables = {"PYTHONPATH": PATH, "TRITON_INTERPRET": "1"}
    process = subprocess.run([sys.executable, file], env=os.environ | variables, capture_output=True, text=True)
    assert process.stdout == "[1.0, 1.0, 1.0, 0.0]\n", process.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        "each_part_of_an_interrupted_sequence_has_the_logprobs_of_the_weights_that_sampled_it",
        "each_part_of_an_interrupted_sequence_has_the_logprobs_of_the_adapter_that_sampled_it",
        "sequences_that_a_full_kv_cache_preempts_lose_no_token_and_have_the_logprobs_of_their_version",
        "a_kept_kv_cache_serves_the_sequences_that_run_and_no_later_prompt",
        "guessed_tokens_have_the_logprobs_and_versions_of_what_accepts_them",
        f"{AHEAD}[experts-changes0]",
        f"{AHEAD}[models-changes1]",
    ],
)
def test_the_runner_of_gpus_passes_the_test_of_the_engine(name: str) -> None:
    variables = {
        "PYTHONPATH": PATH,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "1200",
            f"tests/test_areal/generation/test_generation_engine.py::test_{name}",
        ],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0 and "1 passed" in process.stdout, process.stdout[-5000:]
    assert "Using V2 Model Runner" in process.stdout

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


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not TRITON.exists(), reason="`make test-runner` installs Triton, and runs this")
@pytest.mark.parametrize(
    "name",
    [
        "each_part_of_an_interrupted_sequence_has_the_logprobs_of_the_weights_that_sampled_it",
        "each_part_of_an_interrupted_sequence_has_the_logprobs_of_the_adapter_that_sampled_it",
        "sequences_that_a_full_kv_cache_preempts_lose_no_token_and_have_the_logprobs_of_their_version",
        "a_kept_kv_cache_serves_the_sequences_that_run_and_no_later_prompt",
        f"{AHEAD}[experts-changes0]",
    ],
)
def test_the_runner_of_gpus_passes_the_test_of_the_engine(name: str) -> None:
    path = [ROOT, ROOT / "tests", Path(__file__).parent, TRITON]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout", "1200",
            f"tests/areal/generation/test_engine.py::test_{name}",
        ],
        cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-5000:]
    assert "Using V2 Model Runner" in done.stdout

"""Starts the judge of judge_model.py, and a run once the judge answers. key=value changes the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from areal.config import load_config

CONFIG, MODEL = Path(__file__).with_name("async_judge_small.yaml"), Path("build/judge/model")
START_SECONDS, STOP_SECONDS = 180, 20
LIMITS = ["--enforce-eager", "--dtype=float32", "--max-model-len=256", "--gpu-memory-utilization=0.1"]
QUIET = ["--disable-uvicorn-access-log", "--disable-log-stats"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENVIRONMENT |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@contextlib.contextmanager
def judge(host: str, port: int) -> Iterator[None]:
    """Serve the judge. Raises SystemExit if the server ends, or does not answer in START_SECONDS."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={MODEL}"]
    command += ["--served-model-name=judge", f"--host={host}", f"--port={port}", *LIMITS, *QUIET]
    server = subprocess.Popen(command, env=os.environ | ENVIRONMENT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"http://{host}:{port}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The judge at port {port} did not start: see its lines above.")
            time.sleep(0.5)
        yield
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # also an engine that the server has left


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> int:
    """Return the exit code of the run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (options,) = load_config(CONFIG, sys.argv[1:]).reward.options.values()
    address = urlsplit(options["address"])
    with judge(str(address.hostname), address.port or 80):
        run = subprocess.Popen([sys.executable, "-m", "areal", "run", str(CONFIG), *sys.argv[1:]])
        signal.signal(signal.SIGTERM, lambda *_: run.terminate())
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends the signal to the run, too
        code = run.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_benchmark_of_the_sandbox_runs_and_writes_its_results(tmp_path):
    here = Path(__file__).parent
    file = tmp_path / "results.json"
    subprocess.run(
        [sys.executable, here / "sandbox.py", "--rounds", "1", "--programs", "2", "--json", file],
        env=os.environ | {"PYTHONPATH": str(here.parents[1])},
        check=True,
        timeout=120,
    )
    results = json.loads(file.read_text())
    assert results["ratio"] > 0 and len(results["spread"]) == 2
    assert {row["of"] for row in results["rows"]} == {"Python, stdin", "Python, 10 asserts", "bash, stdin"}

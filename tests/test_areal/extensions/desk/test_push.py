"""Models for the hub, by the command a user types."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from areal.__main__ import main
from areal.base.processes import ROOT
from areal.config import dump_config, load_config
from areal.storage.records import line_of

SECRET = "s3cr3t"


@pytest.fixture
def run(tiny_model, tmp_path) -> Path:
    """A run folder after 20 steps of the hub's model me/base, with everything that may not leave the machine."""
    folder = tmp_path / "runs" / "adder"
    checkpoint = folder / "checkpoints" / "step_000020"
    shutil.copytree(tiny_model, checkpoint)
    for private in (folder / "checkpoints" / "step_000010", checkpoint / "training", folder / "keys"):
        private.mkdir()
        (private / "private.safetensors").write_bytes(b"private")
    (checkpoint / "adapter").mkdir()
    described = {"base_model_name_or_path": str(tiny_model), "r": 4}
    (checkpoint / "adapter" / "adapter_config.json").write_text(json.dumps(described))
    (folder / "secrets.json").write_text(SECRET)
    model = tmp_path / "models--me--base" / "snapshots" / "0123"
    overrides = [
        "name=adder",
        f"run_dir={folder.parent}",
        f"model={model}",
        "data.source=hf:me/sums",
        f"observe.prometheus_token={SECRET}",
        f'reward.functions=["{tmp_path}/own.py:right"]',
    ]
    (folder / "config.yaml").write_text(
        dump_config(load_config(ROOT / "configs" / "quickstart.yaml", overrides)).replace("(hidden)", SECRET)
    )
    (folder / "metrics.jsonl").write_text(line_of({"step": 20, "reward_mean": 0.5, "staleness_max": 3}))
    evaluations = [
        {"version": 0, "accuracy": 0.25, "standard_error": 0.05, "pass_at": {"1": 0.25, "4": 0.5}, "rows": 64},
        {"version": 20, "accuracy": 0.75, "standard_error": 0.05, "pass_at": {"1": 0.75, "4": 0.875}, "rows": 64},
    ]
    (folder / "evaluations.jsonl").write_text("".join(map(line_of, evaluations)))
    (folder / "summary.json").write_text(json.dumps({"ok": True, "staleness_max": 3, "checkpoint": str(checkpoint)}))
    return folder


def test_the_folder_is_the_last_checkpoint_with_a_card_and_nothing_private(run, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["push", str(run)]) == 0
    assert main(["push", str(run)]) == 0  # again: the folder is replaced
    folder = run / "hub"
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "adapter/adapter_config.json",
        "config.json",
        "config.yaml",
        "evaluations.jsonl",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "summary.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.svg",
    }
    for path in files - {"model.safetensors"}:
        assert SECRET not in (text := (folder / path).read_text())
        assert str(tmp_path) not in text
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None


def test_the_card_says_what_was_trained_and_how_well_it_did(run):
    assert main(["push", str(run), "--output", str(run / "model")]) == 0
    card = ModelCard.load(run / "model" / "README.md")
    assert (card.data.base_model, card.data.datasets) == ("me/base", ["me/sums"])
    results = {(result.dataset_type, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert results == {("me/sums", "accuracy"): 0.75, ("me/sums", "pass@4"): 0.875}
    assert "| held-out rows | 64 | 25.0 ± 5.0, pass@4 50.0 | 75.0 ± 5.0, pass@4 87.5 |" in card.text
    assert "| staleness | at most 3 versions, under a bound of 4 |" in card.text
    assert "| rewards | own.py:right |" in card.text


def test_the_card_takes_no_markup_from_the_record_and_the_folder_no_held_out_rows(run):
    name = "<img src=x>|](http://evil)"
    scores = {"accuracy": 0.5, "standard_error": 0.1, "rows": 8}
    lines = [{"version": version, "benchmarks": {name: scores}, "rows": 8} for version in (0, 20)]
    (run / "evaluations.jsonl").write_text("".join(map(line_of, lines)))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"samples_after": [{"prompt": "held-out", "text": "x"}]}))
    assert main(["push", str(run), "--output", str(run / "model")]) == 0
    card = ModelCard.load(run / "model" / "README.md")
    assert "| evil? | 8 |" in card.text and "<img" not in card.text
    assert "held-out" not in (run / "model" / "summary.json").read_text()


class Hub(BaseHTTPRequestHandler):
    """Takes uploads as the Hugging Face hub does. `server.asked`: the requests' paths and bodies."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, body))
        requests = json.loads(body) if self.path.endswith("/preupload/main") else {"files": []}
        files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in requests["files"]]
        address = f"http://127.0.0.1:{self.server.server_port}/me/adder"
        commit = {"commitUrl": f"{address}/commit/c", "commitOid": "c"}
        self.answer({"url": address, "id": "me/adder", "files": files, **commit})

    def do_GET(self):
        self.answer({"id": "me/adder", "sha": "c" * 40, "siblings": []})

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def push(run: Path, endpoint: str, *options: str) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(run),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_x",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "areal", "push", str(run), "--repo", "me/adder", *options]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_folder_is_uploaded_into_a_private_repository(run):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever).start()
        outcome = push(run, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == f"http://127.0.0.1:{server.server_port}/me/adder\n"
    created = [json.loads(body) for path, body in server.asked if path == "/api/repos/create"]
    assert [(item["name"], item["organization"]) for item in created] == [("adder", "me")]
    assert created[0].get("private") or created[0].get("visibility") == "private"
    (commit,) = (body for path, body in server.asked if path == "/api/models/me/adder/commit/main")
    payload = [json.loads(line) for line in commit.splitlines()]
    files = {line["value"]["path"]: line["value"]["content"] for line in payload if line["key"] == "file"}
    assert len(files) == 12
    assert base64.b64decode(files["README.md"]) == (run / "hub" / "README.md").read_bytes()


def test_a_folder_that_cannot_be_uploaded_is_there_with_a_sentence_that_says_how(run, free_port):
    outcome = push(run, f"http://127.0.0.1:{free_port}", "--public")
    assert outcome.returncode == 2
    assert (run / "hub" / "README.md").is_file()
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"{run / 'hub'} is ready, but it was not uploaded (")
    assert line.endswith(f"run hf auth login and hf upload me/adder {run / 'hub'}.")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--repo", "me/a/b"], "cannot be a name on the hub"),
        (["--output", "."], "already exists"),
    ],
)
def test_a_mistake_gets_one_sentence(run, capsys, options, sentence):
    assert main(["push", str(run), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not (run / "hub").exists()
    shutil.rmtree(run / "checkpoints")
    assert main(["push", str(run)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err

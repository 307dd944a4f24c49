"""The files of configs/paper and configs/sweeps in miniature, on two CPU cores: `make paper-mini`.

    python tests/benchmarks/paper_mini.py --folder build/paper-mini [--only table7] [--json FILE]

Models and data sets are folders with the names that they have on the hub: random models of the same architectures with
about 1M parameters, and a few rows in the sets' formats. So the files run as they are, but for the sizes in SMALL. The
scores say nothing; the tables show that the whole way to them is there. A run that is finished is not made again. The
exit code is 1 if a run did not reach its end or was staler than its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paper_tables
import torch
from results import write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from areal.extensions.recipes.recipe import RunRecipe, figures
from areal.storage.record import Record

ROOT = Path(__file__).parents[2]
PAPER, SWEEPS = ROOT / "configs" / "paper", ROOT / "configs" / "sweeps"
# What a run is scaled down by. All else is as the files have it: objective, precision, ZeRO stage, checkpointing,
# templates, rewards, micro-batches, interruption.
SMALL = (
    "steps=2",
    "batch_size=4",
    "group_size=4",
    "sampling.max_new_tokens=48",
    "data.eval_size=2",
    "evaluator.samples=2",
    "generator.count=1",
    "generator.tensor_parallel=1",
    "generator.memory_share=0.1",
    "generator.kv_cache_gib=0.25",
    "generator.max_concurrent_rollouts=16",
    "generator.enforce_eager=true",
    "trainer.ranks=1",
    "trainer.max_tokens_per_microbatch=1024",
    "reward.workers=1",
)
# The grids of the sweeps, where they are larger than these.
GRIDS = {"table2": "max_staleness=[0, 4]", "table7": "max_staleness=[0, 4]", "table8": "max_staleness=[4]"}
# Files of which a sweep makes the runs, and all that are experiments.
SWEPT = {path.stem.removeprefix("paper-") for path in SWEEPS.glob("paper-*.yaml")}
FILES = sorted({path.stem for path in PAPER.glob("*.yaml")} - {"shared", "math", "code", "published"})
# The tables that are printed, and the files with their runs.
TABLES = {
    "table1": ("table1-1.5b", "table1-7b", "table1-14b", "table1-32b"),
    "table2": ("table2",),
    "table7": ("table7",),
    "table8": ("table8",),
    "figure6a": ("figure6a", "figure6a-7b", "figure6a-32b"),
    "figure6b": ("figure6b",),
}

SUM = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}
CALL = {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}
CODE = {
    "taco": SUM,
    "primeintellect": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}],
    "lcbv5": [CALL],
    "codeforces": [{"input": "1 2", "output": "3"}],
}
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "paper-mini", help="of models, data and runs")
    parser.add_argument(
        "--only", action="append", choices=FILES, metavar="NAME", help="of configs/paper; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="where the figures of the runs go")
    options = parser.parse_args()
    folder = options.folder.resolve()
    make_hub(folder)
    names = options.only or FILES
    codes = {name: run(name, folder) for name in names}
    for table, files in TABLES.items():
        if runs := sorted(path.parent for name in files for path in runs_of(name, folder).glob("*/config.yaml")):
            sys.stdout.flush()
            paper_tables.main([table, *map(str, runs)])
    done = {name: [figures(Record(path)) for path in finished(name, folder)] for name in names}
    write({"files": done}, options.json)
    for name, runs in done.items():
        recipe = RunRecipe.of(file_of(name))
        faults = [fault for each in runs for fault in recipe.faults(each, quick=True)]
        codes[name] = codes[name] or int(bool(faults))
        minutes = sum(each["minutes"] for each in runs)
        print(f"{name}: exit code {codes[name]}, {len(runs)} runs, {minutes:.1f} minutes", *faults, sep="; ")
    return max(codes.values())


def run(name: str, folder: Path) -> int:
    """All runs of a file. Returns the exit code."""
    return areal("sweep", str(file_of(name)), *SMALL, *grid_of(name), folder=folder)


def grid_of(name: str) -> list[str]:
    if name in SWEPT:
        return [f"grid.{GRIDS[name]}"] if name in GRIDS else []
    return ["grid={seed: [1]}"]


def file_of(name: str) -> Path:
    return SWEEPS / f"paper-{name}.yaml" if name in SWEPT else PAPER / f"{name}.yaml"


def runs_of(name: str, folder: Path) -> Path:
    return folder / "runs" / file_of(name).stem


def finished(name: str, folder: Path) -> list[Path]:
    """The folders of the finished runs of a file."""
    return sorted(path.parent for path in runs_of(name, folder).glob("*/summary.json"))


def areal(*arguments: str, folder: Path) -> int:
    # ROOT first: an installed areal may be another one.
    changes = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "areal", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | changes, check=False).returncode


def make_hub(folder: Path) -> None:
    """Write the models and the data sets that the files name, each below `folder` by its name on the hub."""
    problems = [{"problem": f"What is {a} + {a}?", "answer": f"{2 * a}", "solution": "Add."} for a in range(40)]
    write_rows(folder / "agentica-org" / "DeepScaleR-Preview-Dataset", {"train": problems})
    aime = [{"id": n, "problem": f"Find {n} + 1.", "solution": "...", "answer": str(n + 1)} for n in range(4)]
    write_rows(folder / "HuggingFaceH4" / "aime_2024", {"train": aime})
    sums = [{"question": f"Sum {n} and 2.", "answer": f"{n}+2 = <<{n}+2={n + 2}>>\n#### {n + 2}"} for n in range(40)]
    write_rows(folder / "openai" / "gsm8k", {"train": sums[4:], "test": sums[:4]}, "main")
    for part, tests in CODE.items():
        starter = {"starter_code": "class Solution:\n    def add(self, a, b):"} if part == "lcbv5" else {}
        rows = [{"problem": f"Add, {n}.", "tests": json.dumps(tests), **starter} for n in range(10)]
        write_rows(folder / "agentica-org" / "DeepCoder-Preview-Dataset", {"train": rows}, part)
    tokenizer = make_tokenizer([row["problem"] for row in problems])
    for size in ("1.5B", "7B", "14B", "32B"):
        write_model(folder / "deepseek-ai" / f"DeepSeek-R1-Distill-Qwen-{size}", "qwen2", tokenizer)
    write_model(folder / "meta-llama" / "Meta-Llama-3-8B-Instruct", "llama", tokenizer)


def write_rows(folder: Path, splits: dict[str, list[dict[str, Any]]], name: str = "default") -> None:
    """Write a data set, or one more configuration of it, as `datasets` reads it from a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{name}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = sorted({path.stem.rpartition("-")[0] for path in folder.glob("*.jsonl")})
    files = {
        item: {path.stem.rpartition("-")[2]: path.name for path in folder.glob(f"{item}-*.jsonl")} for item in names
    }
    configs = [
        {"config_name": item, "data_files": [{"split": split, "path": path} for split, path in files[item].items()]}
        for item in names
    ]
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")  # JSON is YAML


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template. It can encode any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=special[0], eos_token=special[1])
    tokenizer.chat_template = CHAT
    return tokenizer


def write_model(folder: Path, kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """A random model of about 1M parameters, and its tokenizer."""
    settings, of = (Qwen2Config, Qwen2ForCausalLM) if kind == "qwen2" else (LlamaConfig, LlamaForCausalLM)
    torch.manual_seed(0)
    config = settings(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    of(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())

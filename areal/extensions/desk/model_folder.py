"""Writes the model of a run as a folder for the model hub: `areal export --format model`.

The folder has the newest checkpoint in a form for transformers and vLLM, without the state for resuming, the numbers of
the run, and a model card. The folder has no secrets, keys, logs or rollouts.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from areal.base.errors import UserError
from areal.base.secrets import without_secrets
from areal.config import Config
from areal.config.data_section import SourceConfig
from areal.config.reading import write_yaml
from areal.models import hub_id, label_of, name_of
from areal.storage.disk import leaves, within
from areal.storage.record import Record
from areal.storage.run_files import CONFIG, SUMMARY
from areal.weights.folders import atomic_folder, link
from areal.weights.model_files import ADAPTER_CONFIG_FILE

# Files of the model in a checkpoint. Large files are hard links.
WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "LICENSE*")
LINKED = "*.safetensors"
ADAPTER = "adapter"
CARD = str(Path(__file__).with_name("model_card.jinja"))
PAPER = "https://arxiv.org/abs/2505.24298"


class ModelScores(NamedTuple):
    """Scores of the model on a set of rows, and of the model before training (None: not evaluated)."""

    name: str
    rows: SourceConfig
    untrained: dict[str, Any] | None
    trained: dict[str, Any]


def write_model(record: Record, output: Path) -> None:
    """Make the folder `output` from a run's newest checkpoint. Raises UserError if the run has no checkpoint."""
    if not record.checkpoints.folders or not record.configuration.settings:
        raise UserError(
            f"{record.folder} has no checkpoint: give the folder of a run that has trained until its first one."
        )
    checkpoint, config = within(record.checkpoints.folders[-1], record.folder), record.configuration.load()
    with atomic_folder(output, durable=False) as target:
        _take_model(checkpoint, target, config)
        (target / CONFIG).write_text(write_yaml(_public(record.configuration.settings)))
        # Samples are rows of the data: whoever publishes a model publishes its numbers, and no held-out rows.
        apart = ("checkpoint", "samples_before", "samples_after")
        summary = {key: value for key, value in record.summary.items() if key not in apart}
        (target / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        for file in record.metrics.files:
            shutil.copyfile(file, target / file.name)
        _card(record, config, record.versions[-1], target).save(target / "README.md")


def _take_model(checkpoint: Path, target: Path, config: Config) -> None:
    folders = checkpoint, checkpoint / ADAPTER
    for path in (path for folder in folders for pattern in WANTED for path in folder.glob(pattern)):
        if leaves(path, checkpoint):
            print(f"{path} is left out: it is a link to {path.resolve()}.", file=sys.stderr)
            continue
        to = target / path.relative_to(checkpoint)
        to.parent.mkdir(exist_ok=True)
        if fnmatch(path.name, LINKED):
            link(path, to)
        else:
            shutil.copyfile(path, to)
    described = target / ADAPTER / ADAPTER_CONFIG_FILE
    if described.is_file():
        base = {"base_model_name_or_path": hub_id(config.model)}
        described.write_text(json.dumps(json.loads(described.read_text()) | base, indent=2) + "\n")


def _public(values: Any) -> Any:
    """Return the configuration without secrets, and with names in place of paths on this machine."""
    match without_secrets(values):
        case dict() as section:
            return {_public(key): _public(value) for key, value in section.items()}
        case list() as several:
            return [_public(value) for value in several]
        case str() as text:
            return name_of(text) if text.startswith("/") else text
        case other:
            return other


def _results(run: Record, config: Config, version: int) -> Iterator[ModelScores]:
    """Yield the scores of `version` on the held-out rows and on each benchmark, as far as they were evaluated."""
    by_version = {evaluation["version"]: evaluation for evaluation in run.metrics.evaluations}
    untrained, trained = by_version.get(0, {}), by_version.get(version, {})
    if trained.get("accuracy") is not None:
        parts = config.data.parts
        rows = parts[0] if len(parts) == 1 else SourceConfig()
        yield ModelScores("held-out rows", rows, untrained if untrained.get("accuracy") is not None else None, trained)
    for name, scores in (trained.get("benchmarks") or {}).items():
        rows, scores_before = config.evaluator.benchmarks.get(name, SourceConfig()), untrained.get("benchmarks") or {}
        yield ModelScores(label_of(name), rows, scores_before.get(name), scores)


def _evaluations(results: list[ModelScores]) -> Iterator[EvalResult]:
    for result in results:
        place = str(result.rows.eval_source or result.rows.source or "several sources")
        about: dict[str, Any] = {
            "task_type": "text-generation",
            "dataset_type": name_of(place),
            "dataset_name": result.name,
            "dataset_split": (place.split(":")[2:] or [result.rows.split])[0] if place.startswith("hf:") else None,
        }
        yield EvalResult(
            metric_type="accuracy", metric_name="mean score", metric_value=result.trained["accuracy"], **about
        )
        for k, share in (result.trained.get("pass_at") or {}).items():
            if k != "1":
                yield EvalResult(metric_type=f"pass@{k}", metric_value=share, **about)


def _card(run: Record, config: Config, version: int, target: Path) -> ModelCard:
    results, base = list(_results(run, config, version)), hub_id(config.model)
    sources = [str(part.source) for part in config.data.parts]
    data = ModelCardData(
        model_name=config.name,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base,
        datasets=[name_of(source) for source in sources if source.startswith("hf:")] or None,
        tags=["reinforcement-learning", "areal-as-actors"],
        eval_results=list(_evaluations(results)) or None,
    )
    return ModelCard.from_template(
        data, template_path=CARD, name=config.name, config=config, version=version, results=results,
        base=label_of(config.model), hub_base=base, adapter=(target / ADAPTER).is_dir(), paper=PAPER, score=_score,
        name_of=label_of, sources=list(map(label_of, sources)), summary=run.summary,
        rewards=[label_of(reward) for reward in config.reward.functions],
    )  # fmt: skip


def _score(scores: dict[str, Any] | None) -> str:
    if scores is None:
        return "–"
    error = scores.get("standard_error")
    mean = f"{100 * scores['accuracy']:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")
    pass_at = {int(k): share for k, share in (scores.get("pass_at") or {}).items()}
    largest = max(pass_at, default=1)
    return f"{mean}, pass@{largest} {100 * pass_at[largest]:.1f}" if largest > 1 else mean

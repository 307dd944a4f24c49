"""The tables of arXiv 2505.24298 with the rows of runs beside its own.

    python tests/benchmarks/paper_tables.py table2 runs/paper-table2/*/

Its numbers are in configs/paper/published.yaml, and its settings in the files beside that one. A run belongs to the row
whose keys it has, and whose model. What else differs is printed below the table.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal.base.command_line import output
from areal.base.errors import UserError
from areal.config import Config, overridden, validated
from areal.config.reading import CONFIGS, read_values
from areal.config.settings import SPEED_ONLY, is_under
from areal.extensions.desk.bare_models import count_parameters
from areal.extensions.desk.comparison import differing_settings, mean_text, means, value_of
from areal.models import name_of
from areal.storage.record import Record

PUBLISHED = CONFIGS / "paper" / "published.yaml"
# Of a measure: its name and unit in the table, the number in a run's summary, and the factor to that unit.
MEASURES: dict[str, tuple[str, str, str, float]] = {
    "base": ("before", "%", "accuracy_before", 100),
    "accuracy": ("accuracy", "%", "accuracy_after", 100),
    "hours": ("hours", "", "seconds", 1 / 3600),
    "throughput": ("throughput", "k tok/s", "effective_throughput", 1 / 1000),
    "tflops": ("training", "TFLOP/s", "tflops", 1),
}
# Keys that say where and how a run is started, and the model, which is compared by name and size.
OTHERWISE = ("name", "run_dir", "seed", "model", "master", "network", "observe", "trainer.peak_tflops")
# Keys that change what a run learns and not how fast it is.
SCORE_ONLY = (
    "steps",
    "evaluator",
    "data.eval_source",
    "data.eval_size",
    "guard",
    "trainer.lr",
    "trainer.checkpoints_kept",
)
# A model of the same name may have this much more or less parameters, such as a padded vocabulary.
SIZE_TOLERANCE = 0.02


@dataclass(frozen=True)
class RunMeasures:
    """A run: its configuration, its model's name, and its measures; those that it does not have are left out."""

    folder: Path
    config: Config
    model: str
    measures: Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="table1, table2, table7, table8, figure6a or figure6b")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    options = parser.parse_args(arguments)
    try:
        compare(options.table, options.runs, output(120))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def compare(name: str, folders: Sequence[Path], console: Console) -> None:
    """Print the paper's table `name`, such as table2, with the runs in `folders`. Raises UserError."""
    published = read_values(PUBLISHED)
    tables = published["tables"]
    if name not in tables:
        raise UserError(f"The paper has no {name}: take one of {', '.join(tables)}.")
    table = tables[name]
    rows = [TableRow(row) for row in table["rows"]]
    runs = [_read_measures(folder) for folder in folders]
    console.print(_table(table, rows, runs))
    left_out = [run for run in runs if not any(row.has(run) for row in rows)]
    for run in left_out:
        console.print(f"{run.folder} is in no row: it has the model {run.model}{_keys(rows, run)}.", highlight=False)
    if len(left_out) < len(runs):
        _print_differences(table, published["parameters"], rows, runs, console)


class TableRow:
    """A row of the table: its configuration, the keys in which that differs from its file, and the paper's numbers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.measures = {key: value for key, value in values.items() if key in MEASURES}
        self.keys = {key: value for key, value in values.items() if key not in (*MEASURES, "config")}
        file = PUBLISHED.with_name(f"{values['config']}.yaml")
        self.config: Config = validated(overridden(read_values(file), settings=self.keys), file)
        self.model = _model_name(self.config.model)

    def has(self, run: RunMeasures) -> bool:
        return run.model == self.model and self.fits(run.config)

    def fits(self, config: Config) -> bool:
        """Whether a configuration has the keys of this row."""
        settings = config.model_dump(mode="json")
        return all(value_of(settings, key) == value for key, value in self.keys.items())


def _read_measures(folder: Path) -> RunMeasures:
    run = Record(folder)
    config = run.configuration.load()
    tflops = [record["tflops"] for record in run.metrics.steady or run.metrics.records if record.get("tflops")]
    numbers = {**run.summary, "tflops": statistics.fmean(tflops) if tflops else None}
    measures = {m: numbers[key] * factor for m, (*_, key, factor) in MEASURES.items() if numbers.get(key) is not None}
    return RunMeasures(folder, config, _model_name(config.model), measures)


def _model_name(model: str) -> str:
    """The name of a model without its owner: of `owner/NAME`, of a folder NAME, or of one in the hub's cache."""
    return Path(name_of(model)).name


def _keys(rows: Sequence[TableRow], run: RunMeasures) -> str:
    settings = run.config.model_dump(mode="json")
    return "".join(f", {key}={_shown(value_of(settings, key))}" for key in _key_names(rows))


def _key_names(rows: Sequence[TableRow]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.keys))


def _table(table: Mapping[str, Any], rows: Sequence[TableRow], runs: Sequence[RunMeasures]) -> Table:
    """Each measure has the paper's number and the mean over our runs. Where the table has a row to refer to, rates are
    also shown as multiples of that row's, which is what different machines have in common."""
    shown = Table(title=table["title"], title_justify="left", caption="(arXiv 2505.24298 | these runs)")
    measures = list(dict.fromkeys(measure for row in rows for measure in row.measures))
    models = ["model"] * (len({row.model for row in rows}) > 1)
    for column in (*models, *_key_names(rows), "runs"):
        shown.add_column(column)
    for measure in measures:
        label, unit, *_ = MEASURES[measure]
        shown.add_column(f"{label} {unit}".strip(), justify="right")
        shown.add_column(f"here {unit}".strip(), justify="right")
        if _is_rate(measure, table):
            shown.add_column("ratio", justify="right")
            shown.add_column("here", justify="right")
    for row in rows:
        row_runs = [run for run in runs if row.has(run)]
        at = row.keys | table.get("reference", {})
        base = next(candidate for candidate in rows if candidate.model == row.model and candidate.keys == at)
        cells = []
        for measure in measures:
            values = _values(measure, row_runs)
            cells += [_number(row.measures.get(measure)), _mean(values)]
            if _is_rate(measure, table):
                base_values = _values(measure, [run for run in runs if base.has(run)])
                cells += [_ratio(row.measures.get(measure), base.measures.get(measure)), _ratio_of(values, base_values)]
        keys = [_shown(row.keys[key]) for key in _key_names(rows)]
        shown.add_row(*([row.model] if models else []), *keys, str(len(row_runs)), *cells)
    return shown


def _is_rate(measure: str, table: Mapping[str, Any]) -> bool:
    return measure in ("throughput", "tflops") and "reference" in table


def _values(measure: str, runs: Sequence[RunMeasures]) -> list[float]:
    return [run.measures[measure] for run in runs if measure in run.measures]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value >= 1 or not value else f"{value:.2g}"


def _mean(values: Sequence[float]) -> str:
    """The mean, and from two values on its standard error."""
    (mean, error), *_ = means([values])
    return mean_text(mean, error, ",.1f") if len(values) > 1 else _number(mean if values else None)


def _ratio(value: float | None, base: float | None) -> str:
    return "–" if not value or not base else f"{value / base:.2f}"


def _ratio_of(values: Sequence[float], base: Sequence[float]) -> str:
    return _ratio(*(statistics.fmean(numbers) if numbers else None for numbers in (values, base)))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print_differences(
    table: Mapping[str, Any],
    parameters: Mapping[str, float],
    rows: Sequence[TableRow],
    runs: Sequence[RunMeasures],
    console: Console,
) -> None:
    """Print what is not the paper's in these runs, and what can be compared therefore."""
    pairs: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for run in (run for run in runs if row.has(run)):
            for key, paper_value, run_value in [*_size(parameters[row.model], run), *_apart(row, run)]:
                pairs.setdefault((key, _shown(paper_value)), set()).add(_shown(run_value))
    if pairs:
        differing = Table("setting", "the paper's file", "these runs", title="What differs", title_justify="left")
        for (key, paper_value), run_values in pairs.items():
            differing.add_row(key, paper_value, " or ".join(sorted(run_values)))
        console.print(differing)
    console.print(f"What the paper has besides, and a run does not record: {table['apart']}.", highlight=False)
    for what, without in ("Scores", SPEED_ONLY), ("Speeds", SCORE_ONLY):
        keys = list(dict.fromkeys(key for key, _ in pairs if not is_under(key, without)))
        verdict = (
            f"cannot be compared with the paper's, since these differ: {', '.join(keys)}"
            if keys
            else ("can be compared with the paper's" + " on the same devices" * (what == "Speeds"))
        )
        console.print(f"{what} {verdict}.", highlight=False)


def _size(parameters: float, run: RunMeasures) -> list[tuple[str, str, str]]:
    """The number of parameters, if it is not that of the paper's model of this name."""
    try:
        count = count_parameters(run.config.model)
    except UserError:  # its folder is gone
        return [("parameters of the model", f"{parameters:.2e}", "unknown")]
    if abs(count / parameters - 1) < SIZE_TOLERANCE:
        return []
    return [("parameters of the model", f"{parameters:.2e}", f"{count:.2e}")]


def _apart(row: TableRow, run: RunMeasures) -> list[tuple[str, Any, Any]]:
    """The settings in which a run differs from its row: key, the row's value, the run's value."""
    settings = [row.config.model_dump(mode="json"), run.config.model_dump(mode="json")]
    keys = differing_settings(settings, OTHERWISE)
    return [(key, value_of(settings[0], key), value_of(settings[1], key)) for key in keys]


if __name__ == "__main__":
    sys.exit(main())

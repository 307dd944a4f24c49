"""The results of an ended run, for a terminal."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal.base.command_line import typed
from areal.base.extensions import part_of
from areal.base.text import shown
from areal.data import addition
from areal.storage.record import Record

PAIRS_SHOWN = 2
END = """  its report        {folder}/report.html
  its curves        {dashboard}
  its completions   {rollouts}
  to train it on    {resume}"""


def print_summary(folder: Path, console: Console) -> None:
    """Print the results of a run, from its summary.json."""
    record = Record(folder)
    summary = record.summary
    if summary["steps"] or summary["accuracy_after"] is not None:
        table = Table(title="Summary", title_justify="left", show_header=False)
        for name, value in _summary_rows(summary):
            table.add_row(name, value)
        console.print(table)
    alerts_of = part_of("alerts", "of_record")
    for alert, command in alerts_of(record) if alerts_of else ():
        console.print(Text.assemble((alert.name, "bold red"), f": {alert.sentence}"))
        if command:
            console.print(Text(f"  {command}"), soft_wrap=True)
    if results := [evaluation for evaluation in summary["evaluations"] if evaluation["benchmarks"]]:
        console.print(_benchmarks_table(results))
    _print_samples(record, console)
    console.print(f"Everything is in {folder}", highlight=False, soft_wrap=True)
    if summary["steps"]:
        words = {"dashboard": f"dashboard {folder}", "rollouts": f"rollouts {folder}"}
        words["resume"] = f"run --resume {folder} steps={2 * summary['steps']}"
        ways = {name: typed(command) for name, command in words.items()}
        console.print(Text(END.format(folder=folder, **ways)), soft_wrap=True)


def _print_samples(record: Record, console: Console) -> None:
    """Print the held-out rows with the largest changes of score."""
    pairs = record.sample_pairs()[:PAIRS_SHOWN]
    if pairs:
        console.print("[bold]Held-out rows before and after the training, the largest changes first[/]")
    if pairs and record.configuration.settings.get("data", {}).get("source") == "addition":
        console.print(addition.WORKING_IN_WORDS)
    for pair in pairs:
        console.print(Text(shown(f"  {pair['prompt']}   [answer: {pair['answer']}]")), soft_wrap=True)
        for when in ("before", "after"):
            if s := pair[when]:
                line = f"  {when:<7}{s['completion']}   (score {s['score']:g})"
                console.print(Text(shown(line)), soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _benchmarks_table(results: list[dict[str, Any]]) -> Table:
    """Return the scores of each benchmark at its last version and, if there are several versions, at its first."""
    versions = sorted(results, key=lambda evaluation: evaluation["version"])
    first, last = dict[str, Any](), dict[str, Any]()
    for evaluation in versions:
        first, last = evaluation["benchmarks"] | first, last | evaluation["benchmarks"]
    table = Table(title="Benchmarks", title_justify="left", box=SIMPLE)
    table.add_column("benchmark")
    means = ["before, %", "after, %"] if len(versions) > 1 else ["mean, %"]
    for column in ["samples", *means, "pass@k", "cut", "failed"]:
        table.add_column(column, justify="right")
    for name, s in last.items():
        k = max(s["pass_at"], key=int, default=None)
        table.add_row(
            name,
            f"{s['rows']:,} × {s['samples']}",
            *[_mean(scores) for scores in ([first[name], s] if len(versions) > 1 else [s])],
            f"pass@{k} {s['pass_at'][k]:.1%}" if k else "–",
            _number(s["cut_share"], ".1%"),
            f"{s['rows'] * s['samples'] - s['scored']:,}",
        )
    return table


def _mean(scores: dict[str, Any]) -> str:
    """Return the mean score and its standard error, in percent."""
    mean, error = (value if value is None else 100 * value for value in (scores["accuracy"], scores["standard_error"]))
    return f"{_number(mean, '.1f')} ± {_number(error, '.1f')}"


def _summary_rows(s: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("steps", str(s["steps"])),
        ("held-out accuracy", f"{_number(s['accuracy_before'], '.3f')} → {_number(s['accuracy_after'], '.3f')}"),
        ("staleness, at most", f"{s['staleness_max']}; the bound is {s['max_staleness']}"),
        ("log-prob gap, max", _number(s["logprob_gap_max"], ".1e")),
        ("samples trained", f"{s['samples_trained']} ({_number(s['samples_per_second'], '.1f')} a second)"),
        ("seconds of training", f"{s['seconds']:.0f}"),
        *_lost_groups(s),
    ]


def _lost_groups(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the groups that were sampled again or discarded, by reason. Empty if no group was."""
    counts = {"groups sampled again": s.get("groups_requeued"), "groups discarded": s.get("groups_discarded")}
    return [(name, ", ".join(f"{n} ({why})" for why, n in by.items())) for name, by in counts.items() if by]

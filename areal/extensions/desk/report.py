"""Writes the report of a run: one self-contained HTML file, with figures as inline SVG.

All its data comes from the run folder. Data that a run did not write because it ended early is left out.
"""

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.base.text import shown
from areal.extensions.desk.curves import COLOURS, SMOOTHED_FROM, linear_below, ramp, smoothed, upper_limit
from areal.extensions.desk.timeline import WAITING, WEIGHTS, WORK, TimelineSpan, activities, measured
from areal.observe.alert_inputs import alerts_of
from areal.storage.disk import replace
from areal.storage.record import Record, number_or_nan

# Placeholders in matplotlib's output, which the page replaces by its own text and line colours, in light and in dark.
INK, FAINT = "#010203", "#040506"
# An SVG file that stands alone takes no colours from a page: these are readable on white and on black.
PLAIN_INK, PLAIN_FAINT = "#7d8590", "#7d859055"
UPDATE_PARTS = {"pause": "#f2b98a", "load": COLOURS[WEIGHTS], "resume": "#9c4f10"}
# What the phases of a step are spent on, and their keys. The rest of a step is "other".
STEP_PARTS = {
    "training": ("fetch_seconds", "train_seconds"),
    "weights": ("snapshot_seconds", "save_seconds", "offload_seconds"),
    "waiting": ("trainer_wait_seconds", "publish_wait_seconds", "save_wait_seconds"),
}
STEP_COLOURS = (COLOURS[WORK], COLOURS[WEIGHTS], COLOURS[WAITING], "#c9c9c9")
WAITS = (COLOURS[WAITING], "#5f5f5f")
# Limits of the vertical axis.
FROM_0, SHARE = (0, None), (-0.03, 1.03)
LEGEND_COLUMNS = 5
# The length of the timeline, up to the end of the last step.
TIMELINE_SECONDS = 60.0
PAGE = Path(__file__).with_name("report.html")
# The folders in which a file or folder of this machine lies.
FOLDERS = re.compile(r"(?m)(?<=[ '\"])/(?:[^/\n]+/)+(?=[^/\n])")
# With more points than this, those under a smoothed curve are a faint line.
MOST_POINTS = 400
LOG_FROM = 10.0
# Values that are cut off are named, this many of them.
NAMED_CUTS = 3
PAIRS_SHOWN = 4


@dataclass(frozen=True)
class Panel:
    """One figure: `lines` are (label, x, y); `stack` are (label, y) at `steps`, each drawn on top of the one before."""

    title: str
    unit: str = ""
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]] = ()
    stack: Sequence[tuple[str, Sequence[float]]] = ()
    steps: Sequence[int] = ()
    bound: float = math.nan
    log: bool = False
    limits: tuple[float | None, float | None] = (None, None)
    colours: Sequence[str] = (COLOURS[WORK], COLOURS["second"])

    @property
    def values(self) -> list[float]:
        return [y for _, _, ys in self.lines for y in ys] + [y for _, ys in self.stack for y in ys]

    @property
    def empty(self) -> bool:
        return not any(map(math.isfinite, self.values))


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path. Raises UserError if the folder holds no run."""
    import jinja2

    run = Record(folder)
    figures = [(panel.title, draw(panel)) for panel in panels(run) if not panel.empty]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(PAGE.read_text(encoding="utf-8"))
    html = page.render(
        run=run,
        ending=_ending(run.summary),
        account=account(run),
        alerts=alerts_of(run),
        headlines=headlines(run.summary),
        forks=fork_lines([run]),
        figures=figures,
        timeline=draw_timeline(run),
        samples=run.sample_pairs()[:PAIRS_SHOWN],
        configuration=FOLDERS.sub("…/", run.config_text),
    )
    path = folder / "report.html"
    replace(path, html)
    return path


def write_figure(folder: Path, path: Path) -> None:
    """Draw the learning curve of the run in `folder`, and its staleness under the bound, into the SVG file `path`.

    Raises UserError if the folder holds no run, or a run without a step.
    """
    run = Record(folder)
    if not run.records:
        raise UserError(f"The run in {folder} has no step yet: draw its figure later.")
    accuracy = _accuracy(run.evaluations)
    learning = Panel(
        "Learning",
        lines=[("reward, mean of the batch", run.steps, run.series("reward_mean"))]
        + [(f"held-out accuracy {label}".strip(), x, y) for label, x, y in accuracy.lines if x],
        limits=(None, 1.0),
        colours=(COLOURS[WORK], COLOURS["held_out"], COLOURS["second"]),
    )
    (staleness,) = (panel for panel in panels(run) if panel.title == "Staleness")
    write_svg(path, "figure", lambda: figure_of(learning, staleness))


def write_svg(path: Path, salt: str, make: Callable[[], Any]) -> None:
    """Write a matplotlib figure as an SVG file that stands alone. salt: what its ids are made from."""
    svg = _svg(salt, make)
    path.write_text(svg.replace("currentColor", PLAIN_INK).replace("var(--faint)", PLAIN_FAINT), encoding="utf-8")


def fork_lines(runs: Iterable[Record]) -> list[str]:
    """Forks among these runs as a tree: a line for each run, below the one that it goes on from. Empty without any."""
    tree: dict[tuple[tuple[int, str], ...], str] = {}
    for run in runs:
        identity = run.records[-1].get("run", run.name) if run.records else run.name
        names = [*((origin.run, origin.name) for origin in run.origins), (identity, run.name)]
        path: tuple[tuple[int, str], ...] = ()
        for (each, name), step in zip(names, [0, *(origin.step for origin in run.origins)], strict=True):
            tree[*path, (step, each)] = "    " * len(path) + name + f", from step {step} on" * bool(step)
            path = (*path, (step, each))
    return [tree[path] for path in sorted(tree)] if any(len(path) > 1 for path in tree) else []


def account(run: Record) -> str:
    """What the run has done, in sentences: what it trained, from where to where, how stale, and what was lost."""
    summary, rewards = run.summary, run.series("reward_mean")
    if not rewards:
        return ""
    few = max(1, min(10, len(rewards) // 3))
    first, last = (sum(part) / few for part in (rewards[:few], rewards[-few:]))
    early, late = ("first step", "last") if few == 1 else (f"first {few} of them", f"last {few}")
    model = Path(run.settings.get("model", "The model")).name
    says = [
        f"{model} was trained for {_shown(summary, 'steps', ',.0f')} steps in "
        f"{_shown(summary, 'seconds', ',.0f')} s. Its mean reward was {first:.3f} in the {early} and "
        f"{last:.3f} in the {late}."
    ]
    if summary.get("accuracy_before") is not None and summary.get("accuracy_after") is not None:
        accuracy = [_shown(summary, f"accuracy_{when}", ".1%") for when in ("before", "after")]
        says.append(f"On rows that it never trained on, its accuracy went from {' to '.join(accuracy)}.")
    oldest, bound = (_shown(summary, key, "g") for key in ("staleness_max", "max_staleness"))
    versions = "version" if oldest == "1" else "versions"
    says.append(f"No group was more than {oldest} {versions} behind the weights that it trained; {bound} were allowed.")
    if (lost := summary.get("tokens_untrained_share")) is not None:
        says.append(f"{lost:.1%} of the generated tokens were not trained on.")
    return " ".join(says)


def headlines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers at the top of the report, as (name, value)."""
    accuracy = f"{_shown(summary, 'accuracy_before', '.1%')} → {_shown(summary, 'accuracy_after', '.1%')}"
    return [
        ("held-out accuracy, before → after", accuracy),
        *_headlines_of_benchmarks(summary.get("evaluations") or []),
        ("samples a second", _shown(summary, "samples_per_second", ",.1f")),
        (f"staleness, max (bound {_shown(summary, 'max_staleness', 'g')})", _shown(summary, "staleness_max", "g")),
        ("log-prob gap, max", _shown(summary, "logprob_gap_max", ".1e")),
        ("trainer idle", _shown(summary, "trainer_idle", ".1%")),
        ("training steps", _shown(summary, "steps", ",.0f")),
        ("samples trained", _shown(summary, "samples_trained", ",.0f")),
        ("tokens never trained on", _shown(summary, "tokens_untrained_share", ".1%")),
        ("seconds", _shown(summary, "seconds", ",.0f")),
    ]


def _headlines_of_benchmarks(evaluations: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    at: dict[str, list[str]] = {}
    for evaluation in sorted(evaluations, key=lambda evaluation: evaluation["version"]):
        for name, scores in (evaluation.get("benchmarks") or {}).items():
            at.setdefault(name, []).append(_shown(scores, "accuracy", ".1%"))
    return [(name, " → ".join(dict.fromkeys((shares[0], shares[-1])))) for name, shares in at.items()]


def _mean_and_max(key: str) -> dict[str, str]:
    return {"mean": f"{key}_mean", "max": f"{key}_max"}


def panels(run: Record) -> list[Panel]:
    """The figures of a run, in this order: learning, staleness, speed, stability."""
    steps, derived = run.steps, _derived_series(run)
    bound = number_or_nan(run.summary.get("max_staleness"))
    rewards = {"trained groups": "reward_mean", "all groups": "reward_mean_all"}
    idle = {"waiting for data": "waiting_share", "waiting to publish": "publishing_share"}
    updates = {part: f"{part}_seconds" for part in UPDATE_PARTS}

    def series(keys: Mapping[str, str] | str) -> list[tuple[str, list[float]]]:
        keys = {"": keys} if isinstance(keys, str) else keys
        return [(label, derived.get(key) or run.series(key)) for label, key in keys.items()]

    def lines(title: str, keys: Mapping[str, str] | str, unit: str = "", **options: Any) -> Panel:
        return Panel(title, unit, lines=[(label, steps, values) for label, values in series(keys)], **options)

    def stack(title: str, keys: Mapping[str, str], colours: Sequence[str]) -> Panel:
        return Panel(title, "s", stack=series(keys), steps=steps, colours=colours)

    return [
        lines("Reward, mean", rewards if run.filters else "reward_mean"),
        lines("Groups filtered, without signal", "groups_filtered" if run.filters else {}, limits=FROM_0),
        lines("Trained groups with signal, share", "mixed_groups", limits=SHARE),
        lines("Tokens generated per trained group with signal", "tokens_per_mixed_group", "tokens", limits=FROM_0),
        lines("Rows of which a prompt was admitted, share", "coverage", limits=SHARE),
        _accuracy(run.evaluations),
        _benchmarks(run.evaluations),
        lines("Staleness", _mean_and_max("staleness"), "versions", limits=FROM_0, bound=bound),
        _ages(run),
        lines("Throughput", {"generated": "generated", "trained": "trained"}, "tokens / s", limits=FROM_0),
        stack("Step time", {part: part for part in (*STEP_PARTS, "other")}, STEP_COLOURS),
        lines("Trainer idle, share", idle, limits=SHARE, colours=WAITS),
        lines("Completion length", _mean_and_max("completion_tokens"), "tokens", limits=FROM_0),
        lines("Share of completions cut at the limit", "cut_share", limits=SHARE),
        stack("Weight updates of all generators", updates, tuple(UPDATE_PARTS.values())),
        lines("Log-prob gap, engine and trainer", {"sampled": "logprob_gap", "probed": "engine_gap"}, log=True),
        lines("Importance weight", _mean_and_max("weight"), log=True),
        lines("Effective sample size, share", "effective_sample_size", limits=(0, 1.03)),
        lines("KL divergence", {"to behaviour": "kl_behaviour", "to reference": "kl_reference"}, "nats"),
        lines("KL divergence to the teacher", "kl_teacher", "nats"),
        lines("Agreement with the teacher", "teacher_agreement", limits=SHARE),
        lines("Variance that the critic explains, share", "explained_variance"),
        lines("Entropy", "entropy"),
        lines("Loss", "loss"),
        lines("Gradient norm", "grad_norm"),
        lines("Learning rate", "lr", limits=FROM_0),
        lines("Share of clipped tokens", "clip_fraction"),
    ]


def _derived_series(run: Record) -> dict[str, list[float]]:
    """The series that are computed from metrics."""
    seconds = run.series("step_seconds")
    # The trainer measures the parts and the master the whole step, so the parts may exceed the step: they are cut.
    parts, remaining = {}, seconds
    for part in reversed(STEP_PARTS):
        spent = [sum(filter(math.isfinite, values)) for values in zip(*map(run.series, STEP_PARTS[part]), strict=True)]
        parts[part] = list(map(min, remaining, spent))
        remaining = [rest - own for rest, own in zip(remaining, parts[part], strict=True)]
    return parts | {
        "other": remaining,
        "generated": _ratios(run.series("tokens_generated"), seconds),
        "trained": _ratios(run.series("tokens_trained"), seconds),
        "waiting_share": _ratios(list(map(min, run.series("trainer_wait_seconds"), seconds)), seconds),
        "publishing_share": _ratios(run.series("publish_wait_seconds"), seconds),
    }


def _accuracy(evaluations: Sequence[dict[str, Any]]) -> Panel:
    """By version: the mean score and, if rows have several samples, the share of rows that one of them solves."""
    versions = [evaluation["version"] for evaluation in evaluations]
    lines = [("", versions, [number_or_nan(evaluation.get("accuracy")) for evaluation in evaluations])]
    ks = {int(k) for evaluation in evaluations for k in evaluation.get("pass_at") or ()}
    if ks and (largest := max(ks)) > 1:
        solved = [number_or_nan((evaluation.get("pass_at") or {}).get(f"{largest}")) for evaluation in evaluations]
        lines = [("mean", *lines[0][1:]), (f"pass@{largest}", versions, solved)]
    return Panel("Held-out accuracy", lines=lines, limits=SHARE, colours=(COLOURS["held_out"], COLOURS["second"]))


def _benchmarks(evaluations: Sequence[dict[str, Any]]) -> Panel:
    """By version: the mean score of each benchmark."""
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.get("benchmarks") or ()))
    lines = []
    for name in names:
        at = [
            (evaluation["version"], evaluation["benchmarks"][name])
            for evaluation in evaluations
            if name in evaluation.get("benchmarks", {})
        ]
        lines.append((name, [version for version, _ in at], [number_or_nan(scores["accuracy"]) for _, scores in at]))
    return Panel("Benchmarks, mean score", lines=lines, limits=SHARE, colours=ramp(len(names)))


def draw(panel: Panel) -> str:
    """The panel as an SVG element in the page's colours."""
    return _svg(panel.title, lambda: figure_of(panel))


def draw_timeline(run: Record) -> str:
    """What each actor did in the last TIMELINE_SECONDS of training, as an SVG element; empty if nothing is recorded."""
    spans = timeline_of(run)
    return _svg("timeline", lambda: timeline_figure(spans)) if spans else ""


def timeline_of(run: Record) -> list[tuple[TimelineSpan, bool]]:
    """The spans in that time of all actors except the master, in the order of the actors' names: activities that an
    actor reported (False), and spans that it measured (True). `begin` is in seconds; 0 is the end of the last step."""
    candidates = [(span, False) for span in activities(run.events)]
    candidates += [(span, True) for span in measured(run.events, run.records, run.times)]
    end = run.times[-1] if run.times else 0.0
    spans = []
    for span, is_measured in candidates:
        begin, until = max(span.begin - end, -TIMELINE_SECONDS), min(span.end - end, 0.0)
        if until > begin and not span.actor.startswith("master"):
            spans.append((TimelineSpan(span.actor, span.kind, begin, until - begin), is_measured))
    return sorted(spans, key=lambda pair: pair[0].actor)


def timeline_figure(spans: Sequence[tuple[TimelineSpan, bool]]) -> Any:
    """A row for each actor: its reported activities in pale colours and, on top of them, the spans that it measured."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    actors = list(dict.fromkeys(span.actor for span, _ in spans))
    figure = Figure(figsize=(10, 0.9 + 0.3 * len(actors)), layout="constrained")
    axes = figure.add_subplot()
    for span, is_measured in spans:
        row, colour = len(actors) - actors.index(span.actor), COLOURS[span.purpose]
        height, alpha = (0.4, 1.0) if is_measured else (0.8, 0.35)
        axes.broken_barh([(span.begin, span.seconds)], (row - height / 2, height), facecolors=colour, alpha=alpha)
    axes.set_xlim(-TIMELINE_SECONDS, 0)
    axes.set_yticks(range(1, len(actors) + 1), [_label(actor) for actor in reversed(actors)])
    axes.set_xlabel("seconds, up to the end of the last step", color=INK)
    _style(axes, "x", ("bottom",))
    handles = [Patch(color=COLOURS[purpose], label=purpose) for purpose in (WORK, WEIGHTS, WAITING)]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, labelcolor=INK, fontsize=8
    )
    return figure


def _label(text: str) -> str:
    """The text as matplotlib shows it as it is, and not as a formula."""
    return shown(text).replace("$", r"\$")


def _svg(salt: str, make: Callable[[], Any]) -> str:
    """A figure as an SVG element, with the page's colours in place of INK and FAINT."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9}):
        figure = make()
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    # The ids are the same in every figure, but must be unique in a page.
    svg = re.sub(r'<g id="[^"]*">', "<g>", out.getvalue())
    return svg[svg.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--faint)")


def figure_of(*panels: Panel) -> Any:
    """The panels in rows of three, as a matplotlib figure."""
    from matplotlib.figure import Figure

    columns, rows = max(1, min(3, len(panels))), max(1, -(-len(panels) // 3))
    figure = Figure(figsize=(4.8 * columns, 2.7 * rows), layout="constrained")
    for place, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(rows, columns, place), panel)
    return figure


def figure_of_points(
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float, float]]]]], axis: str, colours: Sequence[str]
) -> Any:
    """Panels side by side, each a title and lines by label of points (x, y, half width of y's interval or nan)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(panels), 2.9), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for (label, points), colour in zip(lines.items(), itertools.cycle(colours)):
            x, y, errors = zip(*points, strict=True)
            axes.errorbar(x, y, errors, color=colour, label=_label(label) or None, marker="o", markersize=3, capsize=2)
        ticks = sorted({x for points in lines.values() for x, *_ in points})
        if ticks[0] >= 0 and ticks[-1] > 8 * (ticks[1] if len(ticks) > 1 and not ticks[0] else ticks[0]):
            axes.set_xscale("symlog", linthresh=next(x for x in ticks if x > 0))
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.set_title(title, loc="left", color=INK, fontsize=10)
        axes.set_xlabel(_label(axis), color=INK)
        _style(axes)
    return figure


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    _draw_stack(axes, panel)
    for (label, x, y), colour in zip(panel.lines, panel.colours, strict=False):
        _draw_line(axes, _label(label), x, y, colour)
    if math.isfinite(panel.bound):
        axes.axhline(panel.bound, color=INK, linestyle="--", linewidth=1, label="bound")
    if panel.limits != (None, None):  # else they would stay where the linear axis has them
        axes.set_ylim(*panel.limits)
    if panel.limits == FROM_0 and not math.isfinite(panel.bound):
        _cut_outliers(axes, [point for _, x, y in panel.lines for point in zip(y, x, strict=True)], panel.unit)
    if panel.log:
        _set_log_axis(axes, [value for value in panel.values if math.isfinite(value)])
    axes.set_title(panel.title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(panel.unit, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _style(axes)


def _draw_line(axes: Any, label: str, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """The smoothed curve over its faint points. A few points are marked and, more than two without a gap, joined."""
    points = [(place, value) for place, value in zip(x, y, strict=True) if math.isfinite(value)]
    if not points:
        return
    joined = len(points) == len(x) > 2
    x, y = zip(*points, strict=True)
    if len(x) < SMOOTHED_FROM:
        style = "-" if joined else "none"
        axes.plot(x, y, linestyle=style, color=colour, label=label or None, marker="o", markersize=3, linewidth=1.5)
        return
    look = {"linewidth": 0.6} if len(x) > MOST_POINTS else {"linestyle": "", "marker": "o", "markersize": 3}
    axes.plot(x, y, color=colour, alpha=0.4, markeredgewidth=0, **look)
    axes.plot(x, smoothed(y), color=colour, label=label or None, linewidth=1.8)


def _set_log_axis(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis, with a place for zeros if there are any; a linear one within a factor of LOG_FROM."""
    if min(values, default=0.0) > 0:
        axes.set_yscale("log" if max(values) > LOG_FROM * min(values) else "linear")
        return
    least = linear_below(values)
    axes.set_yscale("symlog", linthresh=least, linscale=0.4)
    top = 2 * max([*values, least])
    axes.set_yticks([0.0] + [tick for tick in axes.get_yticks() if least <= tick <= top])
    axes.set_ylim(-0.5 * least, top)


def _style(axes: Any, grid: str = "y", spines: Sequence[str] = ("left", "bottom")) -> None:
    """The page's colours, and above the figure a legend of what has a label."""
    axes.tick_params(colors=INK, which="both")
    axes.grid(axis=grid, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in spines)
        spine.set_color(INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=LEGEND_COLUMNS,
            borderaxespad=0,
            handlelength=1,
            columnspacing=1,
            handletextpad=0.4,
            frameon=False,
            labelcolor=INK,
            fontsize=8,
        )


def _ratios(parts: Sequence[float], totals: Sequence[float]) -> list[float]:
    return [part / total if total > 0 else math.nan for part, total in zip(parts, totals, strict=True)]


def _ages(run: Record) -> Panel:
    """For each staleness from 0 on: the number of groups that had it, at each step."""
    counts = [record.get("staleness_histogram") for record in run.records]
    histograms = [histogram if isinstance(histogram, list) else [] for histogram in counts]
    oldest = max(map(len, histograms), default=0)
    places = min(oldest, LEGEND_COLUMNS)
    labels = {round(place * (oldest - 1) / max(1, places - 1)) for place in range(places)}
    stack = [(f"{age}" if age in labels else "", [sum(h[age : age + 1]) for h in histograms]) for age in range(oldest)]
    return Panel("Groups by staleness", stack=stack, steps=run.steps, colours=ramp(oldest))


def _draw_stack(axes: Any, panel: Panel) -> None:
    base = [0.0] * len(panel.steps)
    edges = [step - 0.5 for step in panel.steps] + [step + 0.5 for step in panel.steps[-1:]]
    for (label, values), colour in zip(panel.stack, panel.colours, strict=False):
        top = [b + v for b, v in zip(base, values, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=label or None)
        base = top
    _cut_outliers(axes, list(zip(base, panel.steps, strict=True)), panel.unit)


def _cut_outliers(axes: Any, points: Sequence[tuple[float, float]], unit: str) -> None:
    """End the axis below outliers, and name them. points: (value, step)."""
    limit = upper_limit([value for value, _ in points])
    if not limit:
        return
    axes.set_ylim(0, limit)
    highest = sorted((point for point in points if point[0] > limit), reverse=True)[:NAMED_CUTS]
    names = "\n".join(f"step {step}: {value:{',.0f' if value >= 100 else '.2g'}} {unit}" for value, step in highest)
    axes.text(0.99, 0.98, f"↑ {names}", transform=axes.transAxes, ha="right", va="top", color=INK, fontsize=8)


def _shown(summary: dict[str, Any], key: str, form: str) -> str:
    value = summary.get(key)
    return format(value, form) if isinstance(value, int | float) else "–"


def _ending(summary: dict[str, Any]) -> str:
    if not summary:
        return "The run has not written a summary: it is still running, or it was killed."
    if summary.get("ok", True):
        return ""
    return f"The run ended early: {summary.get('reason') or 'no reason is recorded'}."

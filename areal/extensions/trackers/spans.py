"""The spans of a run for OpenTelemetry, made of the records in its folder.

    rl.loop               a step, from the commit before it to its own
      rl.train, rl.sync, areal.*  measurements of actors meanwhile: a span for each span of events.jsonl
    rl.sample             a trace of its own: from the permit of the group to the end of the training of the sample
      areal.permit            the group waits for a generator
      chat MODEL              the workflow generates tokens
      rl.reward               the workflow waits for scores; shown last, though a workflow may ask for some earlier
      rl.train                the training of the step, with a link to its rl.loop

Names and attributes follow the drafts of `rl.*` (open-telemetry/semantic-conventions-genai, issue 88) and `gen_ai.*`;
names missing in the drafts are `areal.*`. No span has a text of the run. Ids are digests of names, so a span sent twice
is a single span.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from areal.config import Config

# Work of the trainer and the generators on weights.
SYNC = {"snapshot", "write", "publish_wait", "pause", "load", "resume"}
STEP_NUMBERS = ("reward_mean", "loss", "groups_trained", "tokens_trained", "staleness_mean", "staleness_max")
COLUMNS = (
    *("step", "group", "sample", "fate", "reason", "turns", "prompt_tokens", "completion_tokens", "reward", "finish"),
    *("start_version", "staleness", "generators", "began", "seconds", "waited", "scoring"),
)
"""Columns of rollouts read by `SpanMaker.sample`."""

Values = Mapping[str, Any]
UNSET = Status()


class TrainedStep(NamedTuple):
    """The times of a step and of its training; seconds since 1970."""

    begin: float
    train_begin: float
    train_end: float
    end: float

    @classmethod
    def of(cls, record: Values) -> "TrainedStep":
        """Return the step of a record of metrics.jsonl. Three phases follow the training and end with the commit."""
        end = record["time"]
        trained = end - sum(record.get(f"{phase}_seconds") or 0.0 for phase in ("publish_wait", "snapshot", "offload"))
        began = trained - (record.get("train_seconds") or 0.0)
        return cls(min(began, end - (record.get("step_seconds") or 0.0)), began, trained, end)


class SpanMaker:
    """Makes the spans of a run. run: its identity. OTEL_TRACES_SAMPLER chooses some of the traces; `resource` has the
    values of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES."""

    def __init__(self, config: Config, run: str) -> None:
        # A folder gives only its name, not its path.
        self._model = Path(config.model).name if Path(config.model).is_absolute() else config.model
        named = {"service.name": "areal", "rl.system": "areal", "rl.run.id": f"{config.name}-{run}"}
        named |= {"rl.model.name": self._model, "rl.algorithm": config.trainer.objective}
        resource = Resource.create().merge(Resource(named)).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.resource, self._sampler, self._run = provider.resource, provider.sampler, run
        sampling = config.sampling
        self._request = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        self.steps: dict[int, TrainedStep] = {}
        self._numbers: list[int] = []
        self._ends: list[float] = []

    @property
    def until(self) -> float:
        """The time of the newest step's commit; 0 without a step."""
        return self._ends[-1] if self._ends else 0.0

    def step(self, record: Values) -> list[ReadableSpan]:
        """Return the span of a step, from its record in metrics.jsonl. Steps come in order."""
        number = record["step"]
        step = self.steps[number] = TrainedStep.of(record)
        self._numbers.append(number)
        self._ends.append(step.end)
        labels = {"rl.loop.iteration": number, **{f"areal.{name}": record.get(name) for name in STEP_NUMBERS}}
        return self._of_trace(f"step {number}", [("rl.loop", "rl.loop", step.begin, step.end, labels)])

    def event(self, event: Values) -> list[ReadableSpan]:
        """Return the span measured by an actor, in the trace of the step in which it began. If the step has no record
        yet, the span belongs to the step after the newest."""
        begin, what = event["time"], event["span"]
        place = bisect_left(self._ends, begin)
        number = self._numbers[place] if place < len(self._numbers) else max(self._numbers, default=0) + 1
        name = "rl.train" if what == "train" else "rl.sync" if what in SYNC else f"areal.{what.split()[0]}"
        labels = {"areal.actor": event["actor"], "areal.what": what, "rl.loop.iteration": number}
        key = f"{event['actor']} {what} {begin}"
        root = self._context(f"step {number}", "rl.loop") if number in self.steps else None
        return self._of_trace(f"step {number}", [(name, key, begin, begin + event["seconds"], labels)], root)

    def sample(self, branches: Sequence[Values]) -> list[ReadableSpan]:
        """Return the spans of a sample, from the rows of its rollout. A user's session has no times, so no spans."""
        row = branches[0]
        if row["began"] is None:
            return []
        step = self.steps.get(row["step"] or 0)
        began, end = row["began"], row["began"] + row["seconds"]
        permitted, scored = began - (row["waited"] or 0.0), max(began, end - (row["scoring"] or 0.0))
        trained = (max(end, step.train_begin), max(end, step.train_end)) if step else None
        labels = {"rl.sample.group": row["group"], "rl.sample.index": row["sample"]}
        of_step = labels | {"rl.loop.iteration": row["step"]}
        # Branches have tokens in common.
        tokens = {"input": row["prompt_tokens"], "output": row["completion_tokens"]} if len(branches) == 1 else {}
        root = {"areal.fate": row["fate"], "areal.staleness": row["staleness"], "areal.reason": row["reason"] or None}
        root |= {"rl.sample.turns": row["turns"]} | {
            f"rl.sample.{which}_tokens": count for which, count in tokens.items()
        }
        chat = {f"gen_ai.usage.{which}_tokens": count for which, count in tokens.items()}
        chat |= {"gen_ai.response.finish_reasons": (row["finish"],), "areal.generators": row["generators"]}
        chat |= {"areal.start_version": row["start_version"], **self._request}
        trace, name = f"sample {row['group']} {row['sample']}", f"chat {self._model}"
        status = Status(StatusCode.ERROR, row["reason"]) if row["fate"] == "discarded" else UNSET
        root_part = ("rl.sample", "rl.sample", permitted, trained[1] if trained else end, of_step | root)
        parts = [
            ("areal.permit", "permit", permitted, began, labels),
            (name, "chat", began, scored, labels | chat),
            ("rl.reward", "reward", scored, end, labels | {"rl.reward.score": row["reward"]}),
        ]
        spans = [*self._of_trace(trace, [root_part], status=status)]
        spans += self._of_trace(trace, parts, self._context(trace, "rl.sample"))
        if trained:
            link = Link(self._context(f"step {row['step']}", "rl.loop"))
            train = [("rl.train", "train", *trained, of_step)]
            spans += self._of_trace(trace, train, self._context(trace, "rl.sample"), links=(link,))
        return spans

    def _of_trace(
        self,
        trace: str,
        parts: Sequence[tuple[str, str, float, float, Values]],
        parent: SpanContext | None = None,
        status: Status = UNSET,
        links: Sequence[Link] = (),
    ) -> list[ReadableSpan]:
        """Return spans of a trace. Each part is a name, a key in the trace, beginning, end, and attributes, of which
        None is left out. Empty if the sampler drops the trace."""
        sampling = self._sampler.should_sample(None, _digest(f"{self._run} {trace}", 16), trace)
        if sampling.decision is Decision.DROP:
            return []
        return [
            ReadableSpan(
                name,
                self._context(trace, key),
                parent,
                self.resource,
                {label: value for label, value in labels.items() if value is not None},
                kind=SpanKind.CLIENT if key == "chat" else SpanKind.INTERNAL,
                status=status,
                links=links,
                start_time=round(begin * 1e9),
                end_time=round(end * 1e9),
            )
            for name, key, begin, end, labels in parts
        ]

    def _context(self, trace: str, key: str) -> SpanContext:
        trace = f"{self._run} {trace}"
        return SpanContext(_digest(trace, 16), _digest(f"{trace} {key}", 8), False, TraceFlags(TraceFlags.SAMPLED))


def _digest(text: str, size: int) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:size])

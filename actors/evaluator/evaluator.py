"""The evaluator: scores a policy version on held-out rows and benchmarks, with the generators and rewards of the run.

A result contains only tokens that the evaluated version sampled. If a token of another version arrives, the attempt
fails without a result. The master keeps the scores of finished rows. So the next attempt, also of a restarted
evaluator, samples only the remaining rows. The samples of benchmarks stay in the run folder with their completions
(`sample_file.py`), and no sample is made twice.

| loop, besides the loops of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| main | a version that is due | the generator that holds the version; the next evaluation |
| per sample | tokens, then the score | the row of the sample |
| report | 1 s | finished rows get into the master's journal |
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import structlog

from actors.evaluator.pass_at_k import scorecard
from actors.evaluator.sample_file import SampleFile
from actors.runtime.actor import first_error
from actors.runtime.directory import Directory
from actors.runtime.membership import Membership
from actors.sampling.flows import Choose
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Prompts, RowActor, Sampling
from actors.sampling.sessions import SampleSession
from areal.base.errors import explain
from areal.config import Config
from areal.config.data_section import BenchmarkConfig
from areal.config.engine_sections import SamplingConfig
from areal.config.role_sections import EvaluatorConfig
from areal.config.roles import ROLES
from areal.data.rows import Row, prompt_text
from areal.data.sources import open_benchmark
from areal.samples.trajectory import Trajectory
from areal.workflows.named_workflows import Workflow
from protocols.bus_errors import text_of
from protocols.evaluation_messages import (
    AskEvaluation,
    BenchmarkScores,
    EvaluationAbandoned,
    EvaluationAnswer,
    EvaluationDone,
    RowScores,
    RowsScored,
    Sample,
)
from protocols.membership_messages import LoadColumns, Member
from protocols.messages import Done

ASK_SECONDS = 20.0
# The result shows a sample of each of the first rows. The master keeps no texts, so these rows are always scored anew.
ROWS_SHOWN = 2
# Further shown rows, if this attempt has scored them and all shown texts stay within this many characters.
FURTHER_ROWS, SHOWN_CHARACTERS = 10, 20_000
# The interval of reports to the master about finished rows.
REPORT_SECONDS = 1.0
# The evaluation of the first or the last version is given up after this many failed attempts in a row without a newly
# finished row. The pause before the second attempt doubles before each further attempt.
ATTEMPTS, PAUSE_SECONDS = 3, 2.0
# Time for the news that the generator holds the version: an event may be lost until the next heartbeat.
NEWS_SECONDS = 10.0

log = structlog.get_logger()


class EvaluationFailed(RuntimeError):
    """The evaluation gives no result."""


class NotExact(SampleFailed):
    """Not all tokens can come, or have come, from the version under evaluation."""

    def __init__(self, why: str) -> None:
        super().__init__("workflow", why)


class HeldSample(SampleSession):
    """A sample of the version under evaluation. All calls go to the generator that holds the version."""

    def __init__(self, directory: Directory, holder: Member, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._directory = directory
        self._holder = holder

    async def place(self, choose: Choose) -> Member:
        if (now := _holding(self._directory, self._holder)) is None:
            raise NotExact(_gone(self._holder))
        return now


class Evaluation:
    """An attempt to evaluate `version`. `holder`: the only generator to sample on; None: any generator. Rows in
    `scored` were finished by an earlier attempt.

    Lists by row: `scores` of the scored samples, the total number of `tokens` in these samples, the number of
    `unfinished` samples, and `first`, this attempt's first scored sample. A row is finished with the last sample, if
    any sample has a score."""

    def __init__(self, due: EvaluationAnswer, version: int, rows: list[Row], samples: int) -> None:
        self.version = version
        self.holder = due.holder
        self.rows = rows
        self.scores: list[list[float]] = [[] for _ in rows]
        self.tokens = [0] * len(rows)
        self.unfinished = [samples] * len(rows)
        self.first: dict[int, Trajectory] = {}
        self._finished_rows: dict[int, tuple[list[float], int]] = {}
        for number, (scores, tokens) in (due.scored.by_row() if due.scored else {}).items():
            self.scores[number], self.tokens[number], self.unfinished[number] = scores, tokens, 0

    def add(self, number: int, sample: Trajectory | None) -> None:
        """Count a sample of a row; None: the sample could not be scored."""
        self.unfinished[number] -= 1
        if sample is not None:
            self.first.setdefault(number, sample)
            self.scores[number].append(sample.reward)
            self.tokens[number] += int(sample.sampled.sum())
        if number >= ROWS_SHOWN and self.scores[number] and not self.unfinished[number]:
            self._finished_rows[number] = self.scores[number], self.tokens[number]

    def take_finished_rows(self) -> dict[int, tuple[list[float], int]]:
        """Return the rows that were finished since the previous call."""
        rows, self._finished_rows = self._finished_rows, {}
        return rows


class Benchmark:
    """The samples of a benchmark at a version. `missing`: row and number of every sample that is not in the file."""

    def __init__(self, name: str, config: Config, rows: list[Row], version: int) -> None:
        settings = config.evaluator.benchmarks[name]
        self.sampling = SamplingConfig(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_new_tokens=settings.max_new_tokens or config.sampling.max_new_tokens,
            stop=config.sampling.stop,
        )
        self._settings = settings
        self._rows = rows
        self._file = SampleFile(config.folder, name, version, _settings_of(settings, self.sampling, config))
        samples = {(row.index, number): row for row in rows for number in range(settings.samples)}
        self._results: dict[tuple[int, int], tuple[float, int, bool]] = {}  # score, tokens, whether it was cut
        for sample in self._file.read():
            if (key := (sample["row"], sample["sample"])) in samples:
                self._results[key] = sample["score"], sample["tokens"], sample["finish"] == "length"
        self.missing = [(row, key[1]) for key, row in samples.items() if key not in self._results]
        self._unfinished = len(self.missing)
        self._samples = len(samples)

    def add(self, row: Row, number: int, sample: Trajectory | None) -> None:
        """Count a sample; None: the sample could not be scored."""
        self._unfinished -= 1
        if sample is not None:
            tokens = int(sample.sampled.sum())
            self._results[row.index, number] = sample.reward, tokens, sample.finish == "length"

    def keep(self, row: Row, number: int, sample: Trajectory, completion: str) -> None:
        """Write a sample into the file. May be called from any thread."""
        self._file.append(
            {
                "row": row.index,
                "sample": number,
                "prompt": prompt_text(row.prompt),
                "completion": completion,
                "answer": row.answer,
                "score": sample.reward,
                "finish": sample.finish,
                "tokens": int(sample.sampled.sum()),
            }
        )

    @property
    def progress(self) -> str:
        return f"{self._samples - self._unfinished} of {self._samples}"

    def scores(self) -> BenchmarkScores:
        count = len(self._results)
        by_row: dict[int, list[float]] = {row.index: [] for row in self._rows}
        for (index, _), (score, _, _) in self._results.items():
            by_row[index].append(score)
        tokens = sum(tokens for _, tokens, _ in self._results.values())
        return BenchmarkScores(
            **_scores_of(list(by_row.values()), tokens, self._settings),
            unfinished=self._unfinished,
            samples=self._settings.samples,
            scored=count,
            cut_share=sum(cut for _, _, cut in self._results.values()) / count if count else None,
        )


def _scores_of(by_row: list[list[float]], tokens: int, settings: EvaluatorConfig | BenchmarkConfig) -> dict[str, Any]:
    """Return the fields of `Scores`. by_row: the scores of each row's samples. tokens: the number of sampled tokens."""
    count = sum(map(len, by_row))
    card = scorecard(by_row, settings.samples, settings.pass_score) if count else None
    return {
        "accuracy": card and card.accuracy,
        "standard_error": card and card.standard_error,
        "pass_at": card.pass_at if card else {},
        "rows": len(by_row),
        "failed": card.failed if card else len(by_row),
        "completion_tokens_mean": tokens / count if count else None,
    }


def _holding(directory: Directory, holder: Member) -> Member | None:
    """Return the holder's entry in the directory; None unless it is healthy and still holds the version."""
    now = directory.members.get(holder.identity)
    return now if now is not None and now.state == "healthy" and now.held == holder.held else None


def _gone(holder: Member) -> str:
    assert holder.held is not None  # otherwise it would hold nothing
    return f"{holder.identity} has left, is unhealthy, or no longer holds version {holder.held.version}"


def _progress_of(benchmarks: Mapping[str, Benchmark]) -> str:
    return ", ".join(f"{name} {benchmark.progress}" for name, benchmark in benchmarks.items())


def _settings_of(benchmark: BenchmarkConfig, sampling: SamplingConfig, config: Config) -> dict[str, object]:
    """Return the settings under which samples of a benchmark are comparable: without numbers of samples and rows."""
    counts = {"size", "dates", "date_key", "samples", "pass_score", "every"}
    settings = benchmark.model_dump(mode="json", exclude=counts) | sampling.model_dump()
    return settings | config.rollout_manager.model_dump(mode="json", include={"workflow", "workflow_options"})


class Evaluator(RowActor):
    role = "evaluator"

    def __init__(self, member: Membership, sampling: Sampling, source: Prompts, workflow: Workflow) -> None:
        super().__init__(member, sampling, source, workflow)
        settings = self.config.evaluator
        conditions = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0, "min_p": 0.0}
        self._sampling = self.config.sampling.model_copy(update=conditions)
        rows = [self._source.heldout(i) for i in range(self.config.data.eval_size)]
        self._rows = [row for row in rows if not self.sampling.services.too_long(row)]
        if len(self._rows) < len(rows):
            log.warning("held-out rows are left out, as their prompts are too long", count=len(rows) - len(self._rows))
        self._benchmark_rows: dict[str, list[Row]] = {}

    def stats(self) -> dict[str, float]:
        return self.sampling.stats()

    def note_loads(self, loads: LoadColumns) -> None:
        self.sampling.dispatch.loads.note(loads)

    async def catch_up(self) -> None:
        for name, benchmark in self.config.evaluator.benchmarks.items():
            rows = await asyncio.to_thread(open_benchmark, name, benchmark, self.config.seed)
            self._benchmark_rows[name] = rows

    async def main(self) -> None:
        await self.member.become_healthy()
        failed: Counter[tuple[int, int]] = Counter()  # attempts by version and number of rows finished before
        while True:
            self.member.activity = "waiting for a version to evaluate"
            due = await self.member.ask_master(AskEvaluation(), EvaluationAnswer, ASK_SECONDS)
            if due.version is None:
                continue
            self.member.activity = f"evaluating version {due.version}"
            evaluation = Evaluation(due, due.version, self._rows, self.config.evaluator.samples)
            benchmarks = await asyncio.to_thread(self._benchmarks_at, due.version)
            try:
                result = await self._evaluate(evaluation, benchmarks)
            except (EvaluationFailed, NotExact) as error:
                progress = due.version, len(due.scored.rows) if due.scored else 0
                failed[progress] += 1
                log.warning("the evaluation failed", version=due.version, attempt=failed[progress], why=str(error))
                # A version in between is not tried again: the next version that is due follows soon.
                if due.version in (0, self.config.steps) and failed[progress] < ATTEMPTS:
                    await asyncio.sleep(PAUSE_SECONDS * 2 ** (failed[progress] - 1))
                    continue
                await self.member.ask_master(EvaluationAbandoned(version=due.version, reason=text_of(error)), Done)
            else:
                await self.member.ask_master(result, Done)

    def _benchmarks_at(self, version: int) -> dict[str, Benchmark]:
        """Return the benchmarks that are due at a version."""
        return {
            name: Benchmark(name, self.config, rows, version)
            for name, rows in self._benchmark_rows.items()
            if version == self.config.steps or not version % self.config.evaluator.benchmarks[name].every
        }

    async def _evaluate(self, evaluation: Evaluation, benchmarks: Mapping[str, Benchmark]) -> EvaluationDone:
        """Evaluate a version, for at most `evaluator.timeout_seconds`. Raises EvaluationFailed and NotExact."""
        if holder := evaluation.holder:
            with explain(TimeoutError, _gone(holder), NotExact):
                async with asyncio.timeout(NEWS_SECONDS):
                    await self.directory.until(lambda: _holding(self.directory, holder))
        else:
            needed = [role for role in ("generator", "reward") if ROLES[role].processes(self.config)]
            await self.directory.until(lambda: all(map(self.directory.with_role, needed)))
        loop = asyncio.get_running_loop()
        began, version = loop.time(), evaluation.version
        try:
            async with asyncio.timeout(self.config.evaluator.timeout_seconds):
                await self._sample_all(evaluation, benchmarks)
        except TimeoutError:
            unfinished = sum(evaluation.unfinished)
            log.warning(
                "the evaluation reached evaluator.timeout_seconds",
                version=version,
                unfinished=unfinished,
                benchmarks=_progress_of(benchmarks),
            )
        self.member.took(f"evaluation of version {version}", began, loop.time() - began)
        return self._result(evaluation, benchmarks)

    async def _sample_all(self, evaluation: Evaluation, benchmarks: Mapping[str, Benchmark]) -> None:
        """Sample and score all unfinished samples, and report finished rows to the master. Raises NotExact."""
        home = evaluation.holder
        # Generators that join later take a share of the samples, too.
        generators = 1 if home else max(len(self.directory.with_role("generator")), self.config.generator.count)
        gate = asyncio.Semaphore(generators * self.config.generator.max_concurrent_rollouts)

        async def take_sample(row: Row, sampling: SamplingConfig) -> Trajectory | None:
            async with gate:
                return await self._sample(row, sampling, evaluation.version, home)

        async def sample_heldout(number: int) -> None:
            evaluation.add(number, await take_sample(evaluation.rows[number], self._sampling))

        async def sample_benchmark(name: str, row: Row, number: int) -> None:
            benchmark = benchmarks[name]
            trajectory = await take_sample(row, benchmark.sampling)
            if trajectory:
                text = _texts(self.sampling.services.tokenizer, trajectory)[1]
                await self.member.on_disk("samples of a benchmark", benchmark.keep, row, number, trajectory, text)
            benchmark.add(row, number, trajectory)
            self.member.activity = f"evaluating version {evaluation.version}: {_progress_of(benchmarks)}"

        try:
            async with asyncio.TaskGroup() as tasks:
                reports = tasks.create_task(self._report(evaluation))
                async with asyncio.TaskGroup() as samples:
                    for number, unfinished in enumerate(evaluation.unfinished):
                        for _ in range(unfinished):
                            samples.create_task(sample_heldout(number))
                    for name, benchmark in benchmarks.items():
                        for row, number in benchmark.missing:
                            samples.create_task(sample_benchmark(name, row, number))
                reports.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _report(self, evaluation: Evaluation) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if rows := evaluation.take_finished_rows():
                await self.member.ask_master(RowsScored(version=evaluation.version, scored=RowScores.of(rows)), Done)

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        return await self.sampling.run_workflow(session, self._workflow, row)

    async def _sample(
        self, row: Row, sampling: SamplingConfig, version: int, holder: Member | None
    ) -> Trajectory | None:
        """Return a scored sample, or None if scoring failed: a failure is not a score of 0. Raises NotExact."""
        home = holder or await self.sampling.dispatch.choose("generator", min_version=version)
        make = functools.partial(HeldSample, self.directory, holder) if holder else SampleSession
        session = make(
            self.sampling.services, row, sampling, version, home=home, slot=self.sampling.dispatch.loads.slot_at(home)
        )
        try:
            sample = await self.run_workflow(session, row)
        except NotExact:
            raise
        except SampleFailed as error:
            log.warning("not scored", row=row.index, error=str(error))
            return None
        if foreign := set(sample.versions[sample.sampled].tolist()) - {version}:
            raise NotExact(f"the evaluation of version {version} received tokens of versions {sorted(foreign)}")
        return sample

    def _result(self, evaluation: Evaluation, benchmarks: Mapping[str, Benchmark]) -> EvaluationDone:
        """Return the result for the master. Raises EvaluationFailed if no sample was scored."""
        rows = evaluation.rows
        solved = {name: benchmark.scores() for name, benchmark in benchmarks.items()}
        if not any(evaluation.scores) and (rows or not any(scores.scored for scores in solved.values())):
            what = f"the {len(rows)} held-out rows" if rows else f"the rows of {', '.join(solved)}"
            raise EvaluationFailed(f"none of {what} could be scored at version {evaluation.version}")
        return EvaluationDone(
            version=evaluation.version,
            **_scores_of(evaluation.scores, sum(evaluation.tokens), self.config.evaluator),
            unfinished=sum(evaluation.unfinished),
            samples=tuple(self._examples(evaluation)),
            benchmarks=solved,
        )

    def _examples(self, evaluation: Evaluation) -> Iterator[Sample]:
        characters = 0
        for number in sorted(evaluation.first.keys() & range(ROWS_SHOWN + FURTHER_ROWS)):
            row, sample = evaluation.rows[number], evaluation.first[number]
            prompt, completion = _texts(self.sampling.services.tokenizer, sample)
            characters += len(prompt) + len(completion)
            if number < ROWS_SHOWN or characters <= SHOWN_CHARACTERS:
                yield Sample(prompt=prompt, completion=completion, answer=row.answer, score=sample.reward)


def _texts(tokenizer: Any, sample: Trajectory) -> tuple[str, str]:
    """Return the text before the first sampled token, and the text from the first sampled token on."""
    first = int(sample.sampled.argmax())
    prompt, completion = (
        tokenizer.decode(part, skip_special_tokens=True) for part in (sample.tokens[:first], sample.tokens[first:])
    )
    return prompt, completion

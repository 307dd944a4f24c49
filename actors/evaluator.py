"""The evaluator: scores a version on the held-out rows, through the same generators and rewards."""

from __future__ import annotations

import asyncio

import structlog

from actors.sessions import SampleFailed, Sampler, SampleSession
from areal.data import Row
from protocols.messages import AskEvaluation, Done, EvaluationAnswer, EvaluationDone, Sample

ASK_SECONDS = 20.0
SAMPLES_SHOWN = 2

log = structlog.get_logger()


class Evaluator(Sampler):
    role = "evaluator"

    async def setup(self) -> None:
        await super().setup()
        self._sampling = self.config.sampling.model_copy(update={"temperature": self.config.evaluator.temperature})

    async def main(self) -> None:
        await self.become_healthy()
        while True:
            self.activity = "idle"
            due = await self.ask_master(AskEvaluation(), EvaluationAnswer, ASK_SECONDS)
            if due.version is not None:
                self.activity = f"evaluating version {due.version}"
                await self.until(lambda: bool(self.with_role("generator") and self.with_role("reward")))
                done = await self._evaluate_in_time(due.version)
                await self.ask_master(done, Done)

    async def _evaluate_in_time(self, version: int) -> EvaluationDone:
        limit = self.config.evaluator.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                return await self._evaluate(version)
        except TimeoutError:
            raise RuntimeError(
                f"the evaluation of version {version} took more than evaluator.timeout_seconds, {limit:g}"
            ) from None

    async def _evaluate(self, version: int) -> EvaluationDone:
        generators = len(self.with_role("generator"))
        gate = asyncio.Semaphore(generators * self.config.generator.max_concurrent_rollouts)
        rows = [self._source.heldout(i) for i in range(self.config.data.eval_size)]
        results = await asyncio.gather(*(self._sample(gate, row, version) for row in rows))
        samples = [sample for sample in results if sample is not None]
        if not samples:
            raise RuntimeError(f"not one of {len(rows)} held-out completions of version {version} could be scored")
        return EvaluationDone(
            version=version,
            accuracy=sum(sample.score for sample in samples) / len(samples),
            rows=len(rows),
            failed=len(rows) - len(samples),
            samples=tuple(samples[:SAMPLES_SHOWN]),
        )

    async def _sample(self, gate: asyncio.Semaphore, row: Row, version: int) -> Sample | None:
        """None where the completion could not be scored: that is a failure, not a 0."""
        async with gate:
            home = await self._router.choose("generator")
            session = SampleSession(self._router, self._tokenizer, row, self._sampling, version, home)
            try:
                with self._router.using(home):
                    done = await self.run_workflow(session, row)
            except SampleFailed as error:
                log.warning("not scored", row=row.index, error=str(error))
                return None
        first = int(done.sampled.argmax())
        text = [
            self._tokenizer.decode(part, skip_special_tokens=True)
            for part in (done.tokens[:first], done.tokens[first:])
        ]
        return Sample(prompt=text[0], completion=text[1], answer=row.answer, score=done.reward)

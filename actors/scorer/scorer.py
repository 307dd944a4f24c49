"""The scorer: a frozen model by name, on a vLLM engine. A teacher or a reference gives log-probs of the policy's
tokens. A reward model or a judge scores completions.

Like rewards, scorers join and leave at any time, and jobs come on flows. A row that the engine cannot take is refused,
never given a made-up result. If the engine dies, the actor ends with it, and another scorer gets the rows.

| loop, besides the loops of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| per row | the engine | the flow of the asker |
| per flow | results of rows | the samples of a manager |
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from jinja2 import TemplateError

from actors.runtime.actor import handles
from actors.runtime.membership import Membership
from actors.sampling.serving import Serving
from actors.scorer.run_judges import judge_by
from areal.base.errors import explain
from areal.config.engine_sections import SamplingConfig
from areal.config.scoring import SCORER
from areal.data.rows import chat_of
from areal.generation.engine_process import EngineStats
from areal.generation.generation_engine import GenerationEngine
from areal.rewards.functions import Result, RewardError, as_score
from areal.samples.table import Generation
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import TokenScores
from areal.workflows.conversation import Conversation, user
from protocols.bus_errors import RefusedError
from protocols.messages import Completion, Done, JobFailed, Message, Scored, slices
from protocols.scorer_messages import ScoreTokens, TokensScored
from protocols.transport import Request

T = TypeVar("T")


class FrozenModel(Protocol):
    """The interface of the engine of a scorer (areal.generation.generation_engine.GenerationEngine)."""

    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores: ...
    async def classify(self, request_id: str, tokens: Sequence[int], activation: bool) -> np.ndarray: ...
    def generate(
        self, request_id: str, tokens: Sequence[int], sampling: SamplingConfig
    ) -> AsyncGenerator[Generation, None]: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...


class Scorer(Serving):
    role = "scorer"

    @classmethod
    async def start(
        cls,
        member: Membership,
        name: str,
        start_engine: Callable[..., Awaitable[FrozenModel]] = GenerationEngine.start,
        load_tokenizer: Callable[[str], Any] = load_tokenizer,
    ) -> Self:
        """name: of the served scorer, a key of the run's `scorers`."""
        scorer = member.config.scorers[name]
        member.activity = "starting the engine"
        tokenizer = None if scorer.kind == "logprobs" else await asyncio.to_thread(load_tokenizer, scorer.model)
        engine = await start_engine(Path(scorer.model), scorer.engine, version=0, seed=member.engine_seed)
        member.used.push_async_callback(engine.close)
        return cls(member, name, engine, tokenizer)

    def __init__(self, member: Membership, name: str, engine: FrozenModel, tokenizer: Any) -> None:
        """tokenizer: the tokenizer of the model; None if the scorer gives log-probs."""
        super().__init__(member, (name,))
        self._name = name
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = self.config.scorers[name]
        self._requests = itertools.count()
        self._moves = member.works.unless_other("score", self._steps)  # for all rows
        rewards = [reward for reward, url in self.config.judges.items() if url == f"{SCORER}{name}"]
        self._judges = {name: judge_by(self._answer, name, self.config.reward.options[name]) for name in rewards}

    async def main(self) -> None:
        await self.member.become_healthy()
        self.member.activity = f"scoring as {self._name}"

    def size(self, result: "_ScoredRow | Scored") -> int:
        if isinstance(result, Scored):
            return 64
        scores = result.scores
        return 16 + scores.logprobs.nbytes + scores.top_tokens.nbytes + scores.top_logprobs.nbytes

    def part(self, results: list[Any], failed: list[JobFailed]) -> Message:
        if self._settings.kind != "logprobs":
            return super().part(results, failed)
        scores = [row.scores for row in results]
        return TokensScored(
            jobs=np.array([row.job for row in results], np.int64),
            counts=np.array([len(score.logprobs) for score in scores], np.int32),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(score.logprobs for score in scores)]),
            top_tokens=np.concatenate([np.zeros(0, np.int32), *(score.top_tokens.ravel() for score in scores)]),
            top_logprobs=np.concatenate([np.zeros(0, np.float32), *(score.top_logprobs.ravel() for score in scores)]),
            failed=tuple(failed),
        )

    @handles(ScoreTokens)
    async def score_tokens(self, request: Request[ScoreTokens]) -> Done:
        message = request.message
        self._check(message.scorer, "logprobs")
        rows = {
            job: functools.partial(self._score, f"{request.owner} {job}", job, message.tokens[places].tolist())
            for job, places in zip(message.jobs.tolist(), slices(message.counts), strict=True)
        }
        return self.begin(request, message.flow, rows)

    async def _score(self, key: str, job: int, tokens: list[int], add: "Callable[[_ScoredRow], None]") -> None:
        """Score a row. key: the row's name in the engine. Raises RefusedError, or EngineError if the engine died."""
        top_k = self.config.scorer_uses.top_k(self._name)
        add(_ScoredRow(job, await self._wait_for_engine(self._engine.score(key, tokens, top_k))))

    async def score_completions(
        self, key: str, completion: Completion, row: Mapping[str, Any], add: Callable[[Scored], None]
    ) -> None:
        """The part `tokens` of a result counts tokens read and written. Raises as `_score` does."""
        judge = self._judges.get(completion.function)
        self._check(self._name if judge else completion.function, "judge" if judge else "reward_model")
        if judge:
            call = judge.call(completion.prompt, completion.completions, row)
            results = judge.results(await self._wait_for_engine(call), completion.completions)
        else:
            results = [await self._classify(key, completion, row)]
        scores, parts = zip(*results, strict=True)
        add(Scored(job=completion.job, scores=scores, parts=parts))

    async def _classify(self, key: str, completion: Completion, row: Mapping[str, Any]) -> Result:
        # Templates and tokenizers may raise anything.
        with explain(Exception, f"{self._name} cannot read the completion: {{why}}", RefusedError):
            (text,) = completion.completions
            tokens = self._tokens(completion.prompt, text, row)
        outputs = await self._wait_for_engine(self._engine.classify(key, tokens, self._settings.activation))
        with explain(
            (IndexError, RewardError), f"{self._name} gives no output {self._settings.output}: {{why}}", RefusedError
        ):
            score = as_score(float(outputs[self._settings.output]))
        return Result(score, {"tokens": len(tokens)})

    async def _answer(self, sampling: SamplingConfig, text: str) -> tuple[str, int, bool]:
        """As areal.extensions.judges.judge.Answer. Raises the engine's errors."""
        prompt = Conversation(self._tokenizer).prompt([user(text)])
        parts = [part async for part in self._engine.generate(f"{next(self._requests)}", prompt, sampling)]
        tokens = [token for part in parts for token in part.tokens.tolist()]
        written = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return written, len(prompt) + len(tokens), parts[-1].finish == "length"

    def _tokens(self, prompt: str, completion: str, row: Mapping[str, Any]) -> list[int]:
        """Return the tokens that a reward model reads."""
        if not self._settings.chat:
            return list(self._tokenizer.encode(prompt + completion))
        text = self._tokenizer.apply_chat_template(chat_of(prompt, completion, row), tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def _wait_for_engine(self, result: Awaitable[T]) -> T:
        """Return a result of the engine. Raises RefusedError for input that the engine cannot take."""
        try:
            with self.member.working("scoring", "score", self._moves):
                computed = await result
        except (ValueError, RewardError, TemplateError) as error:
            self._failed += 1
            raise RefusedError(str(error)) from None
        self._scored += 1
        return computed

    def _check(self, name: str, kind: str) -> None:
        """Raises RefusedError if this actor does not serve the name, or serves another kind."""
        self.check_served(name)
        if self._settings.kind != kind:
            raise RefusedError(f"the scorer {name!r} is of kind {self._settings.kind}")

    def _steps(self) -> float:
        """Evidence of work: a number that grows while the engine computes."""
        return float(self._engine.stats().steps)


class _ScoredRow(NamedTuple):
    """The scores of a row of tokens."""

    job: int
    scores: TokenScores

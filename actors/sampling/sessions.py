"""The session of a sample: the methods for the workflow, and the sampled calls."""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from operator import index
from typing import Any, NamedTuple

import numpy as np

from actors.sampling.group_scores import GroupScores
from actors.sampling.jobs import Call, SampleFailed, SampleState
from actors.sampling.own_code import OwnCode
from actors.sampling.services import Services
from areal.base.errors import UserError, explain
from areal.config.engine_sections import SamplingConfig
from areal.data.rows import Row, prompt_text
from areal.rewards.functions import all_scored, combined
from areal.samples.pictures import find
from areal.samples.table import Generation, Tokens
from areal.samples.trajectory import Trajectory
from areal.storage.saved_calls import NO_LIMIT, SavedCall, digest_of
from areal.workflows.chat_templates import Message, parts_of
from areal.workflows.forest import Forest
from areal.workflows.turn_ends import Keep, first_of, keep_until_text
from protocols.membership_messages import Member

NO_CHANGES: Mapping[str, float] = {}


class SampleSession(SampleState):
    """The session that a workflow gets for a sample (areal.workflows.Session).

    rewards: weights that replace or join the configuration's. home: the generator on which all samples of the group
    start, because they share the prompt prefix. `running`: calls in progress. `forest`: the trained calls.
    `reward_parts`: the parts of the last score. `scoring_seconds`: the time spent on all scores.

    `saved_calls`: calls of an earlier attempt, from which calls with the same prompts continue. `save`: begins to save
    the calls so far; called when `save_every` tokens are `unsaved`, unless the last save still runs. `group`: scores
    the sample with its group; None: rewards of groups score a group of this sample alone.
    """

    save: Callable[[], asyncio.Task[None]]
    save_every: float = math.inf
    unsaved = 0
    scoring_seconds = 0.0
    _saving: asyncio.Task[None] | None = None
    group: GroupScores | None = None

    def __init__(
        self, services: Services, row: Row, sampling: SamplingConfig, min_version: int = 0, *,
        home: Member | None = None, slot: ExitStack | None = None,
        on_start: Callable[[int], None] = lambda version: None,
        rewards: Mapping[str, float] = NO_CHANGES,
    ) -> None:  # fmt: skip
        super().__init__(sampling, min_version, home, slot, on_start)
        self._changed_weights = rewards
        self.tokenizer = services.tokenizer
        self._services = services
        self._row = row
        messages = [] if isinstance(row.prompt, str) or not row.pictures else row.prompt
        self._of_row = parts_of(messages)
        self.shown: Mapping[str, Message] = {part["digest"]: part for part in self._of_row}
        self.pictures = {part["digest"]: file for part, file in zip(self._of_row, row.pictures, strict=True)}
        self.reward_parts: dict[str, float] = {}
        self._of_agents: dict[str, list[float]] = {}  # rewards of an agent, by name
        self.running: dict[Call, _CallKey] = {}
        self.saved_calls: list[SavedCall] = []
        self._finished: list[_CallKey] = []  # for each of `calls`
        self._numbers = itertools.count()
        self.forest = Forest()
        self.own_code = OwnCode(services)

    def show(self, content: bytes) -> Message:
        """See areal.workflows.Session."""
        with explain(UserError, "{why}", ValueError):
            find("check")(self._services.config)
        part: Message = find("part")(content)
        self.pictures = {**self.pictures, part["digest"]: content}
        self.shown = {**self.shown, part["digest"]: part}
        return part

    async def generate(
        self,
        tokens: Tokens,
        max_new_tokens: int | None = None,
        keep: Keep | None = None,
        pictures: Sequence[Message] | None = None,
    ) -> Generation:
        """Sample a completion of the prompt `tokens`, on generator after generator if necessary. The completion ends
        where `keep` or `sampling.stop` ends it. Calls at the same time run at the same time.

        max_new_tokens: a limit for this call, besides the sample's own limit over all calls. keep: see `Call`.
        pictures: see areal.workflows.Session. Raises SampleFailed if a generator refuses the first prompt of the
        sample, or if the placeholders among the tokens do not match the pictures.
        """
        prompt, parts = _row(tokens), self._of_row if pictures is None else pictures
        try:
            column = find("sight")(self._services.config.model).column(prompt, parts) if parts else None
        except ValueError as error:
            raise SampleFailed("workflow", str(error)) from None
        names = () if column is None else [part["digest"] for part in parts]
        if not self.pictures.keys() >= {*names}:
            raise SampleFailed("workflow", "a picture is neither of the row nor of session.show, which takes its file")
        limit = self.room if max_new_tokens is None else min(self.room, index(max_new_tokens))
        if self.sampling.stop:
            keep = first_of(keep, keep_until_text(self.tokenizer, self.sampling.stop))
        call = Call(self, prompt, limit, keep, names)
        if limit <= 0:
            return call.completion("length")
        of_call = NO_LIMIT if max_new_tokens is None else max_new_tokens
        key = _CallKey(next(self._numbers), digest_of(prompt, names), of_call)
        self.running[call] = key
        try:
            sampled = self._begin(call, key)
            if sampled is None:
                with self.own_code.waiting():
                    sampled = await self._services.dispatch.run(call)
        finally:
            del self.running[call]
        if len(sampled.tokens):
            self.forest.add(prompt, sampled, column)
            self._finished.append(key)
        return sampled

    def _begin(self, call: Call, key: "_CallKey") -> Generation | None:
        """Begin the call with saved tokens of an earlier attempt. Returns the completion if the tokens complete it."""
        for number, saved in enumerate(self.saved_calls):
            tokens, finish = len(saved.sampled), saved.sampled.finish
            fits = tokens + (finish is None) <= call.remaining
            if fits and (saved.prompt, saved.limit) == (key.prompt, key.limit):
                del self.saved_calls[number]
                self.unsaved -= tokens  # the tokens are counted now
                return call.add(saved.sampled, finish)
        return None

    def count(self, versions: np.ndarray) -> None:
        super().count(versions)
        self.unsaved += len(versions)
        if self.unsaved >= self.save_every and (self._saving is None or self._saving.done()):
            self._saving = self.save()

    async def save_rest(self) -> None:
        """Begin to save all calls so far, once the last save has ended."""
        if self._saving is not None:
            await asyncio.wait([self._saving])
        if self.unsaved:
            self.save_every = 1
            self._saving = self.save()

    def calls_so_far(self) -> list[SavedCall]:
        """Return all calls with tokens, in the order in which they began, and then the remaining `saved_calls`."""
        calls = {
            key.number: SavedCall(key.prompt, key.limit, call)
            for key, call in zip(self._finished, self.calls, strict=True)
        }
        for call, key in self.running.items():
            if call.sampled:
                calls[key.number] = SavedCall(key.prompt, key.limit, call.completion(call.finish))
        return [*(calls[number] for number in sorted(calls)), *self.saved_calls]

    def reward(self, call: Generation, value: float) -> None:
        self.forest.reward(call, value)

    def credit(self, calls: Sequence[Generation], value: float | None, agent: str = "") -> None:
        for call in calls:
            self.forest.credit(call, value, agent)
        if agent and value is not None:
            of_agent = self._of_agents.setdefault(agent, [])
            of_agent.append(value)
            self.reward_parts[agent] = sum(of_agent) / len(of_agent)

    def trajectory(self, reward: float | None = None) -> Trajectory:
        settings = self._services.config.reward
        return self.forest.trajectory(reward, settings.credit, settings.turn_discount)

    @property
    def calls(self) -> Sequence[Generation]:
        return self.forest.calls

    def close(self) -> None:
        """End the calls in progress, and stop counting towards any generator's load."""
        self.closed = True
        if self._saving is not None:
            self._saving.cancel()
        for call in self.running:
            call.abort()
        self.slot.close()

    async def logprobs(self, scorer: str, tokens: Tokens) -> np.ndarray:
        """See areal.workflows.Session. Raises SampleFailed."""
        if scorer not in (names := self._services.config.scorer_uses.logprobs):
            known = ", ".join(names) or "none"
            raise SampleFailed("workflow", f"no scorer {scorer!r} gives log-probs: scorers has {known} that does")
        with self.own_code.waiting():
            return (await self._services.rewards.score_tokens(scorer, _row(tokens))).logprobs

    async def run_python(self, code: str) -> str:
        """Return the output of the code, errors included. Raises SandboxError if the sandbox itself fails."""
        with self.own_code.waiting():
            return str(await self.tool("python").run(code))

    def tool(self, name: str) -> Any:
        return self._services.tools[name]

    @property
    def sandboxes(self) -> Any:
        return self.tool("sandboxes")

    def endpoint(self) -> AbstractAsyncContextManager[Any]:
        endpoint: AbstractAsyncContextManager[Any] = self.tool("endpoint").serve(self)
        return endpoint

    async def score(self, completion: str, tokens: Tokens | None = None, reward: str | None = None) -> float:
        """Return the weighted sum of the row's rewards for this completion, or the score of `reward` alone. Raises
        SampleFailed if a reward failed on every attempt."""
        services, row = self._services, self._row
        weights = {reward: 1.0} if reward else services.weights(row, self._changed_weights)
        if reward and services.of_groups(weights):
            raise SampleFailed("workflow", f"the reward {reward!r} scores whole groups: it cannot be asked alone")
        if not weights and services.config.rollout_manager.gives_rewards:
            raise SampleFailed("workflow", "the workflow gave no reward, and the run has none: set reward.functions")
        if not isinstance(completion, str):
            raise TypeError(f"session.score takes a completion as text, not of type {type(completion).__name__}")
        prompt, own_tokens = prompt_text(row.prompt), None if tokens is None else _row(tokens)
        began = asyncio.get_running_loop().time()
        with self.own_code.waiting():
            later = services.of_groups(weights) if self.group else []
            results = await all_scored(
                [name for name in weights if name not in later],
                lambda name: services.rewards.score(name, prompt, [completion], row.fields, own_tokens),
            )
            of_sample = {name: result for name, (result,) in results.items()}
            if self.group and later:
                of_sample |= await self.group.score(self, later, completion)
        self.scoring_seconds += asyncio.get_running_loop().time() - began
        score, parts = combined(weights, of_sample)
        self.reward_parts |= parts | ({reward: score} if reward else {})
        return score


def _row(tokens: Tokens) -> np.ndarray:
    """Return int32 [n]. Raises ValueError for other values, which no message could carry."""
    row = np.asarray(tokens, np.int32)
    if row.ndim != 1:
        raise ValueError(f"tokens are given in the shape {row.shape}: give one row of them, [n]")
    return row


class _CallKey(NamedTuple):
    """The key of a call: the number in the sample, and the fields of a SavedCall."""

    number: int
    prompt: bytes
    limit: int

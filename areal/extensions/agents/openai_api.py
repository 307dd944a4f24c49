"""A sample in the format of OpenAI's API: answers an agent's calls, in one conversation or in several.

Further protocols are translations: of a request into a `ChatRequest`, and of the `Answer` into a `Reply`.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import numpy as np
import structlog
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from areal.base.errors import UserError, explain
from areal.config import Config
from areal.config.engine_sections import SamplingConfig
from areal.data.prompt_forms import read_part
from areal.extensions.agents.parsers import Parsed, Parsers, cut, first_mistake
from areal.samples.pictures import find
from areal.samples.table import Generation
from areal.workflows.chat_templates import parts_of
from areal.workflows.conversation import THINKING, Conversation, compared
from areal.workflows.session import Session
from areal.workflows.turn_ends import GrownText, Keep, first_of, keep_until_text

Json = dict[str, Any]
log = structlog.get_logger()
# An event of a stream. The `type`, if any, is also the event's name. A text is sent unchanged.
Event = Json | Literal["[DONE]"]

NO_FILE = "a picture of a message is neither a data URL nor of the row: send its file as base64 (areal docs agents)"
# Every stop text is searched for in all new text. OpenAI allows four.
MAX_STOPS = 16
NO_FORM = "only text can be trained: a format forbids tokens, which the trainer does not know (areal docs agents)"
MAX_ANSWERS = 64
"""The largest `n` of a request."""
StopText = Annotated[str, Field(max_length=1024)]
# A token of a prompt has fewer characters, even in spaces or markup.
CHARACTERS_PER_TOKEN = 16
# The most tokens of a prompt if neither the configuration nor the tokenizer has the model's limit.
MAX_CONTEXT = 131_072
MAX_CHARACTERS = MAX_CONTEXT * CHARACTERS_PER_TOKEN
# This many characters are encoded in a millisecond, faster than a thread starts.
SHORT = 2048
_ENCODING = ThreadPoolExecutor(2, thread_name_prefix="encoder")
T = TypeVar("T")
# Parsers have threads of their own: agents that wait for an answer may occupy all threads of asyncio.to_thread.
_PARSING = ThreadPoolExecutor(thread_name_prefix="parser")


class ApiError(Exception):
    """A request that is answered with an HTTP status of 4xx."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def only_text(form: str | Json | None) -> str | Json | None:
    """Validate the requested format of an answer."""
    if form not in (None, "text"):
        raise PydanticCustomError("form", NO_FORM)
    return form


# Advice for clients that send tools of other types than functions, by the beginning of the type.
_SWITCHES = {
    "web_search_2": "in Claude Code, its settings' permissions.deny has to have WebSearch",
    "web_fetch_2": "in Claude Code, its settings' permissions.deny has to have WebFetch",
    "web_search": 'in Codex, set web_search = "disabled"',
    "custom": "in Codex, it is apply_patch: set features.apply_patch_freeform = false, or no apply_patch_tool_type",
    "namespace": "in Codex, these are tools of sub-agents (start it with --disable multi_agent) or of MCP servers",
    "image_generation": "in Codex, start it with --disable image_generation, and with a key in place of a login",
    "local_shell": "Codex sends it for the model codex-mini-latest: name another model, and it sends a function",
}


def other_tool(kind: Any, name: Any = None) -> str:
    """Return why a tool of this type, or its item, is refused, and how to switch the tool off."""
    kind = f"{kind}"
    how = next((how for begin, how in _SWITCHES.items() if kind.startswith(begin)), "leave it out of the request")
    named = f" {name!r:.80}" if name and name != kind else ""
    return (
        f"the tool{named} of the type {kind!r:.80} cannot be called, as only functions are shown to the policy: {how}"
    )


class ResponseFormat(BaseModel):
    type: Annotated[str, AfterValidator(only_text)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class SamplingFields(BaseModel, extra="allow"):
    """Fields that would change how tokens are drawn. The run sets them: the trainer computes log-probs at the run's
    temperature and of whole distributions. A field with the run's value is accepted, any other value is refused.
    Unknown fields are ignored, and the log names each once."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, AfterValidator(lambda top_k: 0 if top_k == -1 else top_k)] = None
    min_p: float | None = None
    seed: Annotated[int | None, AfterValidator(lambda seed: None if seed in (None, -1) else seed % 2**63)] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Json | None = None
    chat_template_kwargs: Json | None = None

    @model_validator(mode="after")
    def _check_further(self) -> Self:
        further = self.__pydantic_extra__ or {}
        for name in further.keys() & REFUSED.keys():
            if further[name] not in (None, False, "", [], {}):
                raise PydanticCustomError("refused", f"{name} is not possible: {REFUSED[name]}")
        for name in {name[:80] for name in further} - REFUSED.keys() - _ignored:
            if len(_ignored) < MOST_IGNORED:
                _ignored.add(name)
                log.info("a field of requests is ignored", field=name)
        self.__pydantic_extra__ = None
        return self

    @property
    def sampling_fields(self) -> Json:
        """The fields that are set."""
        return {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}

    def check_template(self, variables: Mapping[str, Any]) -> None:
        """Raise ApiError if the request gives the chat template other variables than the run does."""
        if self.chat_template_kwargs and dict(self.chat_template_kwargs) != dict(variables):
            raise ApiError(
                f"chat_template_kwargs: the run renders with {json.dumps(dict(variables))}, as "
                f"data.chat_template_kwargs says: leave chat_template_kwargs out of the request"
            )

    def changed(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return `sampling` with the request's changes. Raises ApiError."""
        fields = {name: value for name, value in self.sampling_fields.items() if name in SamplingConfig.model_fields}
        try:
            return SamplingConfig.model_validate(sampling.model_dump() | fields).with_seed(self.seed)
        except ValidationError as error:
            raise ApiError(first_mistake(error, "sampling"), "sampling") from None

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ApiError if a field differs from `sampling`."""
        for name, value in self.sampling_fields.items():
            if name == "chat_template_kwargs":
                continue
            if name == "seed" and (not sampling.temperature or value == sampling.seed):
                continue  # nothing is drawn, or the request has its own random numbers
            if name == "seed":
                reason = "an engine draws all samples from one stream of random numbers, and samples have to differ"
            elif (run := getattr(sampling, name, NEUTRAL.get(name))) == value:
                continue
            elif name in NEUTRAL:
                reason = "it changes each token's distribution, and the trainer's log-probs would not be the sampler's"
            else:
                reason = f"this sample is drawn at {run:g}, as sampling.{name} says (evaluator.{name} in an evaluation)"
            raise ApiError(f"{name}: {value} is not possible: {reason}; leave {name} out of the request", "sampling")


_TOKENS = "it forbids or adds tokens, which the trainer does not know"
REFUSED = {
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), NO_FORM),
    **dict.fromkeys(("output_format", "format"), NO_FORM),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids", "ignore_eos"), _TOKENS),
    **dict.fromkeys(("functions", "function_call"), "give tools instead"),
    "continue_final_message": "the policy cannot be made to begin with a given text",
}
"""Fields that would change the answer, and why they are refused. Values that ask for nothing are accepted."""
# The most names of ignored fields that are kept, so that no client fills the log.
MOST_IGNORED = 100
_ignored: set[str] = set()
NEUTRAL: Json = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
"""Values of a request that change nothing."""


class ChatRequest(SamplingFields):
    """The body of a chat completion request."""

    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    model: str = "policy"
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = 1
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def offered(self) -> list[Json] | None:
        """The tools that the policy may call."""
        return self.tools if self.tools and self.tool_choice != "none" else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion: the message for the agent, the finish reason, the sampled tokens, the number of tokens before."""

    message: Json
    finish: str
    sampled: Generation
    prompt_tokens: int


class ChatSession:
    """The calls of a sample. A call that begins with the messages and the answer of an earlier call goes on from the
    tokens of the earlier call; any other call begins a new conversation.

    session: makes the calls. most_characters: limit of a call's messages and tools. last_text: the last answer without
    tool calls and thinking. rewards: given by the agent, by the answer's id, or None for the sample. agent_rewards:
    rewards of several agents, by the name on the agent's calls. failure: set to the error if a generation of this
    sample fails.
    """

    def __init__(self, session: Session, most_characters: int = MAX_CHARACTERS) -> None:
        self.session = session
        self._most_characters = most_characters
        self.tokenizer = session.tokenizer
        self._parsers: Parsers = session.tool("parsers")
        # After an answer, by the digest of all messages and the tools.
        self._conversations: dict[bytes, Conversation] = {}
        self._answers: dict[str, Generation] = {}
        self._tool_calls: set[str] = set()  # ids
        self.last_text = ""
        self.rewards: dict[str | None, float] = {}
        self.agent_rewards: dict[str, float] = {}
        self._callers: dict[str, list[str]] = {}  # ids of answers, by the name on the calls
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def complete(
        self,
        request: ChatRequest,
        name: str = "",
        on_text: Callable[[str], None] | None = None,
        earlier: Sequence[Any] | None = None,
    ) -> Answer:
        """Return the policy's answer. name: the answer's id. on_text: gets the text as it is sampled, unless a parser
        needs the whole text. earlier: message and finish reason of an earlier reading of the same turn, since a new
        reading would give its tool calls new ids. Raises ApiError, or the session's error: the sample has then failed.
        """
        request.check_sampling(self.session.sampling)
        request.check_template(self._parsers.template_kwargs)
        await self._check(request.offered)
        messages = accepted(messages_of(request, self.session), self.tokenizer)
        length = check_length(messages, request.offered, self._most_characters)
        digests = list(accumulate(messages, _digest, initial=json.dumps(request.offered).encode()))
        talk, prompt = await aside(length, self._prompt, messages, request.offered, digests)
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        keep = keep_until_text(self.tokenizer, stops) if stops else None
        if on_text and not self._parsers.reads(request.offered):
            keep = first_of(keep, _streaming_keep(self.tokenizer, stops, on_text))
        limit = request.max_completion_tokens or request.max_tokens
        sampled = await self._generate(prompt, limit, keep, parts_of(messages))
        if not len(sampled.tokens):  # no room is left
            return Answer({"role": "assistant", "content": ""}, "length", sampled, len(prompt))
        message, finish = earlier or await self._read(sampled, request, stops)
        self._tool_calls.update(call["id"] for call in message.get("tool_calls", ()))
        self._conversations[_digest(digests[-1], talk.add(sampled, message_of(message)))] = talk
        self._answers[name] = sampled
        self.last_text = message["content"] or ""
        return Answer(message, finish, sampled, len(prompt))

    def name_answer(self, name: str, answer: Answer) -> None:
        """Give an answer a second id, under which it may be rewarded."""
        self._answers[name] = answer.sampled

    def give_reward(self, value: float, answer: str | None) -> None:
        """Set the reward of the sample or, with the id of an answer, of that call. Raises ApiError."""
        if answer is not None:
            sampled = self._answers.get(answer)
            if sampled is None:
                raise ApiError(f"this sample has no answer with the id {answer!r:.80}")
            self.session.reward(sampled, value)
        self.rewards[answer] = value

    def name_caller(self, caller: str, names: Sequence[str]) -> None:
        """Record that calls of `caller`, the name of one of several agents, got the answers with these ids."""
        self._callers.setdefault(caller, []).extend(names)

    def credit_caller(self, caller: str, value: float | None, agent: str) -> None:
        """Set the reward of all calls so far by this caller, as `Session.credit` does. Raises ApiError."""
        names = self._callers.get(caller, ())
        if not names and value is not None:
            raise ApiError(f"this sample has no call whose header X-Session-Id is {caller!r:.80}")
        answers = [self._answers[name] for name in names if name in self._answers]
        self.session.credit([sampled for sampled in answers if len(sampled.tokens)], value, agent)
        if value is not None:
            self.agent_rewards[caller] = value

    def _prompt(
        self, messages: list[Json], tools: list[Json] | None, digests: list[bytes]
    ) -> tuple[Conversation, list[int]]:
        """Return the conversation that the messages continue, and the tokens of the prompt. Raises ApiError."""
        parent = next((talk for digest in reversed(digests) if (talk := self._conversations.get(digest))), None)
        if parent is not None:
            with contextlib.suppress(Exception):  # for example, the template does not show the last answer
                talk = parent.copy()
                return talk, talk.prompt(messages)
        talk = Conversation(self.tokenizer, tools)
        return talk, _rendered(talk, messages)

    async def _generate(
        self, prompt: list[int], limit: int | None, keep: Keep | None, pictures: list[Json]
    ) -> Generation:
        with self._fails_by(Exception):  # a sample that has lost a turn cannot be trained
            return await self.session.generate(prompt, limit, keep, pictures)

    @contextlib.contextmanager
    def _fails_by(self, causes: type[Exception]) -> Iterator[None]:
        """Let the sample fail by errors of these kinds, even if the agent goes on."""
        try:
            yield
        except causes as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise

    async def _check(self, tools: list[Json] | None) -> None:
        """Raise ApiError if vLLM's parsers refuse these tools, and UserError if no parser reads the model's calls. The
        first call imports vLLM."""
        if not self._parsers.reads(tools):
            return
        with self._fails_by(UserError), explain(ValueError, "{why}", ApiError):
            await asyncio.get_running_loop().run_in_executor(_PARSING, self._parsers.check, tools)

    async def _read(self, sampled: Generation, request: ChatRequest, stops: list[str]) -> tuple[Json, str]:
        """Return the sampled message, and its finish reason."""
        if self._parsers.reads(request.offered):
            read = await asyncio.get_running_loop().run_in_executor(
                _PARSING, self._parsers.parse, sampled, request.offered, stops, self._tool_calls
            )
        else:
            read = self._parsers.parse(sampled, None, stops)
        return _shown(read), "stop" if read.stopped else "tool_calls" if read.calls else sampled.finish or "length"


def _digest(prefix: bytes, message: Json) -> bytes:
    """Return the digest of a message and of all messages before, with the digest `prefix`."""
    data = json.dumps(compared(message), sort_keys=True).encode()
    return blake2b(prefix + data, digest_size=16).digest()


def _streaming_keep(tokenizer: Any, stops: Sequence[str], on_text: Callable[[str], None]) -> Keep:
    """Return a `Keep` that ends no turn. New text is passed on, but not a possible beginning of a stop string."""
    grown = GrownText(tokenizer)
    hidden = max(map(len, stops), default=1) - 1
    position = 0

    def keep(tokens: np.ndarray) -> None:
        nonlocal position
        grown.add(tokens)
        text, stopped = cut(grown.text, stops)
        end = len(text) if stopped else max(position, len(text) - hidden)
        if end > position:
            on_text(text[position:end])
            position = end

    return keep


@dataclass(frozen=True, slots=True)
class Access:
    """The access of an agent to a sample, and the sample's chat. reward_key: authorises rewards, for the agent alone: a
    policy that learned the reward key, as a policy may learn `api_key` from an environment variable, could score
    itself."""

    base_url: str
    api_key: str
    reward_key: str
    chat: ChatSession


class Reply(Protocol):
    """The answer to one call in the format of its protocol: a body, or the events of a stream, in the order of these
    methods. Only a body may have several answers. `names` are the ids of the answers."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def request(self) -> ChatRequest:
        """The call."""

    def body(self, *answers: Answer) -> Json:
        """Return the body of answers that are not streamed."""

    def start(self) -> list[Event]:
        """Return the events before the text."""

    def text(self, piece: str) -> list[Event]:
        """Return the events of a new piece of the text."""

    def finish(self, answer: Answer) -> list[Event]:
        """Return the events of the rest and of the end. After calls of `text` there is no reasoning."""

    def error(self, error: ApiError) -> list[Event]:
        """Return the events of an error after `start`, instead of `finish`."""


class ChatReply:
    """A `Reply` as a chat completion."""

    def __init__(self, request: ChatRequest, tokenizer: Any) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._streamed_length = 0  # characters
        self._name, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self.names = [self._name, *(f"{self._name}-{index}" for index in range(1, request.n or 1))]
        if request.stream and len(self.names) > 1:
            raise ApiError("several answers cannot be streamed: leave out n or stream")

    def body(self, *answers: Answer) -> Json:
        choices = [
            {
                "index": index,
                "message": answer.message | {"refusal": None},
                "finish_reason": answer.finish,
                "logprobs": _logprobs(answer.sampled, self.request, self._tokenizer),
            }
            for index, answer in enumerate(answers)
        ]
        return self._envelope("chat.completion") | {"choices": choices, "usage": _usage(*answers)}

    def start(self) -> list[Event]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def text(self, piece: str) -> list[Event]:
        self._streamed_length += len(piece)
        return [self._chunk({"content": piece})]

    def finish(self, answer: Answer) -> list[Event]:
        delta = {key: value for key, value in answer.message.items() if key != "role"}
        delta["content"] = (delta["content"] or "")[self._streamed_length :]
        if "tool_calls" in delta:
            delta["tool_calls"] = [call | {"index": i} for i, call in enumerate(delta["tool_calls"])]
        events: list[Event] = []
        if thinking := {key: delta.pop(key) for key in THINKING if key in delta}:
            events.append(self._chunk(thinking))
        logprobs = _logprobs(answer.sampled, self.request, self._tokenizer)
        events += [self._chunk(delta, logprobs), self._chunk({}, finish=answer.finish)]
        if self.request.stream_options and self.request.stream_options.include_usage:
            events.append(self._envelope("chat.completion.chunk") | {"choices": [], "usage": _usage(answer)})
        return [*events, "[DONE]"]

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(str(error), error.code)]

    def _chunk(self, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]}

    def _envelope(self, kind: str) -> Json:
        return {"id": self._name, "object": kind, "created": self._created, "model": self.request.model}


def error_body(message: str, code: str | None) -> Json:
    """Return the body of an error in OpenAI's protocols."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


async def prompt_tokens(
    request: ChatRequest, tokenizer: Any, most_characters: int, session: Session | None = None
) -> int:
    """Count the tokens of messages and tools in the chat template. session: shows pictures. Raises ApiError."""
    messages = accepted(messages_of(request, session), tokenizer)
    length = check_length(messages, request.offered, most_characters)
    return len(await aside(length, _rendered, Conversation(tokenizer, request.offered), messages))


def most_characters(config: Config, tokenizer: Any) -> int:
    """Return the most characters of a call: more than fit into the model's context."""
    longest = config.generator.max_model_len or min(tokenizer.model_max_length, MAX_CONTEXT)
    return int(longest) * CHARACTERS_PER_TOKEN


def check_length(messages: list[Json] | str | list[int], tools: list[Json] | None, most_characters: int) -> int:
    """Return the characters of messages, or of a prompt, and of tools. Raises ApiError if they cannot fit into the
    model's context: encoding them to find out would take minutes."""
    length = len(json.dumps([messages, tools], ensure_ascii=False))
    if length > most_characters:
        why = f"the call has {length} characters, and the model takes at most {most_characters}: send less"
        raise ApiError(why, "context_length_exceeded")
    return length


async def aside(length: int, work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `work`, in a thread if `length` characters would hold up all other requests."""
    if length <= SHORT:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_ENCODING, work, *arguments)


def _rendered(conversation: Conversation, messages: list[Json]) -> list[int]:
    wrong = "the model's tokenizer or chat template does not take these messages: {why}"
    with explain(Exception, wrong, ApiError):  # templates and tokenizers may raise anything
        return conversation.prompt(messages)


def _usage(*answers: Answer) -> Json:
    sampled = sum(len(answer.sampled.tokens) for answer in answers)
    prompt = answers[0].prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(sampled: Generation, request: ChatRequest, tokenizer: Any) -> Json | None:
    """Return log-probs of the sampled tokens. Alternatives' log-probs are unknown, whatever `top_logprobs` asks for."""
    if not request.logprobs:
        return None
    content = []
    for token, logprob in zip(sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True):
        text = tokenizer.decode([token])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append(entry | {"top_logprobs": [entry] if request.top_logprobs else []})
    return {"content": content, "refusal": None}


def messages_of(request: ChatRequest, session: Session | None) -> list[Json]:
    """Return the messages of a request; the session shows their pictures. Leading system messages become a single
    message, as most templates want. Raises ApiError."""
    messages = [message_of(raw, session) for raw in request.messages]
    leading = [*itertools.takewhile(lambda message: message["role"] == "system" and _is_text(message), messages)]
    return [_joined(leading), *messages[len(leading) :]] if len(leading) > 1 else messages


def _joined(messages: Sequence[Json]) -> Json:
    """Join the texts of several messages to one message."""
    return messages[0] | {"content": "\n\n".join(message["content"] for message in messages if message["content"])}


def _is_text(message: Json) -> bool:
    """Return whether a message has no pictures."""
    return isinstance(message["content"], str)


def accepted(messages: list[Json], tokenizer: Any) -> list[Json]:
    """Return the messages. If the template refuses late system messages, they become texts of the user."""
    late = any(message["role"] == "system" for message in messages[1:])
    if not late or _takes_late_system(tokenizer, str(tokenizer.chat_template)):
        return messages
    result = messages[:1]
    for message in messages[1:]:
        message = message | {"role": "user"} if message["role"] == "system" else message
        if message["role"] == result[-1]["role"] == "user" and _is_text(message) and _is_text(result[-1]):
            result[-1] = _joined([result[-1], message])
        else:
            result.append(message)
    return result


@functools.lru_cache(maxsize=64)
def _takes_late_system(tokenizer: Any, template: str) -> bool:
    """template: the template's text, a key of the cache."""
    try:
        Conversation(tokenizer).prompt([*_PROBE])
    except Exception:  # templates may raise anything
        return False
    return True


# Fields beside the content that clients write into messages.
UNSHOWN = ("refusal", "function_call", "audio")
# A system message after a user's message and an answer.
_PROBE = [{"role": role, "content": f"It is {n}."} for n, role in enumerate(("user", "assistant", "user", "system"))]


def message_of(raw: Json, session: Session | None = None) -> Json:
    """Return a chat message in the form that templates take, without fields that clients add to received messages.
    session: shows the message's pictures. Raises ApiError."""
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise ApiError(f"a message has the role {role!r}: roles are system, developer, user, assistant and tool")
    if unknown := [key for key in UNSHOWN if raw.get(key)]:
        raise ApiError(f"a message has {unknown[0]}, which no chat template shows: leave it out, or give it as content")
    message = {"role": role, "content": _content(raw.get("content"), session)}
    if role == "tool":
        message |= {key: raw[key] for key in ("tool_call_id", "name") if raw.get(key)}
    if raw.get("tool_calls"):
        if role != "assistant":
            raise ApiError(f"a message of the role {role} has tool_calls, which are the assistant's")
        if not isinstance(raw["tool_calls"], list):
            raise ApiError("the tool_calls of a message are not a list")
        message["tool_calls"] = [_tool_call(call) for call in raw["tool_calls"]]
    return message


def _content(content: Any, session: Session | None) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError("the content of a message is neither text nor a list of parts")
    parts = [_part(part, session) for part in content]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _part(part: Json, session: Session | None) -> Json:
    with explain(ValueError, "{why}: nothing else can be trained yet", ApiError):
        read = read_part({"type": "text"} | part)
    if read["type"] == "text":
        return read
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    with explain(ValueError, "a picture of a message cannot be read: {why}", ApiError):
        content = find("file_of_url")(url) if isinstance(url, str) else None
        if content is not None and session:
            return session.show(content)
    if session is None or (picture := session.shown.get(str(part.get("digest")))) is None:
        raise ApiError(NO_FILE, "pictures")
    return picture


def _tool_call(raw: Any) -> Json:
    with explain((KeyError, TypeError), "a tool call in the messages lacks its id or function.name", ApiError):
        number, name, arguments = raw["id"], raw["function"]["name"], raw["function"].get("arguments")
    if isinstance(arguments, str) and arguments:
        with explain(
            (ValueError, RecursionError), f"the arguments of the call {number!r:.80} are not JSON: {{why}}", ApiError
        ):
            arguments = json.loads(arguments)
    called = {"name": name, "arguments": arguments or {}}
    return {"id": number, "type": "function", "function": called}


def _shown(read: Parsed) -> Json:
    message: Json = {"role": "assistant", "content": read.content}
    if read.calls:
        message |= {"content": read.content or None, "tool_calls": read.calls}
    if read.reasoning:
        message |= dict.fromkeys(THINKING, read.reasoning)
    return message

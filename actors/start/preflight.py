"""Checks of the configuration before any process is started. A mistake raises a UserError of one sentence."""

import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from actors.start.row_checks import check_prompts, check_rows
from areal.base import extensions
from areal.base.errors import UserError
from areal.base.process_checks import check_apart
from areal.config import Config
from areal.config.engine_sections import EngineConfig
from areal.config.named_objectives import OBJECTIVES
from areal.config.roles import ROLES
from areal.config.section_conflicts import conflicts_of_groups
from areal.cpu.processor import c_compiler, hides_avx512, lacks_bf16, mkl_library
from areal.data.addition import ALPHABET
from areal.data.prompt_sources import PromptSource
from areal.data.rows import prompt_text
from areal.data.samplers import open_sampler
from areal.data.sources import open_source
from areal.devices import VISIBLE, host_memory, listed_devices, threads_of_scorers, visible_devices
from areal.models import (
    check_mixture,
    check_trainable,
    context_of,
    default_context,
    find_model,
    hub_id,
    kept_words_of,
    packages_of_vision,
    resolve_model,
    resolve_reference,
)
from areal.rewards import lookup as rewards
from areal.samples.tokenizer import load_tokenizer, missing_character, read_template
from areal.storage.claim import can_be_made
from areal.training.algorithms.estimators import compares_group, rehearse_estimator
from areal.weights.model_files import model_files, weight_sizes
from areal.workflows.chat_templates import EXAMPLE_TOOL, ChatTemplate, check_shown
from areal.workflows.conversation import user
from areal.workflows.named_workflows import rehearse as rehearse_workflow
from areal.workflows.named_workflows import resolve_workflow, texts_of

# The most tokens of a sequence of the quickstart's model, and its layers (areal.data.warm_start, which imports torch).
QUICKSTART_CONTEXT = 512
QUICKSTART_LAYERS = [f"layers.{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
# More engines for each core are a mistake.
MOST_ENGINES_PER_CORE = 8
# The least memory of an engine's process and of a trainer's rank on a CPU, beside weights, KV cache and activations.
GIB = 2**30
ENGINE_BYTES, TRAINER_BYTES = GIB // 2, GIB // 2
# The least memory of a rollout manager, a reward actor, and a reward actor's worker.
OTHER_BYTES = GIB // 16
# A check that a port is reachable; an answer at the port does not matter.
DISCARD_PORT, LOOPBACK_SECONDS = 9, 1.0
_CHECK_DEEPSPEED = """
from areal.config.trainer_section import TrainerConfig
from areal.training.trained_model import check_settings
from areal.training.optimizer import deepspeed_config
check_settings(deepspeed_config(TrainerConfig.model_validate_json(sys.argv[1])))
"""
_CHECK_VLLM = """
from pathlib import Path
from areal.config.engine_sections import GeneratorConfig
from areal.generation.engine_start import check_options
check_options(Path(sys.argv[1]), GeneratorConfig.model_validate_json(sys.argv[2]))
"""
_CHECK_NAMES = """
from pathlib import Path
from areal.weights.wrappers import check_names
check_names(Path(sys.argv[1]))
"""


def check(config: Config, *, weights: bool = True, rows: bool = True, machine: bool = True) -> None:
    """Check everything possible before the start: the number of ranks, the master's port, the tracking and weights
    settings, rewards, workflow, sandbox, objective, data, models, chat template, parsers, cores and memory.

    weights: also download the weights of a model on the hub. rows: read rows, beside the first rows. machine: all roles
    are to run on this machine. Raises UserError.
    """
    if config.trainer.ranks % config.trainer.sequence_parallel:
        raise UserError(
            f"trainer.ranks is {config.trainer.ranks}, but trainer.sequence_parallel is "
            f"{config.trainer.sequence_parallel}: make trainer.ranks a multiple of it."
        )
    check_port(config.master.address)
    if tracker := extensions.part_of("trackers", "process"):
        tracker.check(config.observe)
    if config.weights.folder is not None:
        check_folder(config.weights.folder)
    check_code(config)
    check_extensions(config)
    source = open_source(config.data, config.seed)
    if config.steps:
        open_sampler(config.data, source)
    folder = None
    scorers = {
        name: find_model(scorer.model, f"scorers.{name}.model", weights=weights)
        for name, scorer in config.scorers.items()
        if scorer.model != "quickstart"
    }
    if config.model == "quickstart":
        check_quickstart(config, source)
    else:
        folder = resolve_model(config, weights=weights)
        rooms = extensions.need("scorer", "rooms", "scorers").load()(config, scorers) if scorers else {}
        check_model(config, folder, source, weights=weights, rooms=rooms)
        packages = packages_of_vision(folder) if machine else ()
        if lacks := next((name for name in packages if importlib.util.find_spec(name) is None), None):
            raise UserError(f"vLLM runs {config.model} only with {lacks}: `areal install-cpu --vision` installs it.")
        check_mixture(folder, config.trainer.lora, cuda=not machine or bool(visible_devices()))
    resolve_reference(config, weights=weights)
    for name, model in scorers.items():
        extensions.need("scorer", "check", "scorers").load()(config, name, model, folder)
    if machine:
        check_devices()
    if machine and not visible_devices():
        check_machine(config, weight_sizes(folder) if folder else {}, scorers)
    if rows:
        check_rows(config, source)


def check_extensions(config: Config) -> None:
    """Check that all extensions of this project that the configuration needs are there. Raises UserError."""
    trainer = config.trainer
    needed = {
        ("direct", "sender"): config.weights.direct and "weights.transport=direct",
        ("prometheus", "serve"): config.observe.prometheus_port and "observe.prometheus_port",
        ("trackers", "process"): config.observe.trackers and "observe.trackers",
        ("parallel", "sequences"): trainer.sequence_parallel > 1 and "trainer.sequence_parallel",
        ("routing", "replay"): trainer.routing == "replay" and "trainer.routing=replay",
        ("scorer", "policy_judges"): config.policy_judges and "url: policy",
        ("lora", "add"): trainer.lora and "trainer.lora",
        ("critic", "around"): trainer.critic and "trainer.critic",
        ("distillation", "around"): trainer.teacher and "trainer.teacher",
        **{("role", role.name): role.processes(config) and f"the role {role.name}" for role in ROLES.values()},
    }
    for (kind, name), what in needed.items():
        if what:
            extensions.need(kind, name, what)
    if objective := OBJECTIVES.get(trainer.objective):
        extensions.need("objective", objective.loss, f"trainer.objective={trainer.objective}", "losses")


def check_code(config: Config) -> None:
    """Check the user's code: rewards, the workflow, the sandbox, the objective. Raises UserError."""
    for name in {**dict.fromkeys(config.own_rewards), **config.reward.options}:
        rewards.check(name, config.reward.options.get(name, {}))
    groups = config.rollout_manager.workflow == "multi_turn" and [*set(config.rewards) & set(config.reward.groups)]
    if groups:
        raise UserError(
            f"The workflow multi_turn scores each attempt by itself, but the reward {', '.join(sorted(groups))} scores "
            f"all samples of a group at once: choose another workflow, such as single_turn."
        )
    if not config.rollout_manager.external:
        resolve_workflow(config.rollout_manager.workflow, config.rollout_manager.workflow_options)
        rehearse_workflow(config.rollout_manager.workflow, config.rollout_manager.workflow_options, config.sandbox)
    for name in config.own_rewards:
        if rehearse_reward := rewards.hook(name, "rehearse"):
            rehearse_reward(config)
    if ":" in config.trainer.objective:
        from areal.training.algorithms.objectives import rehearse  # imports torch, for a user's own objective only

        rehearse(config.trainer)
    conflicts = conflicts_of_groups(config, f"trainer.advantage={config.trainer.advantage}")
    if compares_group(rehearse_estimator(config.trainer)) and (conflict := next(conflicts, None)):
        raise UserError(f"{conflict}.")


def check_options(config: Config) -> None:
    """Have DeepSpeed and vLLM check the options that are passed on to them. At the start of the engines this check
    would come later. vLLM is not asked about the quickstart's model, which may not exist yet. Raises UserError."""
    here, folder = config.for_device(cuda=bool(visible_devices())), None
    if config.model != "quickstart" and config.generator.engine_options:
        folder = resolve_model(config, weights=False)
    if config.steps and config.trainer.deepspeed_options:
        check_apart(
            _CHECK_DEEPSPEED,
            here.trainer.model_dump_json(),
            what="DeepSpeed",
            remedy="leave out trainer.deepspeed_options",
        )
    if folder:
        check_apart(
            _CHECK_VLLM,
            str(folder),
            here.generator.model_dump_json(),
            what="vLLM",
            remedy="leave out generator.engine_options",
        )


def check_names(config: Config) -> None:
    """Compare the names of weights to publish with those in the model's files, if here. Raises UserError."""
    if config.model == "quickstart" or not config.steps or config.trainer.lora:
        return
    folder = resolve_model(config, weights=False)
    if weight_sizes(folder):
        remedy = "leave out the rehearsal"
        check_apart(_CHECK_NAMES, str(folder), what="transformers", remedy=remedy)


def check_model(config: Config, folder: Path, source: PromptSource, *, weights: bool, rooms: Mapping[str, int]) -> None:
    """Check whether the model in `folder` fits the configuration and the data. weights: the model's weights have to be
    there. rooms: of scorers. Raises UserError."""
    if config.steps:
        check_trainable(folder, config.trainer.sequence_parallel, config.generator.max_model_len)
        for check in extensions.find_own("model_check"):
            check(config.trainer, folder, config.trainer.ranks)
    if config.steps and config.trainer.routing == "replay":
        extensions.need("routing", "of_model", "trainer.routing=replay").load()(folder)
    kept_words_of(config.model_copy(update={"model": str(folder)}))
    context = context_of(folder) if config.generator.max_model_len else default_context(folder)
    check_context(config, context, f"the model {folder}")
    if config.trainer.lora:
        extensions.need("lora", "check", "trainer.lora").load()(folder, weight_sizes(folder), config.trainer.lora)
    tokenizer = load_tokenizer(str(folder), config.data)
    if check_parsers := extensions.part_of("agents", "check_parsers"):
        check_parsers(config, folder, tokenizer)
    workflow = config.rollout_manager.workflow
    for text in texts_of(workflow, config.rollout_manager.workflow_options):
        if character := missing_character(tokenizer, text):
            raise UserError(
                f"The workflow {workflow} writes {text!r:.80}, but the tokenizer of {folder} has no token for "
                f"{character!r}: change rollout_manager.workflow_options, or use another model."
            )
    if workflow in ("single_turn", "multi_turn", "python_tool"):  # other workflows may have their own prompts
        check_prompts(config, source, tokenizer, context, rooms)
    check_template(config, source, tokenizer)
    if (weights or not hub_id(str(folder))) and not weight_sizes(folder):
        raise UserError(f"The model folder {folder} has no weights, *.safetensors: copy or download them.")
    for name in model_files(folder).beside:
        print(f"Note: {folder / name} is no part of the model there, and nobody reads it.", file=sys.stderr)


def check_template(config: Config, source: PromptSource, tokenizer: Any) -> None:
    """Raises UserError if a built-in workflow has conversations that the chat template does not write unchanged."""
    workflow = config.rollout_manager.workflow
    has_turns = workflow in ("multi_turn", "python_tool") and config.data.parts
    chats = workflow == "tools" or (has_turns and not isinstance(source.row(0).prompt, str))
    if not chats or not tokenizer.chat_template:
        return
    try:
        if workflow == "tools":
            check_shown(tokenizer, [user("Hello")], [EXAMPLE_TOOL])
        else:
            ChatTemplate(tokenizer).check()
    except Exception as error:  # templates may raise anything
        raise UserError(
            f"The workflow {workflow} cannot talk to this model ({error}): set data.chat_template, or another model."
        ) from None


def check_quickstart(config: Config, source: PromptSource) -> None:
    """As `check_model`, for the quickstart's model, which may not exist yet. Raises UserError."""
    check_context(config, QUICKSTART_CONTEXT, "model=quickstart")
    if config.trainer.lora:
        extensions.need("lora", "check", "trainer.lora").load()("quickstart", QUICKSTART_LAYERS, config.trainer.lora)
    if config.data.chat_template:
        read_template(config.data.chat_template)
    workflow = config.rollout_manager.workflow
    texts = {f"the workflow {workflow}": texts_of(workflow, config.rollout_manager.workflow_options)}
    if config.data.parts:
        texts[f"a prompt in {config.data.named}"] = [prompt_text(source.row(0).prompt)]
    for place, written in texts.items():
        if unknown := [character for character in "".join(written) if character not in ALPHABET]:
            raise UserError(f"model=quickstart reads only {ALPHABET}, but {place} has {unknown[0]!r}: use another.")


def check_context(config: Config, context: int | None, model: str) -> None:
    """Raises UserError if `model` has no room for `generator.max_model_len`, or for a prompt and
    `sampling.max_new_tokens`. context: the most tokens of a sequence of the model."""
    longest = config.generator.max_model_len
    if context and longest and longest > context:
        raise UserError(f"generator.max_model_len is {longest}, but {model} has room for {context} tokens: lower it.")
    if config.steps and context and config.sampling.max_new_tokens >= context:
        raise UserError(
            f"sampling.max_new_tokens is {config.sampling.max_new_tokens}, but {model} has room for {context} tokens "
            f"of prompt and completion: lower it."
        )


def check_devices() -> None:
    """Print a note if a named GPU is not here, or if the code for GPUs could not be compiled."""
    if not (named := visible_devices()):
        return
    if not listed_devices():
        names = ",".join(named)
        print(f"Note: {VISIBLE} is {names}, but this machine has no GPU: unset it to use the CPU.", file=sys.stderr)
    elif c_compiler() is None:
        print("Note: there is no C compiler here, and Triton needs one for its kernels: install gcc.", file=sys.stderr)


def check_machine(config: Config, sizes: Mapping[str, int], scorers: Mapping[str, Path]) -> None:
    """Check whether this machine, without GPUs, has the cores and the memory for all roles. sizes: the numbers of
    elements of the model's weights, if known. scorers: the folders of the scorers' models, if there.

    Raises UserError if the roles need at least more than the machine has; prints a note if engines share cores.
    """
    config, cores = config.for_device(cuda=False), len(os.sched_getaffinity(0))
    engines = config.generator.count * config.generator.devices
    if engines > MOST_ENGINES_PER_CORE * cores:
        raise UserError(
            f"generator.count is {config.generator.count}, but this machine has {cores} cores and no GPU: lower it to "
            f"{max(1, cores - 1)}."
        )
    if (threads := engines * config.generator.threads + threads_of_scorers(config)) > cores:
        print(
            f"Note: the engines have {threads} threads together, but this machine has {cores} cores: one for each "
            f"core, and one core for the trainer, are fastest.",
            file=sys.stderr,
        )
    if (trained := config.trainer.ranks * config.trainer.threads if config.steps else 0) > cores:
        print(
            f"Note: the trainer has {config.trainer.ranks} ranks with {trained} threads together, but this machine has "
            f"{cores} cores, taken in turns: trainer.ranks={max(1, cores // config.trainer.threads)} is faster.",
            file=sys.stderr,
        )
    _tell_of_processor(config)
    elements = sum(sizes.values())
    needs = {"generators": config.generator.count * _engine_bytes(config.generator, elements)}
    if config.steps:
        # Weights, gradients and Adam's moments in fp32.
        needs["trainer"] = config.trainer.ranks * TRAINER_BYTES + (4 if config.trainer.lora else 16) * elements
    processes = config.rollout_manager.count + config.reward.count * (1 + config.reward.workers)
    if config.scorer_uses.started:
        of_scorer = {name: sum(weight_sizes(model).values()) for name, model in scorers.items()}
        needs["scorers"] = sum(
            _engine_bytes(config.scorers[name], of_scorer.get(name, 0)) for name in config.scorer_uses.started
        )
    needs["other roles"] = processes * OTHER_BYTES
    room = host_memory()
    if sum(needs.values()) > room:
        listed = ", ".join(f"{count / GIB:.1f} for the {name}" for name, count in needs.items())
        raise UserError(
            f"This machine has {room / GIB:.0f} GiB of memory, but the run needs at least {listed}: take a smaller "
            f"model, fewer processes or trainer.lora, or a machine with more."
        )


def _tell_of_processor(config: Config) -> None:
    """Print a note if this processor computes more slowly than necessary, or lacks the run's bfloat16."""
    if hides_avx512() and not mkl_library():
        print(
            "Note: there is no C compiler here, which areal/cpu/mkl.c takes, so products of matrices use half of this "
            "processor and differ in their last bits from those with it: install gcc.",
            file=sys.stderr,
        )
    halves = [f"{part}.dtype" for part in ("generator", "trainer") if getattr(config, part).dtype == "bfloat16"]
    if halves and lacks_bf16():
        print(
            f"Note: this processor has no instructions for bfloat16, which makes matrix products several times slower: "
            f"set {' and '.join(halves)} to float32.",
            file=sys.stderr,
        )


def _engine_bytes(engine: EngineConfig, elements: int) -> int:
    """The least memory, in bytes, of an engine on a CPU with a model of `elements` elements."""
    return engine.devices * ENGINE_BYTES + (4 if engine.dtype == "float32" else 2) * elements


@contextmanager
def free_port(address: str) -> Iterator[str]:
    """`address`, with another port if the port is in use or held by another start. Until the end of the block no other
    start takes the port, and no other program but the master can. Raises UserError if the master cannot listen at the
    host."""
    host = address.rpartition(":")[0]
    with ExitStack() as held:
        holder = held.enter_context(socket.socket(socket.AF_UNIX))
        for candidate in (address, f"{host}:0"):
            try:
                chosen = f"{host}:{held.enter_context(_bound(candidate))}"
                # An abstract name belongs to the same network as the port, and ends with the process.
                holder.bind(f"\0areal-master {chosen}")
            except OSError:
                continue
            yield chosen
            return
    check_port(address)
    raise UserError(f"No port is free at {host}: choose the address of the master with master.address=tcp://HOST:PORT.")


def check_port(address: str) -> None:
    """Raises UserError if the master cannot listen at `address`, or processes here cannot reach each other."""
    with socket.socket() as probe:
        probe.settimeout(LOOPBACK_SECONDS)
        if probe.connect_ex(("127.0.0.1", DISCARD_PORT)) == errno.ENETUNREACH:
            raise UserError(
                "Processes of this machine cannot reach each other, its loopback interface is down: ip link set lo up."
            )
    way = "choose another address with master.address=tcp://HOST:PORT"
    try:
        with _bound(address):
            pass
    except OSError as error:
        cures = {errno.EADDRNOTAVAIL: "", errno.EACCES: "ports below 1024 are root's, "}
        cure = (
            ""
            if isinstance(error, socket.gaierror)
            else cures.get(error.errno or 0, "stop the process that uses it, or ")
        )
        raise UserError(f"The master cannot listen at {address} ({error.strerror}): {cure}{way}.") from error


@contextmanager
def _bound(address: str) -> Iterator[int]:
    """The port of a socket that has the address but does not listen; the system chooses a port in place of 0. Sockets
    that share the address, such as ZeroMQ's, can have it too as long as no socket listens. Raises OSError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]").replace("*", "0.0.0.0"), int(port))[0]
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(target)
        yield holder.getsockname()[1]


def check_folder(folder: Path) -> None:
    """Raises UserError if weights cannot be written to `folder`."""
    if not can_be_made(folder):
        raise UserError(
            f"Weights cannot be written to {folder}: set weights.folder to a writable folder, "
            f"or leave it out to write the weights into the run folder."
        )

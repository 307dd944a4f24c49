"""Training with DeepSpeed. Only this module, `optimizer`, `checkpoint` and `ulysses` (sequences) use its API.

There is one `TrainingEngine` per rank. Every method that says *all ranks* is a collective: each rank calls it, in the
same order. If a collective raises on any rank, training is over on all ranks: the other ranks wait inside the call and
have to be killed.
"""

import atexit
import copy
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from areal.base.errors import UserError, explain
from areal.base.network_interfaces import choose_interface
from areal.base.processes import importing
from areal.config import Config
from areal.config.trainer_section import TrainerConfig
from areal.cpu import deepspeed_on_cpu as cpu
from areal.models import check_trainable, flash_computes, routing_of
from areal.samples.table import NOT_SAMPLED, TOP
from areal.samples.trajectory import Group, TokenValues
from areal.samples.vision import Picture, Views, sight_of
from areal.storage.disk import DiskRetry
from areal.storage.picture_store import PictureStore, pictures_of
from areal.training.agreement import SILENCE, RankMessages, Writer
from areal.training.algorithms.advantages import advantages, gae
from areal.training.checkpoint import TrainingState
from areal.training.flops import Operations, experts_of, peak_tflops
from areal.training.frozen_tower import FrozenTower
from areal.training.head import Head
from areal.training.microbatches import fixed_number, split_over_ranks
from areal.training.model_checks import keeps_apart, only_attention_mixes, what_is_missing
from areal.training.model_reader import ModelReader
from areal.training.objectives import (
    Tokens,
    interpolated_proximal,
    kl,
    kl_of_top,
    kl_penalty,
    mask_sequences,
    rehearse,
    value_loss,
    within_second_moment,
)
from areal.training.offload import OffloadedTensors, tensors_in
from areal.training.optimizer import (
    bucket_elements,
    deepspeed_config,
    held,
    learning_rates,
    parameter_groups,
    value_head_group,
)
from areal.training.packed import (
    FLASH,
    FlatBatch,
    PackedRow,
    choose_attention,
    compile_layers,
    empty_row,
    pack,
    row_inputs,
)
from areal.training.routes import RouteReplay
from areal.training.shards import Copied, ModelFolder, Published, WeightCopies
from areal.training.step_metrics import StepResult, Tally
from areal.training.ulysses import RowPart, SequenceGroup, register
from areal.weights.chunks import Manifest
from areal.weights.lora import add_adapters

log = structlog.get_logger()

# The log-prob of a teacher's token that the policy does not have.
UNLIKELY = -1e4


def join_ranks() -> None:
    """Initialise torch.distributed, unless it is. It is shut down only at exit, because DeepSpeed keeps its groups."""
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "WORLD_SIZE" in os.environ:
        choose_interface(os.environ["MASTER_ADDR"])
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


@cache
def control_group() -> dist.ProcessGroup:
    """The group in which ranks agree on what is in the memory of the host, also where the others use NCCL.

    All engines of a process share it: each group of gloo has threads that wake 100 times a second, even with one rank.
    """
    return dist.new_group(backend="gloo", timeout=SILENCE)


def _open_deepspeed(config: TrainerConfig, cuda: bool) -> Any:
    """DeepSpeed with all ranks joined, after what has to be set for the devices (all ranks)."""
    if not cuda:
        cpu.set_environment(config.dtype)
    if not cuda or config.offload != "none":
        torch.set_num_threads(config.threads)
    with importing():
        import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # DeepSpeed's calls
    # By default cuBLAS adds the parts of a bf16 product in bf16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not cuda:
        cpu.compile_no_op()
    join_ranks()
    with redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False)
    return deepspeed


def check_settings(settings: dict[str, Any]) -> None:
    """Raises UserError if DeepSpeed, which is imported, does not take its configuration. By itself it would say so
    after the model is read, which may take minutes."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    with explain(
        (AssertionError, AttributeError, DeepSpeedConfigError, KeyError, TypeError, ValueError),
        "DeepSpeed does not take trainer.deepspeed_options: {why}",
    ):
        DeepSpeedConfig(copy.deepcopy(settings))


def _needed_column(batch: FlatBatch, name: str, key: str) -> np.ndarray:
    """A column that scorers give, float32 [T]. Raises ValueError if the batch does not have it."""
    values: np.ndarray = getattr(batch, name)
    if len(values) != len(batch.tokens):
        raise ValueError(f"the samples have no {name}, which {key} needs: no scorer has scored them")
    return values


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class TrainingEngine:
    """A causal language model in training, on one rank.

    model: folder of a Hugging Face model. The number of ranks comes from torchrun's environment; without it there is
    one rank. optimizer_steps: of the whole run, needed if the learning rate is not constant. keep_values: whether a
    step leaves what it found for each token in `values`. disk_retry: with which folders are written. longest: the most
    tokens of a sequence; None: the model's limit. pictures: the folder of those of prompts. Raises UserError if the
    model cannot be loaded, or not be trained on such sequences or with this number of ranks.
    """

    _tower: FrozenTower | None = None  # until a batch has pictures

    def __init__(
        self,
        model: Path,
        config: TrainerConfig,
        *,
        seed: int,
        optimizer_steps: int = 1,
        keep_values: bool = False,
        disk_retry: DiskRetry | None = None,
        longest: int | None = None,
        pictures: Path = Path("pictures"),
    ) -> None:
        check_trainable(model, config.sequence_parallel, longest)
        cuda = torch.cuda.is_available()
        self.config = config = config.for_device(cuda=cuda)
        self._zero = _open_deepspeed(config, cuda).zero
        torch.manual_seed(seed)
        self.source = model
        self._pictures, self._views = PictureStore(pictures), Views()
        self._keep_values = keep_values
        self.values: TokenValues | None = None
        self._control = control_group()
        self.messages = RankMessages(self._control)
        settings = deepspeed_config(config)
        self._stage: int = settings["zero_optimization"]["stage"]
        self._objective = rehearse(config)
        self._attention = choose_attention(config.dtype, flash=flash_computes(model))
        self._reader = ModelReader(config, self._stage, self._attention, longest)
        self._prefix_tree = config.prefix_tree and self._attention != FLASH  # flash attention takes no mask
        self._one_a_row = False
        check_settings(settings)
        self._together = SequenceGroup(config.sequence_parallel)
        register(self._attention)
        head, groups = self._prepare_model()
        self._start_deepspeed(settings, groups, optimizer_steps)
        self._state = TrainingState(self._deepspeed, self._trained, self._stage, self._control)
        self.device: torch.device = self._deepspeed.device
        self._fit_rows(self._module, head)
        if config.compile:
            self._compile_layers(head)
        self._operations = Operations(self._module)
        self._peak_tflops = config.peak_tflops or peak_tflops(self.device, config.dtype)
        self._reference = self._start_reference()
        self._weights = WeightCopies(self._module, self._published, self.messages, adapters=config.lora is not None)
        self._snapshot: dict[str, Tensor] = {}
        self._offloaded = OffloadedTensors()
        disk_retry = disk_retry or DiskRetry(model, "the trainer", logs=self.rank == 0)
        self._publisher, self._saver = Writer(disk_retry), Writer(disk_retry)
        self.work_done = 0
        """Micro-batches computed, parameters gathered and pictures read since the start. Rises unless work hangs."""

    def _prepare_model(self) -> tuple[Head, list[dict[str, Any]]]:
        """Read the model, with its adapters and its critic. Returns its head, and the parameters as groups for Adam."""
        config = self.config
        self._module = self._reader.read(self.source)
        head = Head(self._module)
        self._replay = RouteReplay(self._module, routing_of(self.source)) if config.routing == "replay" else None
        self.vocab_size: int = self._module.config.get_text_config().vocab_size
        if config.gradient_checkpointing:
            self._module.gradient_checkpointing_enable({"use_reentrant": False})
        if config.lora:
            self._module = add_adapters(self._module, config.lora, self.source)
            head.refuse_adapters()
        self._published = _trainable(self._module)
        groups = parameter_groups(self._published.values(), config.weight_decay)
        if config.critic:
            self._module.value_head = head.add_critic()
            groups.append(value_head_group(self._module.value_head, config.critic.lr))
        self._trained = _trainable(self._module)
        self._critic = head.critic
        return head, groups

    def _start_deepspeed(self, settings: dict[str, Any], groups: list[dict[str, Any]], optimizer_steps: int) -> None:
        import deepspeed

        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in self._trained.items()}
        settings["zero_optimization"].setdefault("reduce_bucket_size", bucket_elements(sizes))
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints memory tables
            self._deepspeed, *_ = deepspeed.initialize(
                model=self._module,
                model_parameters=groups,
                config=settings,
                lr_scheduler=lambda optimizer: learning_rates(optimizer, self.config, optimizer_steps),
            )
        if self._stage == 0 and self.world_size == 1:
            self._deepspeed.enable_backward_allreduce = False  # useless here, yet a tenth of a small model's step

    @classmethod
    def of_run(cls, config: Config, *, keep_values: bool, disk_retry: DiskRetry | None = None) -> "TrainingEngine":
        """The engine with which the run of `config` begins (all ranks)."""
        return cls(
            Path(config.model),
            config.trainer,
            seed=config.seed,
            keep_values=keep_values,
            disk_retry=disk_retry,
            optimizer_steps=config.optimizer_steps,
            longest=config.generator.max_model_len,
            pictures=config.pictures_folder,
        )

    def _start_reference(self) -> torch.nn.Module | None:
        """The reference model of the KL penalty.

        None if there is no penalty, if a scorer has the model, or if the policy with its adapters disabled is the
        reference. Under ZeRO 3 each rank holds a part of the model, as it does of the policy; otherwise each rank holds
        all of it.
        """
        folder = Path(self.config.reference or self.source)
        adapted = self.config.lora and folder.resolve() == self.source.resolve()
        if not self.config.kl_coef or self.config.reference_scorer or adapted:
            return None
        module = self._reader.read(folder).requires_grad_(False).eval()
        head, reference = Head(module), module
        if self._stage < 3:
            module.to(self.device)
        else:
            import deepspeed

            settings = deepspeed_config(self.config)
            del settings["optimizer"]
            settings["zero_optimization"].pop("offload_optimizer", None)
            with redirect_stdout(io.StringIO()):
                reference = deepspeed.initialize(model=module, config=settings)[0]
        self._fit_rows(module, head)
        return reference

    def _fit_rows(self, module: torch.nn.Module, head: Head) -> None:
        """Find out, on a few random tokens, what `module` does to its logits and what a row may hold (all ranks).

        A row is a prefix tree, or several sequences, or, if the model mixes them, a single one. Raises UserError.
        """
        kinds = (True, False) if self._prefix_tree else (False,)
        windows: list[int | None] = []
        causes = AssertionError, NotImplementedError, TypeError, ValueError
        with explain(causes, f"{head} cannot be trained: its forward pass failed on a packed row: {{why}}."):
            inputs = row_inputs(empty_row(self.device), self._attention)
            head.measure(module, **inputs, note_window=windows.append)
            if missing := what_is_missing(module, windows, self._reader.longest):
                raise UserError(f"{head} cannot be trained: {missing}.")

            def forward(row: PackedRow) -> tuple[Tensor, ...]:
                return self._compute(row, row, 1.0, module)

            arguments = forward, head.embeddings, self.vocab_size, self.device
            prefix_tree = next((kind for kind in kinds if keeps_apart(*arguments, prefix_tree=kind)), None)
            if self._together.size > 1:
                self._check_divided(module, head)
        self._prefix_tree, self._one_a_row = bool(prefix_tree), self._one_a_row or prefix_tree is None
        if self._one_a_row and self.config.microbatches:
            raise UserError(f"{head} mixes the sequences of a micro-batch: leave out trainer.microbatches.")
        if self.rank == 0:
            rows = {True: "a prefix tree", False: "several sequences", None: "one sequence, since layers mix sequences"}
            settings = {key: getattr(self.config, key) for key in ("dtype", "gradient_checkpointing")}
            log.info("attention", model=str(head), kind=self._attention, a_row_holds=rows[prefix_tree], **settings)

    def _compile_layers(self, head: Head) -> None:
        if self._one_a_row or any(experts_of(self._module.config.get_text_config())):
            raise UserError(f"{head} has layers that mix tokens, or experts: leave out trainer.compile.")
        compile_layers(self._module, self._attention)

    def _check_divided(self, module: torch.nn.Module, head: Head) -> None:
        """Raise UserError, or what the attention raises, if ranks cannot compute rows of `module` together."""
        if not only_attention_mixes(
            lambda row: self._compute(row, row, 1.0, module, muted=True), head.embeddings, self.vocab_size, self.device
        ):
            raise UserError(
                f"{head} cannot be trained with trainer.sequence_parallel={self._together.size}: not only attention "
                f"mixes the tokens of a sequence in it, so set trainer.sequence_parallel=1."
            )
        with torch.no_grad():
            self._forward(empty_row(self.device), 1.0, module)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def _share(self, batch: Sequence[Group] | None) -> FlatBatch:
        """Rank 0's groups as a `FlatBatch` on all ranks."""
        arrays: dict[str, np.ndarray] = {}
        if batch is not None:
            pictures, minibatches = self._look_at(batch), self.config.minibatches
            flat = FlatBatch.of(batch, minibatches=minibatches, prefix_tree=self._prefix_tree, pictures=pictures)
            arrays = flat.arrays()
        kinds = {name: [array.shape, array.dtype.str] for name, array in arrays.items()}
        header = self.messages.broadcast(kinds if self.rank == 0 else None)
        flat = FlatBatch(
            **{
                name: self.messages.send(arrays[name] if self.rank == 0 else np.empty(shape, dtype))
                for name, (shape, dtype) in header.items()
            }
        )
        if len(flat.grids):
            self._tower = self._tower or FrozenTower(self._module, self.source, self.device)
            self._tower.look(flat)
        return flat

    def _look_at(self, batch: Sequence[Group]) -> dict[str, Picture]:
        """The pictures of the groups, by their names."""
        names = dict.fromkeys(name for group in batch for name in pictures_of(group))
        if not names:
            return {}
        sight = sight_of(str(self.source))

        def look(name: str) -> Picture:
            view = self._views.get(name) or self._views.add(sight.look(self._pictures.get(name)))
            self.work_done += 1
            return view

        with ThreadPoolExecutor() as threads:
            return dict(zip(names, threads.map(look, names), strict=True))

    def _rows(self, batch: FlatBatch, trained: np.ndarray, members: np.ndarray) -> list[PackedRow]:
        """The packed rows of the sequences `members` that this rank computes, together with its sequence group."""
        if self.config.microbatches:
            minibatches = len(np.unique(batch.minibatch[members]))
            groups = fixed_number(len(members), self._together.count, self.config.microbatches * minibatches)
        else:
            groups = split_over_ranks(
                batch.lengths[members].tolist(),
                self._together.count,
                1 if self._one_a_row else self.config.max_tokens_per_microbatch,
                batch.shared[members].tolist(),
            )
        return [pack(batch, trained, members[row].tolist(), self.device) for row in groups[self._together.number]]

    def _forward(self, row: PackedRow, temperature: float, module: torch.nn.Module | None = None) -> tuple[Tensor, ...]:
        """Log-probabilities (after temperature) and entropies of the row's tokens in the loss, and a critic's values,
        [S] each (all ranks)."""
        if self._together.size == 1:
            return self._compute(row, row, temperature, module)
        part = self._together.part(row)
        part_inputs = {"input_ids": part.tokens, "position_ids": part.positions, "together": self._together}
        return self._together.join(part, self._compute(part, part.row, temperature, module, **part_inputs))

    def _compute(
        self,
        what: PackedRow | RowPart,
        row: PackedRow,
        temperature: float,
        module: torch.nn.Module | None,
        **inputs: Any,
    ) -> tuple[Tensor, ...]:
        """What the model gives for `what`: `row` or this rank's part. inputs: in place of the row's, or beside them."""
        if self._replay:
            self._replay.follow(what.routes)
        if self._tower:
            self._tower.follow(row)
        return (module or self._deepspeed)(
            **row_inputs(row, self._attention) | inputs,
            predicts=what.predicts,
            distribution=what.distribution,
            targets=what.targets,
            temperature=temperature,
        )

    def step(
        self, batch: Sequence[Group] | None, *, version: int, temperature: float, mask_older_than: int | None = None
    ) -> StepResult:
        """Train on a batch: one optimizer step for each of `config.minibatches` that has a trained token (all ranks).

        batch: the groups on rank 0, None elsewhere; with fewer groups than minibatches, each group is one minibatch.
        version: policy version of the weights before this step. temperature: that of sampling. mask_older_than: tokens
        of earlier versions are left out of the loss. Raises ValueError for a batch that cannot be trained.

        The weight of a token in the loss depends on its whole minibatch, not on the split into micro-batches or ranks.
        """
        flat = self._share(batch)
        trained = flat.trained(mask_older_than, mask_cut=self.config.mask_cut)
        minibatches = [
            self._rows(flat, trained, np.flatnonzero(flat.minibatch == m)) for m in range(int(flat.minibatch.max()) + 1)
        ]
        tally = Tally(self.device)
        rows = [row for minibatch in minibatches for row in minibatch]
        if self.config.kl_coef:
            self._set_reference(rows, flat, trained, temperature, tally)
        if self.config.teacher:
            self._set_teacher(rows, flat)
        values = self._look(minibatches, flat, trained, temperature, tally)
        explained = self._set_advantages(rows, flat, trained, values)
        for m, minibatch in enumerate(minibatches):
            self._train_minibatch(minibatch, version, temperature, tally, first=m == 0)
        if self._keep_values:
            self.values = self._values(rows, flat)
        return tally.result(
            self._control,
            self.config,
            tokens_trained=int(trained.sum()),
            tokens_total=len(flat.tokens),
            explained_variance=explained,
            peak_tflops=self._peak_tflops,
        )

    def _values(self, rows: list[PackedRow], flat: FlatBatch) -> TokenValues:
        """What the step has found for each token of the batch (all ranks)."""
        values = torch.zeros(2, len(flat.tokens))
        for row in rows:
            values[:, torch.from_numpy(row.batch_index)] = torch.stack([row.proximal, row.advantages]).float().cpu()
        return TokenValues(*self.messages.sum(values, counts=self._together.first)[:, flat.by_sample()])

    def loss(self, batch: Sequence[Group] | None, *, temperature: float) -> float:
        """The mean of -log pi over the batch's sampled tokens, in nats; nothing is trained (all ranks)."""
        flat = self._share(batch)
        trained = flat.trained(None)
        return -float(self._pass(flat, trained, None, temperature)[0][trained].mean(dtype=np.float64))

    def logprobs(self, batch: Sequence[Group] | None, *, temperature: float) -> np.ndarray:
        """log pi of the batch's sampled tokens, float32 [T] as in `TokenValues`; nothing is trained (all ranks)."""
        flat = self._share(batch)
        return self._pass(flat, flat.trained(None), None, temperature)[0][flat.by_sample()]

    def _pass(
        self,
        flat: FlatBatch,
        trained: np.ndarray,
        members: np.ndarray | None,
        temperature: float,
        tally: Tally | None = None,
        module: torch.nn.Module | None = None,
    ) -> np.ndarray:
        """Log-probs of the tokens in the loss of the sequences `members` (None: all), and critic's values (all ranks).

        Returns float32 [1 or 2, T] on all ranks, 0 for all other tokens. No gradients are needed, so sequences of
        several minibatches share rows, which takes fewer passes.
        """
        found = torch.zeros(1 if module or not self._critic else 2, len(flat.tokens))
        members, tally = np.arange(len(flat.lengths)) if members is None else members, tally or Tally(self.device)
        with torch.no_grad(), tally.clock("forward"):
            for row in self._rows(flat, trained, members):
                logp, _, *values = self._forward(row, temperature, module)
                found[:, torch.from_numpy(row.batch_index)] = torch.stack([logp, *values]).cpu()
                tally.operations += self._operations.of(row, backward=False) / self._together.size
                self.work_done += 1
        return self.messages.sum(found, counts=self._together.first)

    def _look(
        self,
        minibatches: Sequence[Sequence[PackedRow]],
        flat: FlatBatch,
        trained: np.ndarray,
        temperature: float,
        tally: Tally,
    ) -> np.ndarray | None:
        """Set what a pass before the step finds for the tokens (all ranks). Returns a critic's values of all sampled
        ones, float32 [T]; None without a critic.

        The first minibatch's forward pass has these weights, too. But a mask and values have to be known before it.
        """
        masked, recompute = self.config.objective == "m2po", self.config.proximal == "recompute"
        first = 0 if masked or self._critic else 1
        if not self._critic and not (recompute and len(minibatches) > first):
            return None
        wanted = flat.trained(None) if self._critic else trained
        proximal, *values = self._pass(flat, wanted, np.flatnonzero(flat.minibatch >= first), temperature, tally)
        for minibatch in minibatches[first:]:
            for row in minibatch:
                row.proximal = row.pick(proximal) if recompute else None
        if masked:
            self._set_mask([row for minibatch in minibatches for row in minibatch], flat, trained, proximal)
        return values[0] if values else None

    def _set_reference(
        self, rows: list[PackedRow], flat: FlatBatch, trained: np.ndarray, temperature: float, tally: Tally
    ) -> None:
        if self.config.reference_scorer:
            reference = _needed_column(flat, "reference_logprobs", f"trainer.reference={self.config.reference}")
        else:
            unrouted = replace(flat, routes=np.zeros(0, np.uint8))  # the experts were chosen for another policy
            with self._module.disable_adapter() if self._reference is None else nullcontext():
                reference = self._pass(unrouted, trained, None, temperature, tally, self._reference)[0]
        for row in rows:
            row.reference = row.pick(reference)

    def _set_teacher(self, rows: list[PackedRow], flat: FlatBatch) -> None:
        """Set the teacher's log-probs, and likeliest tokens if trained on. What the policy lacks is unlikely."""
        teacher = _needed_column(flat, "teacher_logprobs", f"trainer.teacher={self.config.teacher}")
        for row in rows:
            row.teacher = row.pick(teacher)
        if not (top_k := self.config.teacher_top_k):
            return
        of_batch = [_needed_column(flat, name, f"trainer.teacher_top_k={top_k}") for name in TOP]
        for row in rows:
            tokens, logprobs = map(row.pick, of_batch)
            in_vocabulary = tokens < self.vocab_size
            row.top_tokens = torch.where(in_vocabulary, tokens, 0).long()
            row.top_logprobs = torch.where(in_vocabulary, logprobs, UNLIKELY)

    def _set_advantages(
        self, rows: list[PackedRow], flat: FlatBatch, trained: np.ndarray, values: np.ndarray | None
    ) -> float | None:
        """Set the advantage and the loss weight of each token in this rank's rows, and the target of its value (all
        ranks). values: [T], the critic's, which gives estimates in place of returns. Returns the share of the variance
        of the targets that they explain; None without a critic, or if the targets are all the same."""
        config, explained = self.config, None
        order = flat.by_sample()
        samples, sampled = np.repeat(flat.samples, flat.lengths)[order], flat.versions[order] != NOT_SAMPLED
        returns = flat.returns[order] if len(flat.returns) else None
        penalties = self._penalties(rows, len(flat.tokens))
        if penalties is not None:
            penalties = penalties[order]
        if config.critic and values is not None:
            credits = flat.rewards[samples] if returns is None else returns
            gamma, lam = config.critic.gamma, config.critic.lam
            returns = gae(values[order], credits, penalties, samples, sampled, gamma=gamma, lam=lam)
            targets, penalties = np.zeros(len(values)), None
            targets[order] = returns + values[order]
            for row in rows:
                row.values, row.value_targets = row.pick(values), row.pick(targets)
            if variance := targets[order][sampled].var():
                explained = float(1 - returns[sampled].var() / variance)
        gains = np.empty(len(flat.tokens))
        gains[order] = advantages(
            flat.rewards,
            flat.groups,
            samples,
            returns,
            penalties,
            sampled=sampled,
            mean=config.advantage_mean,
            std=config.advantage_std,
        )
        weights = flat.weights(trained, config.loss_mean, config.loss_tokens)
        for row in rows:
            row.advantages, row.weights = row.pick(gains), row.pick(weights)
        return explained

    def _set_mask(self, rows: list[PackedRow], flat: FlatBatch, trained: np.ndarray, proximal: np.ndarray) -> None:
        """Set the tokens of this rank's rows that the mask of their minibatch keeps. proximal: [T], log-probs."""
        minibatch = np.repeat(flat.minibatch, flat.lengths)
        mask = np.zeros(len(trained))
        for m in range(int(flat.minibatch.max()) + 1):
            tokens = trained & (minibatch == m)
            mask[tokens] = within_second_moment(proximal[tokens] - flat.logprobs[tokens], self.config.m2_threshold)
        for row in rows:
            row.mask = row.pick(mask).bool()

    def _penalties(self, rows: list[PackedRow], tokens: int) -> np.ndarray | None:
        """The KL penalty on each token of the batch, to be taken from its return (all ranks).

        Returns float64 [T] on all ranks, or None if the penalty is not part of the reward.
        """
        if not self.config.kl_coef or self.config.kl_in != "reward":
            return None
        penalties = torch.zeros(tokens, dtype=torch.float64)
        for row in rows:
            cost = self.config.kl_coef * kl(row.behaviour, row.reference, self.config.kl_estimator)
            penalties[torch.from_numpy(row.batch_index)] = cost.double().cpu()
        return self.messages.sum(penalties, counts=self._together.first)

    def _train_minibatch(
        self, rows: list[PackedRow], version: int, temperature: float, tally: Tally, *, first: bool
    ) -> None:
        """One optimizer step, unless every token is masked. first: true for the first minibatch of the batch."""
        critic, trained = self.config.critic, torch.zeros(1, device=self.device)
        alone = critic is not None and self._deepspeed.lr_scheduler.last_epoch < critic.warmup_steps
        if critic and self._critic:
            self._critic.share = 0.0 if alone else critic.coef
        for i, row in enumerate(rows):
            self._deepspeed.set_gradient_accumulation_boundary(i == len(rows) - 1)
            with tally.clock("forward"):
                everything = self._forward(row.with_top_tokens(), temperature)
                logp, entropy, *values = (output[: len(row.targets)] for output in everything)
                if row.proximal is None:
                    row.proximal = self._proximal(row, logp, version, first=first)
                if row.teacher is not None and row.top_tokens is None:
                    row.advantages = row.advantages + self.config.teacher_coef * (row.teacher - row.proximal)
                tokens = Tokens(logp, row.proximal, row.behaviour, row.advantages, row.sequence, row.mask, entropy)
                out = mask_sequences(self._objective(tokens, self.config), tokens, self.config)
                loss = out.loss
                if self.config.kl_coef and self.config.kl_in == "loss":
                    loss = loss + self.config.kl_coef * kl_penalty(tokens, row.reference, self.config)
                if row.top_logprobs is not None:
                    likely = everything[0][len(row.targets) :].view_as(row.top_logprobs)
                    loss = loss + self.config.teacher_coef * kl_of_top(row.top_logprobs, likely)
                if self.config.entropy_coef:
                    loss = loss - self.config.entropy_coef * entropy
                trained += len(loss) if critic else (~out.clipped | (loss != 0)).sum()
                errors = None
                if critic:
                    errors = value_loss(values[0], row.values, row.value_targets, critic.value_clip)
                if self._together.first:
                    tally.add(row, logp, entropy, replace(out, loss=loss), version, first=first, errors=errors)
                if errors is not None:
                    loss = errors + (0.0 if alone else 1.0) * loss
                tally.operations += self._operations.of(row, backward=True) / self._together.size
            with tally.clock("backward"):
                # DeepSpeed averages over ranks, but the gradient has to be a sum over ranks.
                self._deepspeed.backward((loss * row.weights).sum() * self.world_size)
            self.work_done += 1
        with tally.clock("optimizer"):
            self._optimizer_step(tally, moves=bool(self.messages.sum(trained.cpu(), counts=self._together.first)))

    def _optimizer_step(self, tally: Tally, *, moves: bool) -> None:
        """Adam's step and that of the schedule, or, if nothing `moves`, only what DeepSpeed clears after it (all
        ranks). By Adam's moments and the decay a gradient of 0 would move the weights, too."""
        norm, rate = None, self._deepspeed.get_lr()[0]
        if self._stage == 0:
            norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self.config.grad_clip)
        with nullcontext() if moves else held(self._deepspeed):
            self._deepspeed.step()
        if moves:
            tally.lr = rate
            tally.grad_norms.append(float(self._deepspeed.get_global_grad_norm() if norm is None else norm))

    def _proximal(self, row: PackedRow, logp: Tensor, version: int, *, first: bool) -> Tensor:
        if first and self.config.proximal == "recompute":
            return logp.detach()
        return interpolated_proximal(logp, row.behaviour, version - row.versions)

    def snapshot(self) -> None:
        """Copy the current weights into host memory, each on the rank that writes it, for `begin_write` (all ranks).

        The copy overwrites the previous snapshot, which must not be in use any more.
        """
        self._copied = self._copy(self._snapshot)

    def _copy(self, copies: dict[str, Tensor]) -> Copied:
        if self._stage == 3:
            # A pass without a backward one ends with parameters that DeepSpeed has begun to gather for that.
            self._deepspeed.optimizer.empty_partition_cache()

        @contextmanager
        def whole(parameter: torch.nn.Parameter) -> Iterator[None]:
            with self._zero.GatheredParameters([parameter], enabled=self._stage == 3):
                yield
            self.work_done += 1

        return self._weights.copy(copies, whole)

    def begin_write(self, folder: Path) -> Future[Manifest | None]:
        """Begin to write the last snapshot into `folder`, in the model's dtype, for generators (all ranks).

        Training steps may run meanwhile. Adapters are written without the weights they belong to. The folder appears
        complete or not at all, as `Writer.begin` says. The result is on rank 0 the manifest of its files.
        """
        return self._publisher.begin(folder, Published(self._copied))

    def publish(self, folder: Path) -> Path:
        """Write the current weights and wait for the disk; returns `folder` (all ranks)."""
        self.snapshot()
        self.begin_write(folder).result()
        return folder

    def begin_save(self, folder: Path, run: str = "") -> Future[Manifest | None]:
        """Copy the current weights and training state, and begin to write a checkpoint: a model folder that loads by
        itself, with the state for `load` (all ranks). run: the identity of the run.

        Training steps and `begin_write` may run meanwhile. The folder appears as with those. Until it is written, the
        copies take up host memory: on each rank 12 bytes per trained parameter, divided by the number of ranks, and on
        rank 0's host the weights, divided by the number of its ranks. With the same number of ranks and threads and the
        same ZeRO stage, fp32 training on the CPU that resumes from it gives the same bits as if it had never stopped.
        """
        share, copied = self._state.copy(run), self._copy({})
        return self._saver.begin(folder, ModelFolder(copied, self.source, self.config.dtype, share))

    def save(self, folder: Path) -> Path:
        """Write a checkpoint and wait for the disk; returns `folder` (all ranks)."""
        self.begin_save(folder).result()
        return folder

    def export(self, folder: Path) -> Path:
        """Write a model folder as in a checkpoint, but without the training state to resume from (all ranks)."""
        self._saver.begin(folder, ModelFolder(self._copy({}), self.source, self.config.dtype, None)).result()
        return folder

    def load(self, folder: Path, run: str = "") -> None:
        """Resume from a checkpoint of `save`, written with any number of ranks and at any ZeRO stage (all ranks).

        Raises UserError on every rank, before anything is changed, if the folder holds no checkpoint, one of another
        model or of another run than `run`, or a damaged one.
        """
        self._state.load(folder, run)

    def offload(self) -> None:
        """Move weights, gradients and the optimizer's state to host memory, so that others can have the devices' memory
        until `reload` (all ranks). Nothing else may be called in between."""
        self._offloaded.leave(tensor for tensor in self._resident() if tensor.device == self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo `offload` (all ranks)."""
        self._offloaded.come_back()

    def _resident(self) -> Iterator[Tensor]:
        """What this rank has on its device."""
        for module in filter(None, (self._module, self._reference, self._tower and self._tower.module)):
            for parameter in module.parameters():
                yield from tensors_in((parameter, getattr(parameter, "ds_tensor", None)))
            yield from module.buffers()
        for optimizer in (self._deepspeed.basic_optimizer, self._deepspeed.optimizer):
            yield from tensors_in(vars(optimizer))

    def close(self) -> None:
        """Wait until all folders are written, and remove DeepSpeed's hooks and buffers (all ranks)."""
        self._publisher.close()
        self._saver.close()
        self._deepspeed.destroy()
        if self._stage == 3 and self._reference is not None:
            self._reference.destroy()

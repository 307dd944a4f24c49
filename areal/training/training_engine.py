"""Training with DeepSpeed. Only this module, `optimizer`, `checkpoint` and extensions use its API.

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
from concurrent.futures import Future
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

from areal.base import extensions
from areal.base.errors import explain
from areal.base.network_interfaces import choose_interface
from areal.base.processes import importing
from areal.config import Config
from areal.config.trainer_section import TrainerConfig
from areal.cpu import deepspeed_on_cpu as cpu
from areal.models import check_trainable, flash_computes, routing_of
from areal.samples.pictures import find, pictures_of
from areal.samples.trajectory import Group, TokenValues
from areal.storage.disk import DiskRetry
from areal.training.agreement import SILENCE, RankMessages, Writer
from areal.training.algorithms.algorithm import RowOutputs, policy_gradient, set_columns
from areal.training.algorithms.assembly import algorithm_of
from areal.training.attention import choose_attention, look_before
from areal.training.checkpoint import TrainingState
from areal.training.division import division_of
from areal.training.flops import Operations, peak_tflops
from areal.training.head import Head
from areal.training.model_reader import ModelReader
from areal.training.offload import OffloadedTensors, tensors_in
from areal.training.optimizer import (
    bucket_elements,
    deepspeed_config,
    held,
    learning_rates,
    parameter_groups,
    value_head_group,
)
from areal.training.packed import FlatBatch, PackedRow
from areal.training.passes import Passes
from areal.training.shards import Copied, ModelFolder, Published, WeightCopies
from areal.training.step_metrics import StepResult, Tally
from areal.weights.chunks import Manifest

log = structlog.get_logger()


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


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class TrainingEngine:
    """A causal language model in training, on one rank.

    model: folder of a Hugging Face model. The number of ranks comes from torchrun's environment; without it there is
    one rank. optimizer_steps: of the whole run, needed if the learning rate is not constant. keep_values: whether a
    step leaves what it found for each token in `values`. disk_retry: with which folders are written. longest: the most
    tokens of a sequence; None: the model's limit. pictures: the folder of those of prompts. keeps_cache: whether
    generators keep the KV cache of sequences on new weights. Raises UserError if the model cannot be loaded, or not be
    trained on such sequences or with this number of ranks.
    """

    values: TokenValues | None = None  # until a step has left what it found
    work_done = 0
    """Micro-batches computed, parameters gathered and pictures read since the start. Rises unless work hangs."""
    whole_logprobs: np.ndarray | None = None
    """As those of the proximal policy in `values`, but among all words, where sampling has left words out. Tokens of
    later minibatches have 0."""

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
        keeps_cache: bool = False,
    ) -> None:
        check_trainable(model, config.sequence_parallel, longest)
        cuda = torch.cuda.is_available()
        self.config = config = config.for_device(cuda=cuda)
        self._zero = _open_deepspeed(config, cuda).zero
        torch.manual_seed(seed)
        self.source, self._pictures = model, pictures
        self._views: Any = None  # until a batch has pictures
        self._keep_values, self._keeps_cache = keep_values, keeps_cache
        self._control = control_group()
        self.messages = RankMessages(self._control)
        self._division = division_of(config, model)
        settings = deepspeed_config(config) | self._division.options
        self._stage: int = settings["zero_optimization"]["stage"]
        policy = policy_gradient(config)  # mistakes of the user are said before the model is read
        attention = choose_attention(config.dtype, flash=flash_computes(model))
        self._reader = ModelReader(config, self._stage, attention, longest)
        check_settings(settings)
        self._together = self._division.together(config.sequence_parallel)
        self._ranks_a_row = self._together.size * self._division.ranks_a_row
        look_before(attention)
        head, groups = self._prepare_model()
        self.algorithm = algorithm_of(policy, config, self.vocab_size)
        self._start_deepspeed(settings, groups, optimizer_steps)
        self._state = TrainingState(self._deepspeed, self._trained, self._stage, self._division, self._control)
        self.device: torch.device = self._deepspeed.device
        replayed = routing_of(model) if config.routing == "replay" else None
        replay = self._division.route_replay(self._module, replayed) if replayed else None
        self.passes = Passes(config, attention, self._together, self.device, replay)
        self.passes.fit(self._module, head, self._reader.longest)
        if config.compile:
            self.passes.compile(self._module, head)
        self._peak_tflops = config.peak_tflops or peak_tflops(self.device, config.dtype)
        self._reference = self._start_reference()
        self._weights = WeightCopies(self._module, self._published, self.messages, self._division, bool(config.lora))
        self._snapshot, self._offloaded = dict[str, Tensor](), OffloadedTensors()
        disk_retry = disk_retry or DiskRetry(model, "the trainer", logs=self.rank == 0)
        self._publisher, self._saver = Writer(disk_retry), Writer(disk_retry)

    def _prepare_model(self) -> tuple[Head, list[dict[str, Any]]]:
        """Read the model, with its adapters and its critic. Returns its head, and the parameters as groups for Adam."""
        config = self.config
        self._module = self._reader.read(self.source)
        head = Head(self._module)
        self.vocab_size: int = self._module.config.get_text_config().vocab_size
        if config.gradient_checkpointing:
            self._module.gradient_checkpointing_enable({"use_reentrant": False})
        if config.lora:
            add_adapters = extensions.need("lora", "add", "trainer.lora").load()
            self._module = add_adapters(self._module, config.lora, self.source)
            head.refuse_adapters()
        self._division.begin(self._module)
        groups = parameter_groups(_trainable(self._module).values(), config.weight_decay)
        if config.critic:
            self._module.value_head = head.add_critic(config.critic)
            groups.append(value_head_group(self._module.value_head, config.critic.lr))
        self._critic = head.critic
        self._operations = Operations(self._module)
        self._division.name_groups(groups)
        return head, groups

    def _start_deepspeed(self, settings: dict[str, Any], groups: list[dict[str, Any]], optimizer_steps: int) -> None:
        import deepspeed

        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in _trainable(self._module).items()}
        settings["zero_optimization"].setdefault("reduce_bucket_size", bucket_elements(sizes))
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints memory tables
            self._deepspeed, *_ = deepspeed.initialize(
                model=self._module,
                model_parameters=groups,
                config=settings,
                lr_scheduler=lambda optimizer: learning_rates(optimizer, self.config, optimizer_steps),
            )
        self._division.find(self._deepspeed)
        self._trained = _trainable(self._module)
        self._published = {name: p for name, p in self._trained.items() if not name.startswith("value_head.")}
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
            keeps_cache=config.generator.kv_on_update == "keep",
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
        self.passes.fit(module, head, self._reader.longest)
        return reference

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
            flat = FlatBatch.of(
                batch,
                minibatches=self.config.minibatches,
                prefix_tree=self.passes.prefix_tree,
                keeps_cache=self._keeps_cache,
                pictures=self._look_at(batch),
            )
            arrays = flat.arrays()
        kinds = {name: [array.shape, array.dtype.str] for name, array in arrays.items()}
        header = self.messages.broadcast(kinds if self.rank == 0 else None)
        sent = {
            name: self.messages.send(arrays[name] if self.rank == 0 else np.empty(shape, dtype))
            for name, (shape, dtype) in header.items()
        }
        flat = FlatBatch.of_arrays(sent)
        if flat.pictures:
            self.passes.tower = self.passes.tower or find("tower")(self._module, self.source, self.device)
            self.passes.tower.look(flat)
        return flat

    def _look_at(self, batch: Sequence[Group]) -> dict[str, Any]:
        """The pictures of the groups, by their names."""
        names = dict.fromkeys(name for group in batch for name in pictures_of(group))
        if not names:
            return {}
        self._views = self._views or find("views")(str(self.source))

        def count_work() -> None:
            self.work_done += 1

        views: dict[str, Any] = self._views.look_all(names, self._pictures, count_work)
        return views

    def step(
        self, batch: Sequence[Group] | None, *, version: int, temperature: float, mask_older_than: int | None = None
    ) -> StepResult:
        """Train on a batch: one optimizer step for each of `config.minibatches` that has a trained token (all ranks).

        batch: the groups on rank 0, None elsewhere; with fewer groups than minibatches, each group is one minibatch.
        version: policy version of the weights before this step. temperature: that of sampling. mask_older_than: tokens
        of earlier versions are left out of the loss. Raises ValueError for a batch that cannot be trained.

        The weight of a token in the loss depends on its whole minibatch, not on the split into micro-batches or ranks.
        """
        flat, tally = self._share(batch), Tally(self.device)
        flat.columns["trained"] = trained = flat.trained(mask_older_than, mask_cut=self.config.mask_cut)
        flat.columns["staleness"] = version - flat.columns["versions"]
        minibatches = [
            self.passes.rows(flat, trained, np.flatnonzero(flat.minibatch == m))
            for m in range(int(flat.minibatch.max()) + 1)
        ]
        self._look_ahead(flat, temperature, tally)
        set_columns(flat, self.algorithm, self.config)
        for m, minibatch in enumerate(minibatches):
            for row in minibatch:
                row.set_columns(flat.columns)
                if m == 0 and not self.algorithm.looks_ahead:
                    row.columns.pop("proximal", None)
        for m, minibatch in enumerate(minibatches):
            self._train_minibatch(minibatch, temperature, tally, first=m == 0)
        if self._keep_values:
            self.values = self._values([row for minibatch in minibatches for row in minibatch], flat)
        return tally.result(self._control, self.config, flat, self._peak_tflops)

    def _values(self, rows: list[PackedRow], flat: FlatBatch) -> TokenValues:
        """What the step has found for each token of the batch (all ranks)."""
        values = torch.zeros(3, len(flat.tokens))
        for row in rows:
            of_row = [row.columns[name] for name in ("proximal", "advantages")]
            of_row.append(row.columns.get("kept_mass", torch.zeros_like(of_row[0])))
            values[:, torch.from_numpy(row.batch_index)] = torch.stack(of_row).float().cpu()
        *of_tokens, mass = self.messages.sum(values, counts=self._together.first)[:, flat.by_sample()]
        self.whole_logprobs = np.where(
            np.repeat(flat.minibatch == 0, flat.lengths)[flat.by_sample()], of_tokens[0] + mass, 0
        )
        return TokenValues(*of_tokens)

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
            for row in self.passes.rows(flat, trained, members):
                logp, _, *values = self.passes.forward(module or self._deepspeed, row, temperature)
                found[:, torch.from_numpy(row.batch_index)] = torch.stack([logp, *values]).cpu()
                tally.operations += self._operations.of(row, backward=False) / self._ranks_a_row
                self.work_done += 1
        return self.messages.sum(found, counts=self._together.first)

    def _look_ahead(self, flat: FlatBatch, temperature: float, tally: Tally) -> None:
        """Add the columns that the algorithm needs of passes before the step (all ranks). Raises ValueError if samples
        lack a column that it needs of them."""
        columns, needs = flat.columns, self.algorithm.needs
        if "reference" in needs:
            unrouted = {name: values for name, values in flat.inputs.items() if name != "routes"}  # of another policy
            with self._module.disable_adapter() if self._reference is None else nullcontext():
                of_batch = replace(flat, inputs=unrouted), columns["trained"], None
                columns["reference"] = self._pass(*of_batch, temperature, tally, self._reference)[0]
        for name in [name for name in needs if name not in (*columns, "proximal", "values")]:
            raise ValueError(f"the samples have no {name}, which {needs[name]} needs: no scorer has scored them")
        later = np.flatnonzero(flat.minibatch >= (0 if self.algorithm.looks_ahead else 1))
        if "values" in needs or ("proximal" in needs and len(later)):
            wanted = flat.trained(None) if "values" in needs else columns["trained"]
            found = self._pass(flat, wanted, later, temperature, tally)
            of_pass = dict(zip(("proximal", "values"), found, strict=False))
            columns |= {name: values for name, values in of_pass.items() if name in needs}

    def _train_minibatch(self, rows: list[PackedRow], temperature: float, tally: Tally, *, first: bool) -> None:
        """One optimizer step, unless every token is masked. first: true for the first minibatch of the batch."""
        moving = torch.zeros(1, device=self.device)
        if self._critic:
            self._critic.follow(self._deepspeed.lr_scheduler.last_epoch)
        for i, row in enumerate(rows):
            self._deepspeed.set_gradient_accumulation_boundary(i == len(rows) - 1)
            with tally.clock("forward"):
                outputs = self._outputs(row, temperature)
                out = self.algorithm.loss(outputs, row)
                moving += out.moving.sum()
                if self._together.first:
                    tally.add(row, outputs, out, first=first)
                loss = out.loss
                if self._critic and out.value_loss is not None:
                    loss = out.value_loss + self._critic.policy_share * loss
                tally.operations += self._operations.of(row, backward=True) / self._ranks_a_row
            with tally.clock("backward"):
                # DeepSpeed averages over ranks with other rows, but the gradient has to be a sum over these.
                ranks = self.world_size // self._division.ranks_a_row
                self._deepspeed.backward((loss * row.columns["weights"]).sum() * ranks)
            self.work_done += 1
        with tally.clock("optimizer"):
            self._optimizer_step(tally, moves=bool(self.messages.sum(moving.cpu(), counts=self._together.first)))

    def _outputs(self, row: PackedRow, temperature: float) -> RowOutputs:
        """What the pass of a minibatch gives for a row (all ranks)."""
        if (further := self.algorithm.further) is None:
            return RowOutputs(*self.passes.forward(self._deepspeed, row, temperature))
        tokens = row.columns[further].long()
        everything = self.passes.forward(self._deepspeed, row.with_targets(tokens), temperature)
        logp, entropy, *values = (output[: len(row.targets)] for output in everything)
        return RowOutputs(
            logp, entropy, values[0] if values else None, everything[0][len(row.targets) :].view_as(tokens)
        )

    def _optimizer_step(self, tally: Tally, *, moves: bool) -> None:
        """Adam's step and that of the schedule, or, if nothing `moves`, only what DeepSpeed clears after it (all
        ranks). By Adam's moments and the decay a gradient of 0 would move the weights, too."""
        norm, rate = None, self._deepspeed.get_lr()[0]
        if self._stage == 0:
            norm = self._division.clip(self._trained.values(), self.config.grad_clip)
        with nullcontext() if moves else held(self._deepspeed):
            self._deepspeed.step()
        if moves:
            tally.lr = rate
            tally.grad_norms.append(float(self._deepspeed.get_global_grad_norm() if norm is None else norm))

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
        def whole(parameter: torch.nn.Parameter) -> Iterator[Tensor]:
            with self._zero.GatheredParameters([parameter], enabled=self._stage == 3):
                yield self._division.whole(parameter)
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
        for module in filter(None, (self._module, self._reference, self.passes.tower and self.passes.tower.module)):
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

"""Training with DeepSpeed: the step of a batch, from its groups to the optimizer.

There is one `TrainingEngine` per rank. A method that says *all ranks* is a collective: every rank calls the method, in
the same order. If a collective raises on any rank, training is over on all ranks: the other ranks wait inside the call
and have to be killed.

The engine has three parts: `TrainedModel` (the model in DeepSpeed), `Passes` (rows through the model) and
`ModelStorage` (published weights and checkpoints on disk).
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal.base import extensions
from areal.config import Config
from areal.config.trainer_section import TrainerConfig
from areal.models import check_trainable, flash_computes
from areal.samples.pictures import find, pictures_of
from areal.samples.trajectory import Group, TokenValues
from areal.storage.disk import DiskRetry
from areal.training.agreement import RankMessages
from areal.training.algorithms.algorithm import policy_gradient, set_columns
from areal.training.algorithms.assembly import algorithm_of
from areal.training.attention import choose_attention, look_before
from areal.training.division import division_of
from areal.training.flops import Operations, peak_tflops
from areal.training.model_reader import ModelReader
from areal.training.model_storage import ModelStorage
from areal.training.offload import OffloadedTensors, tensors_in
from areal.training.optimizer import deepspeed_config, held
from areal.training.packed import FlatBatch, PackedRow
from areal.training.passes import Passes
from areal.training.step_metrics import StepResult, Tally
from areal.training.trained_model import TrainedModel, check_settings, control_group, open_deepspeed


class TrainingEngine:
    """A causal language model in training, on one rank.

    model: folder of a Hugging Face model. The number of ranks comes from torchrun's environment; without torchrun there
    is one rank. optimizer_steps: of the whole run, needed if the learning rate is not constant. keep_values: whether a
    step stores the log-probs and advantages of its tokens in `values`. disk_retry: how folders are written to a full
    disk. longest: the most tokens of a sequence; None: the model's limit. pictures: the folder of the prompts'
    pictures. keeps_cache: whether generators keep the KV cache of sequences on new weights. Raises UserError if the
    model cannot be loaded, or not be trained on sequences of this length or with this number of ranks.
    """

    values: TokenValues | None = None
    """The values of the last step's tokens, if `keep_values`."""
    whole_logprobs: np.ndarray | None = None
    """Proximal log-probs among all words, also words that sampling left out; 0 in later minibatches."""

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
        open_deepspeed(config, cuda)
        torch.manual_seed(seed)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._keep_values, self._keeps_cache = keep_values, keeps_cache
        self.messages = RankMessages(control_group())
        division = division_of(config, model)
        settings = deepspeed_config(config) | division.options
        policy = policy_gradient(config)  # mistakes of the user are said before the model is read
        attention = choose_attention(config.dtype, flash=flash_computes(model))
        reader = ModelReader(config, settings["zero_optimization"]["stage"], attention, longest)
        check_settings(settings)
        self._together = division.together(config.sequence_parallel)
        self._ranks_a_row = self._together.size * division.ranks_a_row
        look_before(attention)
        self.model = TrainedModel(model, config, reader, division)
        self._operations = Operations(self.model.module)
        self.algorithm = algorithm_of(policy, config, self.model.vocab_size)
        self.model.start(settings, optimizer_steps)
        replay = None
        if config.routing == "replay":
            routing = extensions.need("routing", "of_model", "trainer.routing=replay").load()(model)
            replay = division.route_replay(self.model.module, routing)
        self.passes = Passes(config, attention, self._together, self.model.device, replay)
        self.passes.fit(self.model.module, self.model.head, longest)
        if config.compile:
            self.passes.compile(self.model.module, self.model.head)
        self._peak_tflops = config.peak_tflops or peak_tflops(self.model.device, config.dtype)
        self._reference = self.model.start_reference(lambda module, head: self.passes.fit(module, head, longest))
        self._pictures: Any = cache(lambda: find("batch")(self.model, pictures))
        disk_retry = disk_retry or DiskRetry(model, "the trainer", logs=self.rank == 0)
        self.storage, self._offloaded = ModelStorage(self.model, self.messages, disk_retry), OffloadedTensors()

    @classmethod
    def of_run(cls, config: Config, *, keep_values: bool, disk_retry: DiskRetry | None = None) -> "TrainingEngine":
        """Return the engine with which the run of `config` begins (all ranks)."""
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

    def _share(self, batch: Sequence[Group] | None) -> FlatBatch:
        """Return rank 0's groups as a `FlatBatch` on all ranks."""
        arrays: dict[str, np.ndarray] = {}
        if batch is not None:
            names = dict.fromkeys(name for group in batch for name in pictures_of(group))
            flat = FlatBatch.of(
                batch,
                minibatches=self.config.minibatches,
                prefix_tree=self.passes.prefix_tree,
                keeps_cache=self._keeps_cache,
                pictures=self._pictures().views(names) if names else {},
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
            self.passes.tower = self._pictures().tower_on(flat)
        return flat

    def step(
        self, batch: Sequence[Group] | None, *, version: int, temperature: float, mask_older_than: int | None = None
    ) -> StepResult:
        """Train on a batch: one optimizer step for each of `config.minibatches` that has a trained token (all ranks).

        batch: the groups on rank 0, None elsewhere; with fewer groups than minibatches, each group is one minibatch.
        version: policy version of the weights before this step. temperature: of sampling. mask_older_than: tokens of
        earlier versions are left out of the loss. Raises ValueError for a batch that cannot be trained.

        The weight of a token in the loss depends on the whole minibatch, not on the split into micro-batches or ranks.
        """
        flat, tally = self._share(batch), Tally(self.model.device)
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
        return tally.result(self.messages.group, self.config, flat, self._peak_tflops)

    def _values(self, rows: list[PackedRow], flat: FlatBatch) -> TokenValues:
        """Return the proximal log-probs and advantages of the batch's tokens, and set `whole_logprobs` (all ranks)."""
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
        """Return the mean of -log pi over the batch's sampled tokens, in nats; nothing is trained (all ranks)."""
        flat = self._share(batch)
        trained = flat.trained(None)
        return -float(self._pass(flat, trained, None, temperature)[0][trained].mean(dtype=np.float64))

    def logprobs(self, batch: Sequence[Group] | None, *, temperature: float) -> np.ndarray:
        """Return log pi of the sampled tokens, float32 [T] as in `TokenValues`; nothing is trained (all ranks)."""
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
        """Compute the log-probs of the tokens in the loss, and the critic's values (all ranks). members: the sequences;
        None: all.

        Returns float32 [1 or 2, T] on all ranks, 0 for tokens outside the loss. No gradients are needed, so sequences
        of several minibatches share rows, which takes fewer passes.
        """
        found = torch.zeros(1 if module or not self.model.critic else 2, len(flat.tokens))
        members, tally = np.arange(len(flat.lengths)) if members is None else members, tally or Tally(self.model.device)
        with torch.no_grad(), tally.clock("forward"):
            for row in self.passes.rows(flat, trained, members):
                logp, _, *values = self.passes.forward(module or self.model.deepspeed, row, temperature)
                found[:, torch.from_numpy(row.batch_index)] = torch.stack([logp, *values]).cpu()
                tally.operations += self._operations.of(row, backward=False) / self._ranks_a_row
                self.model.work_done += 1
        return self.messages.sum(found, counts=self._together.first)

    def _look_ahead(self, flat: FlatBatch, temperature: float, tally: Tally) -> None:
        """Add the columns that the algorithm needs from passes before the step (all ranks). Raises ValueError if the
        samples lack a column that the algorithm needs from a scorer."""
        columns, needs = flat.columns, self.algorithm.needs
        if "reference" in needs:
            # another policy chose the routes
            unrouted = {name: values for name, values in flat.inputs.items() if name != "routes"}
            with self.model.module.disable_adapter() if self._reference is None else nullcontext():
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
        """Make an optimizer step, unless every token is masked. first: true for the first minibatch of the batch."""
        moving = torch.zeros(1, device=self.model.device)
        deepspeed, critic = self.model.deepspeed, self.model.critic
        if critic:
            critic.follow(deepspeed.lr_scheduler.last_epoch)
        for i, row in enumerate(rows):
            deepspeed.set_gradient_accumulation_boundary(i == len(rows) - 1)
            with tally.clock("forward"):
                outputs = self.passes.outputs(deepspeed, row, temperature, self.algorithm.further)
                out = self.algorithm.loss(outputs, row)
                moving += out.moving.sum()
                if self._together.first:
                    tally.add(row, outputs, out, first=first)
                loss = out.loss
                if critic and out.value_loss is not None:
                    loss = out.value_loss + critic.policy_share * loss
                tally.operations += self._operations.of(row, backward=True) / self._ranks_a_row
            with tally.clock("backward"):
                # DeepSpeed averages over ranks with different rows, but the gradient has to be a sum over all rows.
                ranks = self.world_size // self.model.division.ranks_a_row
                deepspeed.backward((loss * row.columns["weights"]).sum() * ranks)
            self.model.work_done += 1
        with tally.clock("optimizer"):
            self._optimizer_step(tally, moves=bool(self.messages.sum(moving.cpu(), counts=self._together.first)))

    def _optimizer_step(self, tally: Tally, *, moves: bool) -> None:
        """Make a step of Adam and of the schedule (all ranks). moves: if false, only clear the gradients: by Adam's
        moments and the decay a gradient of 0 would move the weights, too."""
        model, deepspeed = self.model, self.model.deepspeed
        norm, rate = None, deepspeed.get_lr()[0]
        if model.stage == 0:
            norm = model.division.clip(model.trained.values(), self.config.grad_clip)
        with nullcontext() if moves else held(deepspeed):
            deepspeed.step()
        if moves:
            tally.lr = rate
            tally.grad_norms.append(float(deepspeed.get_global_grad_norm() if norm is None else norm))

    def offload(self) -> None:
        """Move weights, gradients and the optimizer's state to host memory, so that a generator can have the devices'
        memory until `reload` (all ranks). Nothing else may be called in between."""
        self._offloaded.leave(tensor for tensor in self._resident() if tensor.device == self.model.device)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo `offload` (all ranks)."""
        self._offloaded.come_back()

    def _resident(self) -> Iterator[Tensor]:
        """Yield the tensors on this rank's device."""
        tower = self.passes.tower and self.passes.tower.module
        for module in filter(None, (self.model.module, self._reference, tower)):
            for parameter in module.parameters():
                yield from tensors_in((parameter, getattr(parameter, "ds_tensor", None)))
            yield from module.buffers()
        for optimizer in (self.model.deepspeed.basic_optimizer, self.model.deepspeed.optimizer):
            yield from tensors_in(vars(optimizer))

    def close(self) -> None:
        """Wait until all folders are written, and remove DeepSpeed's hooks and buffers (all ranks)."""
        self.storage.close()
        self.model.deepspeed.destroy()
        if self.model.stage == 3 and self._reference is not None:
            self._reference.destroy()

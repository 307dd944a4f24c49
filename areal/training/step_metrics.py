"""The metrics of a training step: sums over the tokens of every rank, combined at the end of the step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from areal.config.trainer_section import TrainerConfig
from areal.samples.table import NOT_SAMPLED
from areal.training.algorithms.algorithm import RowOutputs
from areal.training.algorithms.reference import kl
from areal.training.algorithms.token_loss import TokenLoss
from areal.training.packed import FlatBatch, PackedRow


@dataclass(frozen=True, slots=True)
class StepResult:
    """The metrics of one training step, over all ranks.

    loss: the minimised loss, with the KL penalty and the entropy bonus if the algorithm has them in the loss; mean over
    the optimizer steps, averaged within a step by `trainer.loss_mean`. grad_norm: before clipping, mean over the
    optimizer steps. optimizer_steps: one per minibatch with an unmasked token. lr: learning rate of the last optimizer
    step; None without a step. entropy: nats, mean over the trained tokens. clip_fraction: share of the trained tokens
    that were clipped or masked. logprob_gap: mean |log pi_behav - log pi_theta| on tokens of the current version in the
    first minibatch, where pi_theta is still the current version; None without such tokens. weight_mean, weight_max:
    mean and maximum of pi_prox / pi_behav, before an objective bounds the weight. advantage_max: the largest |A| of a
    token in the loss, including a teacher's part. effective_sample_size: (sum w)^2 / (n sum w^2), the equivalent number
    of equally weighted tokens as a share of n. kl_behaviour: KL(pi_behav || pi_prox), nats per token. kl_reference:
    KL(pi_prox || pi_ref) (k3), nats per token, or None. kl_teacher: KL(pi_prox || teacher) (k1), nats per token;
    teacher_agreement: mean of min(1, teacher / pi_prox), 1 minus the total variation distance; both None without a
    teacher. value_loss: of the critic, as `loss`. explained_variance: share of the variance of the value targets that
    the values before the step explain. Both None without a critic. token_staleness_mean: versions between a token's
    sampling and this step. tokens_trained: sampled tokens in the loss. tokens_total: all tokens of the batch, of each
    branch of a sample. tokens_computed: tokens that the model computed, where a prefix tree computes shared tokens
    once. tflops: TFLOP/s of one device (areal.training.flops) over the seconds below, mean over the ranks. mfu:
    `tflops` as a share of the device's peak; None if the peak is unknown. The seconds are measured on the rank that
    returns this result, in practice rank 0. forward_seconds includes the passes for proximal and reference log-probs.
    """

    loss: float
    grad_norm: float
    optimizer_steps: int
    lr: float | None
    entropy: float
    clip_fraction: float
    logprob_gap: float | None
    weight_mean: float
    weight_max: float
    advantage_max: float
    effective_sample_size: float
    kl_behaviour: float
    kl_reference: float | None
    kl_teacher: float | None
    teacher_agreement: float | None
    value_loss: float | None
    explained_variance: float | None
    token_staleness_mean: float
    tokens_trained: int
    tokens_total: int
    tokens_computed: int
    tflops: float
    mfu: float | None
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float


class Tally:
    """Sums over the tokens of a step on one rank, the seconds of each phase, and floating-point operations."""

    OF_TOKENS = (
        "entropy",
        "clip_fraction",
        "weight_mean",
        "kl_behaviour",
        "kl_reference",
        "kl_teacher",
        "teacher_agreement",
        "token_staleness_mean",
    )
    OF_STEPS = ("loss", "value_loss")
    SUMS = (*OF_TOKENS, *OF_STEPS, "weight_squared", "gap", "current", "computed")
    """Sums over tokens and over optimizer steps have the names of their means in `StepResult`."""
    NEEDS: ClassVar = {
        "kl_reference": "kl_coef",
        "kl_teacher": "teacher",
        "teacher_agreement": "teacher",
        "value_loss": "critic",
    }
    """The trainer's configuration key without which a mean is None."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(self.SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(2, dtype=torch.float64, device=device)  # the largest weight and the largest advantage
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.grad_norms: list[float] = []
        self.lr: float | None = None
        self.operations = 0.0

    @torch.no_grad()
    def add(self, row: PackedRow, outputs: RowOutputs, out: TokenLoss, *, first: bool) -> None:
        """Add a row's tokens to the sums. first: whether the row belongs to the step's first minibatch."""
        columns, none = row.columns, torch.zeros(())
        behaviour, proximal, weights = columns["logprobs"], columns["proximal"], columns["weights"]
        weight = torch.exp((proximal - behaviour).double())
        current = (columns["staleness"] == 0) & first
        ahead = columns["teacher_logprobs"] - proximal if "teacher_logprobs" in columns else none
        sums = {
            "loss": out.loss * weights,
            "entropy": outputs.entropy,
            "clip_fraction": out.clipped,
            "weight_mean": weight,
            "weight_squared": weight.square(),
            "kl_behaviour": behaviour - proximal,
            "kl_reference": kl(proximal, columns["reference"], "k3") if "reference" in columns else none,
            "kl_teacher": -ahead,
            "teacher_agreement": ahead.clamp(max=0).exp(),
            "value_loss": none if out.value_loss is None else out.value_loss * weights,
            "token_staleness_mean": columns["staleness"],
            "gap": (behaviour - outputs.logp).abs()[current],
            "current": current,
            "computed": torch.tensor(sum(row.added) if len(row.batch_index) else 0),
        }
        self.sums += torch.stack([sums[name].sum().double().to(self.sums.device) for name in self.SUMS])
        if len(weight):
            largest = torch.stack([weight.max(), columns["advantages"].abs().max().double()])
            self.maxima = torch.maximum(self.maxima, largest)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to `phase`, until the GPU has finished the queued work of the block. The clock
        waits for the current stream only: other streams send weights to generators, and a generator may not answer."""
        started = time.perf_counter()
        yield
        if self.sums.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.seconds[phase] += time.perf_counter() - started

    def result(
        self, control: dist.ProcessGroup, config: TrainerConfig, batch: FlatBatch, peak_tflops: float | None
    ) -> StepResult:
        """Return the step's result, equal on all ranks except for seconds and rates (all ranks)."""
        totals, maxima = self.sums.cpu(), self.maxima.cpu()
        operations = torch.tensor([self.operations], dtype=torch.float64)
        dist.all_reduce(operations, group=control)
        dist.all_reduce(totals, group=control)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=control)
        tokens_trained = int(batch.columns["trained"].sum())
        count = max(1, tokens_trained)
        tflops = operations.item() / dist.get_world_size(control) / sum(self.seconds.values()) / 1e12
        sums = dict(zip(self.SUMS, totals.tolist(), strict=True))
        means: dict[str, Any] = {name: sums[name] / count for name in self.OF_TOKENS}
        means |= {name: sums[name] / max(1, len(self.grad_norms)) for name in self.OF_STEPS}
        means |= {name: None for name, key in self.NEEDS.items() if not getattr(config, key)}
        return StepResult(
            **means,
            grad_norm=float(np.mean(self.grad_norms or 0.0)),
            optimizer_steps=len(self.grad_norms),
            lr=self.lr,
            logprob_gap=sums["gap"] / sums["current"] if sums["current"] else None,
            weight_max=maxima[0].item(),
            advantage_max=maxima[1].item(),
            effective_sample_size=sums["weight_mean"] ** 2 / (count * sums["weight_squared"] or 1),
            explained_variance=explained_variance(batch),
            tokens_trained=tokens_trained,
            tokens_total=len(batch.tokens),
            tokens_computed=int(sums["computed"]),
            tflops=tflops,
            mfu=tflops / peak_tflops if peak_tflops else None,
            **{f"{phase}_seconds": seconds for phase, seconds in self.seconds.items()},
        )


def explained_variance(batch: FlatBatch) -> float | None:
    """The share of the targets' variance that the values explain; None without a critic or for equal targets."""
    if "value_targets" not in batch.columns:
        return None
    sampled = batch.columns["versions"] != NOT_SAMPLED
    values, targets = batch.columns["values"][sampled], batch.columns["value_targets"][sampled]
    variance = targets.var()
    return float(1 - (targets - values).var() / variance) if variance else None

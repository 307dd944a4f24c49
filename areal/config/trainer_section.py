"""The trainer, and the guard that stops a run gone wrong."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from areal.config.engine_options import deepspeed_conflicts
from areal.config.engine_sections import half_on_gpus
from areal.config.named_objectives import OBJECTIVES, settings_of
from areal.config.section import Section

COMPARE_GROUP = ("group", "leave_one_out")
"""Means (`advantage_mean`) that compare the samples of a group: groups of one sample teach nothing."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): W + alpha / rank * B A. Only A and B are trained and published.

    Adapters are used only if a key of this section is given."""

    rank: int = Field(16, ge=1, description="rank of A and B")
    alpha: int = Field(32, ge=1, description="the update is scaled by alpha / rank")
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """linear layers that get an adapter, such as q_proj"""


class CriticConfig(Section):
    """A critic: a value head on the policy's body, with generalised advantages by token (areal docs critic).

    There is a critic only if a key of this section is given."""

    coef: float = Field(1.0, ge=0)
    """weight of the value loss in the gradient of the body; 0: only the head learns from the value loss"""
    lr: float = Field(0.2, gt=0, description="learning rate of the head: about how far a value moves in a step")
    gamma: float = Field(1.0, gt=0, le=1, description="discount for each sampled token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda; 1: returns minus values, 0: one-step differences")
    value_clip: float | None = Field(0.2, gt=0)
    """largest change of a value from the value before the training step; null: no limit"""
    warmup_steps: int = Field(0, ge=0)
    """first optimizer steps of the run, which train the head alone; the steps of the schedule follow"""


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainerConfig(Section):
    """`objective` is a name, or `package.module:function` for your own objective (docs/objectives.md describes the
    call). A named objective also sets its own keys, such as `advantage_mean` and `behaviour_weight`. Values that you
    give here take precedence."""

    ranks: int = Field(1, ge=1, description="DeepSpeed ranks on this machine")
    zero_stage: Literal[0, 1, 2, 3] = 0
    """parts that the ranks share out: nothing (0), Adam's moments (1), also gradients (2), also weights (3)"""
    offload: Literal["none", "optimizer", "all"] = "none"
    """parts in host memory instead of on the devices: nothing; gradients, master weights and Adam's moments, with Adam
    on the CPU (at least ZeRO 1); or also the weights, layer by layer (ZeRO 3)"""
    sequence_parallel: int = Field(1, ge=1)
    """ranks that compute each row together (Ulysses), for sequences too long for one device; max_tokens_per_microbatch
    counts the whole row (areal docs training)"""
    expert_parallel: int = Field(1, ge=1)
    """ranks that share out the experts of each layer of a mixture; a token goes to the rank with its expert (areal docs
    parallel)"""
    tensor_parallel: int = Field(1, ge=1)
    """ranks that compute each row together, each rank with a part of heads and inner features (areal docs parallel)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """type of the weights for computing and publishing; auto: bfloat16 on GPUs, else float32"""
    threads: int = Field(1, ge=1, description="OpenMP threads of each rank (on a CPU, and for Adam with offload)")
    lr: float = Field(2e-5, gt=0, description="learning rate of Adam")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up: constant, or a decay from lr to lr_final * lr at the last optimizer step"""
    lr_final: float = Field(0.1, ge=0, le=1, description="share of lr after a decay")
    lr_schedule_steps: int | None = Field(None, gt=0)
    """training steps of the schedule, after which a decay has ended; null: `steps`"""
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="of Adam")
    adam_eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    weight_decay: float = Field(0.05, ge=0, description="decoupled weight decay (AdamW), not of norms and biases")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient; larger ones are scaled down")
    minibatches: int = Field(4, ge=1, description="optimizer steps per training step, each on its share of the batch")
    max_tokens_per_microbatch: int = Field(16384, ge=1, description="most tokens of a micro-batch (C in Algorithm 1)")
    microbatches: int | None = Field(None, ge=1)
    """micro-batches per minibatch and rank, with equally many sequences and any number of tokens (baseline of the
    paper's figure 6a); null: by Algorithm 1"""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """recompute activations in the backward pass, to save memory; auto: on GPUs"""
    compile: bool = False
    """compile the layers of the model (torch.compile): the first step takes a minute or two longer, later steps less"""
    lora: LoraConfig | None = Field(None, description="train adapters instead of all weights")
    peak_tflops: float | None = Field(None, gt=0)
    """dense TFLOP/s of a device, for `mfu`; null: known for common GPUs, measured on a CPU"""
    deepspeed_options: dict[str, Any] = Field(default_factory=dict)
    """further keys of DeepSpeed, such as {zero_optimization: {overlap_comm: false}} (areal docs running)"""
    prefix_tree: bool = Field(True, description="compute the prefix that samples of a group share only once")
    objective: str = Field("decoupled_ppo", description="the policy loss (areal docs objectives)")
    eps_clip: float = Field(0.2, gt=0, description="pi_theta / pi_prox is clipped at 1 - eps_clip and 1 + eps_clip")
    eps_clip_higher: float | None = Field(None, gt=0, description="upper clip at 1 + eps_clip_higher; null: eps_clip")
    eps_clip_dual: float | None = Field(None, gt=1)
    """dual clip: largest ratio of a token with a negative advantage; null: none"""
    behaviour_weight: Literal["full", "truncated", "masked", "masked_kl", "none"] = "full"
    """w = pi_prox / pi_behav: as it is, cut at the upper bound, 0 outside the bounds, 0 where the binary KL of the two
    is above the upper bound, or always 1"""
    behaviour_weight_level: Literal["token", "sequence", "geometric"] = "token"
    """w of each token, or of the token's sequence: the product, or the geometric mean"""
    behaviour_weight_bounds: tuple[float, float] = (0.5, 2.0)
    """lower and upper bound of w; truncated and masked_kl use only the upper bound"""
    sequence_mask: Literal["none", "product", "geometric", "kl"] = "none"
    """leave a sequence out if the product, or geometric mean, of w is outside sequence_mask_bounds, or the mean binary
    KL(pi_behav, pi_prox) of its tokens above the upper bound"""
    sequence_mask_bounds: tuple[float, float] = Field((0.5, 2.0), description="lower and upper bound of sequence_mask")
    mask_cut: bool = False
    """leave samples cut at sampling.max_new_tokens out of the loss; their rewards still count in the advantages of all
    samples"""
    m2_threshold: float = Field(0.04, gt=0, description="m2po: limit for the mean of (log pi_prox / pi_behav)^2")
    sapo_temperatures: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)
    """sapo: how fast a token's gradient falls as u leaves 1, with A > 0 and with A <= 0"""
    vespo_positive: tuple[float, PositiveFloat] = Field((2.0, 3.0), description="vespo: k and lambda where A >= 0")
    vespo_negative: tuple[float, PositiveFloat] = Field((3.0, 2.0), description="vespo: k and lambda where A < 0")
    routing: Literal["own", "replay"] = "own"
    """experts of a mixture: the router's choice or, for sampled tokens, the choice at sampling (areal docs routing)"""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """pi_prox by a forward pass, or interpolated between behaviour and current policy (A-3PO)"""
    advantage: str = "normalised"
    """the estimator of advantages: normalised, by the next two keys, or `package.module:function` for your own
    (areal docs objectives)"""
    advantage_options: dict[str, Any] = Field(default_factory=dict, description="options of an estimator of your own")
    advantage_mean: Literal["batch", "group", "leave_one_out", "none"] = "batch"
    """mean that a reward is compared with: of the batch (the paper), the group, or the group's other samples"""
    advantage_std: Literal["batch", "group", "none"] = "batch"
    """standard deviation that divides the difference: of the global batch, if there is a mean, or of the group, if the
    mean is of the group, too"""
    critic: CriticConfig | None = Field(None, description="estimate advantages with a value head")
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    """mean over tokens; over sequences of their token means; or over sequences of their token sums / loss_tokens"""
    loss_tokens: int = Field(1, ge=1, description="divisor of loss_mean=constant; of a run: sampling.max_new_tokens")
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus: the loss of a token is lowered by weight times entropy (nats)"""
    kl_coef: float = Field(0.0, ge=0, description="weight of the penalty for leaving the reference model; 0: none")
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 for kl_in=reward; k2 and k3 for either (areal docs objectives)"""
    kl_in: Literal["loss", "reward"] = Field("loss", description="the penalty is part of the loss, or of the reward")
    reference: str | None = None
    """the reference model: a folder, or `scorer:NAME` for a model off the trainer; null: the run's model"""
    teacher: str | None = None
    """name of the teacher in `scorers`; the log-prob of each sampled token is compared with the teacher's"""
    teacher_key: str | None = None
    """field of a row with the name of the row's teacher, in place of `teacher`"""
    teacher_coef: float = Field(0.0, ge=0)
    """weight of log teacher - log pi_prox in the advantage of a token; 0: the difference is only measured"""
    teacher_top_k: int = Field(
        0,
        ge=0,
        le=20,  # the limit of vLLM
        description="k: teacher_coef is the weight of KL(teacher || pi) in the loss, over the teacher's k likeliest "
        "tokens and all others as one, and not of a gain in the advantage",
    )
    checkpoint_every: int = Field(20, ge=1)
    """steps between checkpoints; a restarted trainer redoes the steps since the last checkpoint"""
    checkpoints_kept: int = Field(3, ge=1, description="how many of the newest checkpoints are kept")

    def for_device(self, *, cuda: bool) -> "TrainerConfig":
        """Return this configuration for trainers on GPUs (cuda) or CPUs, without `auto`."""
        values = {"dtype": half_on_gpus(cuda), "gradient_checkpointing": cuda}
        values = {key: value for key, value in values.items() if getattr(self, key) == "auto"}
        return self.model_copy(update=values)

    def lr_share(self, step: int, steps: int) -> float:
        """Return the share of `lr` in the optimizer step number `step`, from 0. steps: the optimizer steps of the
        schedule. Warm-up rises from 1 / warmup_steps to 1. A decay has ended at the last step. With a critic, the
        schedule begins after the steps that train the critic's head alone at a constant rate."""
        alone = self.critic.warmup_steps if self.critic else 0
        number = step - alone + 1
        if number <= self.warmup_steps or number <= 0:
            return max(number, 0) / max(self.warmup_steps, 1)
        if self.lr_schedule == "constant":
            return 1.0
        share = 1 - min((number - self.warmup_steps) / max(1, steps - alone - self.warmup_steps), 1.0)
        if self.lr_schedule == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.lr_final + (1 - self.lr_final) * share

    def schedule_conflicts(self, steps: int) -> Iterator[str]:
        """Yield the reason why the policy would never be trained at the rate `lr` in so many optimizer steps."""
        alone = self.critic.warmup_steps if self.critic else 0
        if alone + max(self.warmup_steps, 1) > steps:
            keys = " and ".join(["trainer.critic.warmup_steps"] * bool(alone) + ["trainer.warmup_steps"])
            yield (
                f"the warm-up takes {alone + self.warmup_steps} optimizer steps, but there are only {steps}, so that "
                f"trainer.lr is never reached: lower {keys}"
            )
        decay = (self.lr_schedule_steps or 0) * self.minibatches
        if self.lr_schedule != "constant" and 0 < decay < steps and alone + self.warmup_steps >= decay:
            yield (
                f"the warm-up takes {alone + self.warmup_steps} optimizer steps, but the schedule ends after {decay} "
                f"(trainer.lr_schedule_steps), so that the rate would fall from trainer.lr to its end in one step: "
                f"raise trainer.lr_schedule_steps or lower the warm-up"
            )

    @property
    def reference_scorer(self) -> str | None:
        """The name of the scorer with the reference model; None if the trainer has the model, or without a penalty."""
        kind, _, name = (self.reference or "").partition(":")
        return name if kind == "scorer" and self.kl_coef else None

    @property
    def compares_group(self) -> bool:
        """Whether the advantages compare the samples of a group. A user's estimator says so when it is loaded."""
        return self.advantage == "normalised" and self.advantage_mean in COMPARE_GROUP

    @property
    def centres_scores(self) -> bool:
        """Whether the loss needs pi_behav of all words that a token was drawn from."""
        return self.objective == "score_centring"

    @property
    def uses_behaviour(self) -> bool:
        """Whether the loss compares pi_behav with a policy of the trainer. A user's objective: by its settings."""
        return (
            self.objective in ("ppo", "m2po", "dppo", "dppo_kl", "sao")
            or self.behaviour_weight != "none"
            or self.sequence_mask != "none"
            or self.proximal != "recompute"
            or (self.kl_coef > 0 and self.kl_in == "reward")
        )

    @model_validator(mode="before")
    @classmethod
    def _settings_of_objective(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        objective = values.get("objective")
        return settings_of(objective) | values if isinstance(objective, str) else values

    def conflicts(self) -> Iterator[str]:
        if self.offload == "all" and self.zero_stage != 3:
            yield (
                f"trainer.offload is all, but trainer.zero_stage is {self.zero_stage}, which leaves the weights on the "
                f"devices: set trainer.zero_stage=3, or trainer.offload=optimizer"
            )
        if self.compile and self.zero_stage == 3:
            yield "trainer.compile cannot compile layers whose weights are gathered: lower trainer.zero_stage"
        yield from self._conflicts_of_division()
        yield from deepspeed_conflicts(self.deepspeed_options, self.offload)
        yield from self._conflicts_of_loss()
        if self.teacher_coef and not self.teacher:
            yield "trainer.objective=distill and trainer.teacher_coef need a teacher: set trainer.teacher to a scorer"
        if self.teacher_key and not self.teacher:
            yield "trainer.teacher_key needs a teacher for the other rows: set trainer.teacher to a scorer"
        if self.teacher_top_k and not self.teacher_coef:
            yield "trainer.teacher_top_k has no weight: set trainer.teacher_coef, or trainer.objective=distill"
        if not (self.objective in OBJECTIVES or ":" in self.objective or _is_installed(self.objective)):
            yield (
                f"Unknown objective {self.objective!r} in trainer.objective: known are {', '.join(OBJECTIVES)}, or "
                f"write package.module:function"
            )

    def _conflicts_of_division(self) -> Iterator[str]:
        if self.expert_parallel > 1 and self.lora:
            yield "trainer.lora trains no experts, which trainer.expert_parallel divides: leave out one of the two"
        if self.tensor_parallel > 1:
            beside = {
                "lora": self.lora,
                "compile": self.compile,
                "sequence_parallel": self.sequence_parallel > 1,
                "expert_parallel": self.expert_parallel > 1,
            }
            for key in (key for key, is_set in beside.items() if is_set):
                yield f"trainer.tensor_parallel does not go with trainer.{key}: leave out one of the two"
            if self.zero_stage == 3 and self.kl_coef and not self.reference_scorer:
                yield (
                    "trainer.tensor_parallel at ZeRO 3 has no room for a reference model: lower trainer.zero_stage, or "
                    "set trainer.reference to a scorer"
                )

    def _conflicts_of_loss(self) -> Iterator[str]:
        if self.eps_clip > 1 and self.objective in OBJECTIVES and self.objective not in ("gmpo", "dppo_kl"):
            yield (
                f"trainer.eps_clip is {self.eps_clip:g}, but no ratio is below 0, so that 1 - eps_clip would clip "
                f"none: set trainer.eps_clip to at most 1"
            )
        yield from self._conflicts_of_advantages()
        for key in ("behaviour_weight_bounds", "sequence_mask_bounds"):
            low, high = getattr(self, key)
            if not 0 <= low < high:
                yield f"trainer.{key} is [{low:g}, {high:g}]: write the lower bound, 0 or more, first"
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "trainer.kl_estimator is k1, whose gradient in the loss is 0 on average: set trainer.kl_in=reward, or "
                "trainer.kl_estimator=k2"
            )
        if self.objective == "m2po" and self.proximal != "recompute":
            yield (
                f"trainer.proximal is {self.proximal}, but the mask of m2po compares pi_prox and pi_behav over the "
                f"whole minibatch, before it is trained: set trainer.proximal=recompute"
            )
        if self.objective == "vespo" and self.behaviour_weight_level != "token":
            yield (
                "trainer.objective=vespo takes the product over each sequence itself: leave out "
                "trainer.behaviour_weight_level"
            )

    def _conflicts_of_advantages(self) -> Iterator[str]:
        if self.advantage_options and self.advantage == "normalised":
            yield "trainer.advantage_options are those of an estimator of your own: name it in trainer.advantage"
        if self.advantage_std != "none" and self.advantage_mean in ("none", *{"batch"} - {self.advantage_std}):
            yield (
                f"trainer.advantage_std={self.advantage_std} divides by 0 where the rewards of a {self.advantage_std} "
                f"are all the same, but less trainer.advantage_mean={self.advantage_mean} they are not 0: set both to "
                f"group or both to batch, or trainer.advantage_std=none"
            )


def _is_installed(objective: str) -> bool:
    from areal.base import extensions  # the configuration of most runs does not need the table

    return extensions.entry("objective", objective) is not None


class GuardConfig(Section):
    """Stops a run gone wrong before the result is saved. docs/observe.md explains the metrics."""

    effective_sample_size: float = Field(0.1, ge=0, le=1, description="minimum, share of the tokens; 0: off")
    entropy: float = Field(0.0, ge=0, description="minimum, nats; 0: off")
    logprob_gap: float | None = Field(None, gt=0)
    """maximum, nats, of the difference between generators and trainer on the same weights; null: as far as dtypes and
    settings explain (areal docs observe)"""
    advantage_max: float = Field(1000.0, gt=0, description="maximum of abs(A) of a token")
    patience: int = Field(3, ge=1, description="steps in a row beyond a limit that stop the run")

"""The guard: decides from the metrics of each step whether a run has to stop. No I/O and no clock.

A metric that is not finite stops the run at once. A metric beyond its limit for `patience` steps in a row, a *streak*,
also stops the run. The steps of a streak are committed and published as usual, since most streaks end by themselves.
During a streak no checkpoint is saved (except of a run's last version), to keep the last checkpoint sound. A trainer
that resumes from the checkpoint starts with a new guard without streaks. The redone steps lead to the same streak, or
the same stop, as before.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from areal.config import Config
from areal.config.trainer_section import GuardConfig
from areal.models import architectures_of, is_mixture

FINITE = ("loss", "grad_norm", "entropy")
ADVICE = {
    "effective_sample_size": "the samples are too far from the policy in training: lower max_staleness or trainer.lr",
    "entropy": "the policy has collapsed to few answers: lower trainer.lr, or raise trainer.eps_clip_higher",
    "logprob_gap": "generators and trainer compute different log-probs on the same weights: compare generator.dtype "
    "with trainer.dtype, and the sampling settings",
    "advantage_max": "read the rewards for extreme ones, or bring them near 1; with advantages in units of the reward "
    "raise guard.advantage_max",
    "engine_gap": "an engine computes other log-probs than the trainer on the same weights: a load went wrong, or its "
    "kernels do not fit the model",
}
MAXIMA = ("logprob_gap", "advantage_max")
LIMITS = {"engine_gap": "logprob_gap"}
"""The key of the limit, if it differs from the metric's name. Limits are minima, except for MAXIMA."""
GAP = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
"""Largest mean difference between log-probs that different code computes, in nats. Wrong code gives 0.3 and more. In
bf16 a logit of 20 is rounded by up to 0.06, and by 0.03 in the mean."""
TF32_GAP = 0.01
"""The largest mean difference in fp32 on GPUs, whose kernels may multiply with 10 bits."""
MIXTURE_GAP = 0.2
"""The largest mean difference where rounding may choose another expert (a sound mixture of 30B parameters has 0.06 in
bf16), or where earlier weights have chosen the experts of a prefix."""
WIDE_GAP = 0.5
"""The largest mean difference where the run's settings make engine and trainer compute different log-probs."""


def limits_of(config: Config, *, cuda: bool) -> GuardConfig:
    """Return the limits of a run on GPUs (cuda) or CPUs. A null `logprob_gap` is set by the run's other settings.
    Raises UserError if the model's config.json cannot be read."""
    config = config.for_device(cuda=cuda)
    guard, generator = config.guard, config.generator
    if guard.logprob_gap is not None:
        return guard
    quantized = {"quantization", "kv_cache_dtype"} & generator.engine_options.keys()
    truncated = config.sampling.left_out and not config.keeps_words  # the trainer's log-probs are then among all words
    gap = max(GAP[generator.dtype], GAP[config.trainer.dtype], TF32_GAP if cuda else 0.0)
    if generator.kv_on_update == "keep" or quantized or truncated:
        gap = WIDE_GAP
    elif config.trainer.routing == "replay" or (gap > TF32_GAP and is_mixture(Path(config.model))):
        gap = MIXTURE_GAP
    return guard.model_copy(update={"logprob_gap": gap})


def not_finite(metrics: Mapping[str, float | None]) -> str | None:
    """Return the first of FINITE that is not finite, with its value, or None."""
    values = {name: value for name in FINITE if (value := metrics.get(name)) is not None}
    return next((f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)), None)


class Guard:
    """Checks the metrics of all steps, also of redone steps. config: of `limits_of`. objective: `trainer.objective`."""

    def __init__(self, config: GuardConfig, objective: str = "") -> None:
        self._config = config
        self._objective = objective
        self._streaks = dict.fromkeys(ADVICE, 0)

    @property
    def suspicious(self) -> bool:
        """True if some metric was beyond its limit at its last measurement."""
        return any(self._streaks.values())

    def check(self, metrics: Mapping[str, float | None]) -> str | None:
        """Check a step's metrics (areal.training.step_metrics.StepResult); a missing metric, or None, is skipped.

        Returns None if the run may go on, else a sentence with the reason and advice.
        """
        if wrong := not_finite(metrics):
            return f"{wrong}: {self._advice(metrics)}."
        if metrics.get("tokens_trained") == 0:  # all tokens were masked, so no metric can be beyond a limit
            return None
        verdicts = [self._check_limit(name, value) for name in ADVICE if (value := metrics.get(name)) is not None]
        return next(filter(None, verdicts), None)

    def check_first(self, metrics: Mapping[str, float | None], model: Path) -> str | None:
        """Check the run's first step, with tokens of the first weights. Returns as `check`. model: its folder."""
        gap, limit = metrics.get("logprob_gap"), self._config.logprob_gap
        if gap is None or limit is None or gap <= limit:  # NaN is beyond the limit
            return None
        return (
            f"log-probs of engine and trainer are {gap:.2g} nats apart for the weights that the run begins with, and "
            f"guard.logprob_gap allows {limit:g}: vLLM computes {' '.join(architectures_of(model)) or model} otherwise "
            f"than the trainer here. Compare generator.dtype with trainer.dtype, and the sampling settings, or take "
            f"another model."
        )

    def _advice(self, metrics: Mapping[str, float | None]) -> str:
        """Return advice for a metric that is not finite."""
        entropy = metrics.get("entropy")
        if ":" in self._objective and entropy is not None and math.isfinite(entropy):  # the model's outputs are sound
            return (
                f"the model's log-probs are finite, so look into the objective {self._objective} for a division by 0, "
                f"or a logarithm or exponential of what it does not expect"
            )
        return "lower trainer.lr or trainer.grad_clip, and look for extreme rewards"

    def _check_limit(self, name: str, value: float) -> str | None:
        key = LIMITS.get(name, name)
        limit = getattr(self._config, key)
        # NaN compares as false here, which counts as beyond any limit.
        sound = value <= limit if key in MAXIMA else value >= limit
        self._streaks[name] = 0 if sound else self._streaks[name] + 1
        if self._streaks[name] < self._config.patience:
            return None
        side = "above" if key in MAXIMA else "below"
        steps = f"{self._streaks[name]} steps in a row" if self._streaks[name] > 1 else "this step"
        return f"{name} is {value:.3g}, for {steps} {side} guard.{key} = {limit:g}: {ADVICE[name]}."

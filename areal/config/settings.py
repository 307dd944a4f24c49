"""The settings of a run by key: the differences between two configurations, and the meaning of a change."""

from collections.abc import Iterable, Iterator
from typing import Any

# The configuration keys that may change when a run is resumed; a section stands for all its keys. All other keys have
# determined the run so far, or determine the meaning of its journal and checkpoints.
MAY_CHANGE = (
    "steps", "max_staleness", "run_ahead", "oversample", "filter_zero_signal", "max_attempts", "max_failed_share",
    "outage_seconds", "generator", "rollout_manager", "scorers", "guard", "evaluator", "master", "network", "observe",
    "weights.transport", "reward.count", "reward.workers", "reward.concurrent_calls", "reward.timeout_seconds",
    "reward.retries", "reward.quarantine_after", "reward.memory_gib", "reward.cache_size",
    "trainer.lr", "trainer.lr_schedule", "trainer.lr_schedule_steps", "trainer.lr_final", "trainer.threads",
    "trainer.ranks", "trainer.zero_stage", "trainer.offload", "gateway",
    "trainer.max_tokens_per_microbatch", "trainer.microbatches", "trainer.gradient_checkpointing",
    "trainer.checkpoint_every", "trainer.checkpoints_kept", "trainer.deepspeed_options", "cluster",
)  # fmt: skip

# The keys in MAY_CHANGE that also hold for steps redone from the trainer's checkpoint.
REDONE = ("trainer", "guard", "steps")

# The configuration keys that change the speed of a run and the staleness of its data, but not what the run learns from.
SPEED_ONLY = (
    "generator.count", "generator.threads", "generator.max_concurrent_rollouts", "generator.memory_share",
    "generator.kv_cache_gib", "generator.tensor_parallel", "generator.stream_interval", "generator.enforce_eager",
    "rollout_manager.count", "rollout_manager.max_concurrent_groups", "rollout_manager.save_every_tokens",
    "reward.count", "reward.workers", "reward.concurrent_calls", "reward.cache_size", "weights",
    "trainer.ranks", "trainer.zero_stage", "trainer.threads", "trainer.microbatches",
    "trainer.max_tokens_per_microbatch", "trainer.gradient_checkpointing",
    "trainer.prefix_tree", "trainer.offload", "trainer.sequence_parallel", "cluster",
)  # fmt: skip


def differences(stored: dict[str, Any], current: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ between two configurations, with their dots, and the values before and now."""
    for name in stored | current:
        old, new = stored.get(name), current.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new


def is_under(key: str, names: Iterable[str]) -> bool:
    """Whether a key is in `names`, or in a section in `names`."""
    return any(key == name or key.startswith(f"{name}.") for name in names)

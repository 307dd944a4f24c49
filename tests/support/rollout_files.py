"""Rollouts of a small run, as its trainer writes them. Tokens are bytes (scripted_policy.byte_tokenizer)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fakes.scripted_policy import byte_tokenizer

from areal.samples.trajectory import Branch, Group, Note, TokenValues, Trajectory, row_text
from areal.storage.rollouts import RolloutWriter
from areal.storage.run_files import ROLLOUTS

Said = list[tuple[str, bool]]
"""Texts, and whether the policy sampled them."""
TOKENIZER = byte_tokenizer()


def sample(said: Said, reward: float = 0.0, version: int = 0, branches: tuple[Branch, ...] = ()) -> Trajectory:
    encoded = [(TOKENIZER.encode(text, add_special_tokens=False), sampled) for text, sampled in said]
    versions = np.array([version if sampled else -1 for tokens, sampled in encoded for _ in tokens], np.int32)
    logprobs = np.where(versions >= 0, np.float32(-0.5), np.float32(0))
    tokens = np.array([token for tokens, _ in encoded for token in tokens], np.int32)
    return Trajectory(tokens, logprobs, versions, reward, "stop", branches)


def group(index: int, *samples: Trajectory, **fields: Any) -> Group:
    notes = tuple(Note({"exact": s.reward}, 0, ("generator/0#1",), 1e9, 2.0, (), (), 3.0, 0.5) for s in samples)
    return Group(f"g{index}.0", index, samples, row_text({"prompt": "2+2", **fields}), notes)


def writer(run: Path) -> RolloutWriter:
    def texts(sequences: list[np.ndarray]) -> list[str]:
        return [TOKENIZER.decode(tokens.tolist(), skip_special_tokens=False) for tokens in sequences]

    return RolloutWriter(run / ROLLOUTS, "all", 1 << 30, texts)


def values(*groups: Group) -> TokenValues:
    """pi_prox is twice as likely as pi_behav everywhere, and every advantage is 0.25."""
    rows = [sequence for g in groups for s in g.trajectories for sequence in s.sequences()]
    sampled = np.concatenate([sequence.sampled for sequence in rows])
    logprobs = np.concatenate([sequence.logprobs for sequence in rows]) + np.float32(np.log(2))
    return TokenValues(np.where(sampled, logprobs, 0).astype(np.float32), np.where(sampled, 0.25, 0).astype(np.float32))


def write_run(run: Path) -> None:
    """Three steps of two groups of two samples, a file each, and a group that was not trained. The first sample of g0.0
    has a tool's answer between its turns, the first of g1.0 two branches."""
    tool: Said = [("user: 2+2\n", False), ("call\n", True), ("tool: é\n", False), ("4 <b>[red]\x1b[2J", True)]
    forked: Said = [("user: 2+2\n", False), ("one", True), ("other", True)]
    branches = (Branch(0, len("user: 2+2\none")), Branch(len("user: 2+2\n"), len("other")))
    rollout_writer = writer(run)
    for step in (1, 2, 3):
        plain = sample([("user: 2+2\n", False), (f"say {step}", True)], step / 4, step - 1)
        first = sample(tool, 1.0) if step == 1 else plain
        second = sample(forked, 0.5, 0, branches) if step == 1 else plain
        pair = [group(2 * step - 2, first, plain), group(2 * step - 1, second, plain)]
        rollout_writer.add_trained(step, pair, values(*pair))
        if step == 2:
            rollout_writer.add_untrained(
                group(9, plain, plain, prompt="3+3", answer=6), "filtered", "all rewards are equal"
            )
        rollout_writer.write()


def write_model(run: Path) -> None:
    """A config.yaml that names a folder with the tokenizer."""
    TOKENIZER.save_pretrained(run / "model")
    (run / "config.yaml").write_text(yaml.safe_dump({"name": "demo", "model": str(run / "model")}))


def write_pictured_run(run: Path, names: list[str]) -> None:
    """A step of one group, whose prompt has pictures of these names, each of one token."""
    plain = sample([("user: " + "<" * len(names) + "\n", False), ("red", True)], 1.0)
    seen = np.zeros((len(plain), 16), np.uint8)
    for place, name in enumerate(names, start=6):
        seen[place] = [*bytes.fromhex(name)]
    one = group(0, replace(plain, pictures=seen))
    rollout_writer = writer(run)
    rollout_writer.add_trained(1, [one], values(one))
    rollout_writer.write()

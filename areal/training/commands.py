"""The tools that train without a run. Both also work under torchrun."""

from __future__ import annotations

from pathlib import Path

from areal.command_line import CONFIG, OVERRIDES, RUN, RoomTools


def declare(tools: RoomTools) -> None:
    summary = "fine-tune a model on prompts and completions before a run; also works under torchrun"
    add = tools.add("sft", "sft:run", summary).add_argument
    add("--model", required=True, metavar="FOLDER")
    add("--data", required=True, metavar="FILE.jsonl", help="rows of prompt and completion, or RUN/rollouts")
    add("--output", required=True, metavar="FOLDER")
    add("--config", help="keys of areal.training.sft.SftConfig", **CONFIG)
    add("overrides", help="changes to the configuration, e.g. epochs=2 trainer.lr=1e-5", **OVERRIDES)

    summary = "train again from the rollouts that a run has kept, as it did or with changes; also works under torchrun"
    epilog = "Exit code 1: the weights are not those of the run, or a replay has failed (docs/objectives.md)."
    add = tools.add("replay", "replay:run", summary, epilog).add_argument
    add("run", **RUN)
    grid = "a replay for each value, such as trainer.objective=ppo,gspo; may be repeated, for each combination"
    add("--sweep", action="append", default=[], metavar="key=value,value,...", help=grid)
    add("--steps", default=":", metavar="A:B", help="only the steps after A up to B, from the checkpoint of A")
    add("--without", metavar="SQL", help='leave out groups that have such a row: "step > 40 and reward > 1"')
    add("--until", metavar="CONDITION", help='end with the first step of which it holds, such as "entropy<0.2"')
    add("--output", type=Path, metavar="FOLDER", help="folder for the trained model, with --sweep for one of each")
    add("overrides", help="changes to the training, e.g. trainer.lr=1e-5", **OVERRIDES)

    summary = "check a finished run by its record alone: data, bound, token versions, and the weights by training again"
    epilog = "Exit code 1: a check fails, or the record does not have what it takes (docs/observe.md)."
    add = tools.add("audit", "audit:run", summary, epilog).add_argument
    add("run", **RUN)
    add("--full", action="store_true", help="train all steps again, not only those between two checkpoints")
    add("--json", type=Path, metavar="FILE", help="also write the findings as JSON")

    summary = "find the first step at which a condition on a metric holds, and by replays the groups that bring it"
    epilog = "Exit code 1: no such groups were found (docs/observe.md)."
    add = tools.add("bisect", "bisection:run", summary, epilog).add_argument
    add("run", **RUN)
    add("--metric", required=True, metavar="CONDITION", help='such as "entropy<0.2", with <, <=, > or >=')
    add("--replays", type=int, default=40, metavar="N", help="do at most so many replays (default: 40)")
    add("--json", type=Path, metavar="FILE", help="also write what was found as JSON")

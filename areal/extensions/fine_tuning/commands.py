"""The command `areal sft`, which trains without a run, also under torchrun."""

from areal.base.command_line import CONFIG, OVERRIDES, RoomTools


def declare(tools: RoomTools) -> None:
    summary = "fine-tune a model on prompts and completions before a run; also works under torchrun"
    add = tools.add("sft", "sft:run", summary).add_argument
    add("--model", required=True, metavar="FOLDER")
    add("--data", required=True, metavar="FILE.jsonl", help="rows of prompt and completion, or RUN/rollouts")
    add("--output", required=True, metavar="FOLDER")
    add("--config", help="keys of areal.extensions.fine_tuning.sft.SftConfig", **CONFIG)
    add("overrides", help="changes to the configuration, e.g. epochs=2 trainer.lr=1e-5", **OVERRIDES)

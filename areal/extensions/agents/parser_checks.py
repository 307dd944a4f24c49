"""Checks vLLM's parsers of calls before any process is started."""

import sys
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.base.process_checks import check_apart
from areal.config import Config
from areal.workflows.chat_templates import writes_calls

_LOAD_PARSERS = """
from areal.config.data_section import DataConfig
from areal.samples.tokenizer import load_tokenizer
from areal.extensions.agents.parsers import Parsers
folder, data, tools, reasoning = sys.argv[1:]
data = DataConfig.model_validate_json(data)
Parsers(load_tokenizer(folder, data), tools, reasoning or None, data.chat_template_kwargs).load()
"""


def check_parsers(config: Config, folder: Path, tokenizer: Any) -> None:
    """Check the parsers if the workflow needs parsers. If the workflow may need parsers, print a note about an error.
    tokenizer: belongs to the model in `folder`. Raises UserError."""
    if config.rollout_manager.needs_parsers:
        load_parsers(config, folder)
    if config.rollout_manager.may_need_parsers and writes_calls(tokenizer):
        try:
            load_parsers(config, folder)
        except UserError as error:
            print(f"Note: samples fail if the agent offers tools. {error}", file=sys.stderr)


def load_parsers(config: Config, folder: Path) -> None:
    """Raise UserError if the tokenizer of the model in `folder` lacks tokens for the parsers, or if the parsers do not
    read the calls of its chat template."""
    section = config.rollout_manager
    check_apart(
        _LOAD_PARSERS,
        str(folder),
        config.data.model_dump_json(),
        section.tool_call_parser,
        section.reasoning_parser or "",
        what="vLLM's parsers",
        remedy="leave out rollout_manager.tool_call_parser and reasoning_parser",
    )

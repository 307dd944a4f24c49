"""Samplers choose the row of a new prompt, from the results of earlier prompts.

A sampler is a function of the history and of the number of the next prompt, 0, 1, 2, ..., and returns a training index
(areal.data.sources). A class with options is a sampler, too, if its instances are such functions:

    def my_sampler(history: History, prompt: int) -> int: ...

A sampler does no I/O and keeps no state: the history is the only memory. The master journals a choice with the permit,
and the results of a group when the group is ready. So a restarted master has the same history, and no choice is made
twice. configs/examples/difficulty has a class.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.data_section import DataConfig
from areal.data.history import History
from areal.data.prompt_sources import PromptSource

Choose = Callable[[History, int], int]


def shuffle(history: History, prompt: int) -> int:
    """Choose every row once in each epoch, in a new order in every epoch."""
    return prompt


def open_sampler(config: DataConfig, source: PromptSource) -> Choose:
    """Return the sampler that `config` names, after a first choice. Raises UserError."""
    choose = _make(config.sampler, config.sampler_options)
    safe_choice(config.sampler, choose, History(source), 0)
    return choose


def safe_choice(name: str, choose: Choose, history: History, prompt: int) -> int:
    """Return the choice of the sampler. Raises UserError if the sampler fails, or chooses no row."""
    # The user's code raises anything.
    with explain(Exception, f"data.sampler {name!r} failed at prompt {prompt} with {{why}}: correct it"):
        index = choose(history, prompt)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise UserError(f"data.sampler {name!r} returned {index!r:.80}: it must be a training index, 0 or more")
    return index


def _make(name: str, options: Mapping[str, Any]) -> Choose:
    target: Any = extensions.find("sampler", name, "data.sampler")
    if not inspect.isclass(target):
        if options:
            raise UserError(f"data.sampler {name!r} is a function, which has no data.sampler_options: make it a class")
        return target
    with explain(
        (TypeError, ValueError), f"data.sampler {name!r}: {{why}}: correct data.sampler_options, {dict(options)}"
    ):
        sampler: Any = target(**options)
    return sampler

"""Finds a reward by its name, and checks the reward's parameters before the first call.

`functions.py` has the interface of rewards.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.scoring import RewardConfig, ScoringConfig
from areal.rewards.functions import RewardFunction, Traits

C = TypeVar("C", bound=ScoringConfig)
NO_OPTIONS: Mapping[str, Any] = {}


class RewardForm(Protocol):
    """The form of another library's rewards: an entry of the kind `reward_form` in the table of extensions."""

    @staticmethod
    def keywords(parameters: Mapping[str, Any]) -> set[str] | None:
        """Return the keywords for a call of a function with these parameters; None if the function has another form."""

    @staticmethod
    def adapted(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
        """Return a function of prompt, completion and row that calls `function`, of this form with `parameters`."""


def resolve(name: str, options: Mapping[str, Any] = NO_OPTIONS) -> RewardFunction:
    """Return the reward called `name`. A class is instantiated with `options`. Raises UserError.

    The reward's slow imports are done here, not in the first call.
    """
    target = check(name, options)
    if warm := _hook(target, "warm"):
        warm()
    return of_object(name, make(name, target, options) if inspect.isclass(target) else target)


def of_object(name: str, target: Any) -> RewardFunction:
    """Return the reward of a function, of an object with a method `score` or `group_score`, or of a class of such
    objects. Raises UserError if the parameters are not a reward's."""
    instance = make(name, target, NO_OPTIONS) if inspect.isclass(target) else target
    function = instance if inspect.isroutine(instance) else _method(instance) or instance
    if not callable(function):
        raise UserError(f"reward {name!r} is {target!r:.60}: give a function (prompt, completion, row)")
    _check_call(name, function)
    return as_reward(instance, function)


def as_reward(instance: Any, function: Callable[..., Any]) -> RewardFunction:
    """Return the reward that calls `function`. instance: the object with the reward's attributes."""
    parameters = _parameters(function)
    if form := _form_of(parameters):
        function, parameters = form.adapted(function, parameters), {}
    concurrent = inspect.iscoroutinefunction(function) and getattr(instance, "concurrent", True)
    deterministic = getattr(instance, "deterministic", True)
    groups = _takes_groups(parameters)
    return RewardFunction("tokens" in parameters and not groups, deterministic, concurrent, groups, function)


def with_groups(config: C) -> C:
    """Return `config` with the served rewards that score a group at once in `reward.groups`. Raises UserError."""
    kinds = {name: find(name) for name in [*config.own_rewards, *config.judges]}
    groups = [name for name, kind in kinds.items() if _takes_groups(_parameters(_method(kind) or kind))]
    groups += [name for name in config.reward.groups if name not in {*kinds, *groups}]
    return config.model_copy(update={"reward": config.reward.model_copy(update={"groups": groups})})


def check_groups(rewards: Mapping[str, Traits], config: RewardConfig) -> None:
    """Raise UserError if a reward scores groups and `config` says otherwise, or the reverse."""
    for name, reward in rewards.items():
        if reward.groups != (name in config.groups):
            fact, entry = ("scores", "lacks it") if reward.groups else ("does not score", "has it")
            raise UserError(
                f"reward {name!r} {fact} all completions of a group at once, but the reward.groups of the run {entry}: "
                f"correct reward.groups"
            )


def check(name: str, options: Mapping[str, Any] = NO_OPTIONS) -> Callable[..., Any]:
    """Return the function or class `name`. Raises UserError if it cannot be called, or instantiated with `options`."""
    target: Any = find(name)
    is_class = inspect.isclass(target)
    if options and not is_class:
        raise UserError(f"reward {name!r} has options (reward.options, key=value), but is a function: make it a class")
    if is_class:
        with explain(
            TypeError,
            f"reward {name!r}: {{why}}: its options are {_names(_parameters(target))}; correct them in reward.options, "
            f"or give them to its actor as key=value",
        ):
            inspect.signature(target).bind(**options)
        if getattr(target, "checks_options", False):
            make(name, target, options)
    return target


def find(name: str) -> Callable[..., Any]:
    """Return the function or class `name`. Raises UserError if there is none, or for parameters unlike a reward's."""
    target = _find(name)
    is_class = inspect.isclass(target)
    if not callable(_method(target) if is_class else target):
        kind = "a class without a method score" if is_class else f"of type {type(target).__name__}"
        raise UserError(f"reward {name!r} is {kind}: name a function, or a class with score(prompt, completion, row)")
    _check_call(name, target)
    return target


def _check_call(name: str, target: Any) -> None:
    is_class = inspect.isclass(target)
    function = _method(target) if is_class else target
    parameters = _parameters(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"reward {name!r} yields: have it return its score")
    groups = _takes_groups(parameters)
    if "completions" in parameters and not groups:
        raise UserError(
            f"reward {name!r} takes lists, as rewards of TRL do: write it for one completion, "
            f"def reward(prompt, completion, row), or for a group, def group_score(prompt, completions, rows) "
            f"(areal docs rewards)"
        )
    bound = is_class and not isinstance(
        inspect.getattr_static(target, _method_name(target)), staticmethod | classmethod
    )
    order: tuple[str, ...] = ("prompt", "completions", "rows") if groups else ("prompt", "completion", "row")
    called = f"it is called with {', '.join(order[:2])} and {order[2]}"
    values: tuple[Any, ...] = ("", "", {})
    keywords: dict[str, Any] = {"tokens": ()} if "tokens" in parameters and not groups else {}
    if form := _form_of(parameters):
        order, values, keywords = (), (), dict.fromkeys(form.keywords(parameters) or ())
    try:
        inspect.signature(function).bind(*[None] * bound, *values, **keywords)
    except ValueError:  # not written in Python, without a signature: the first call will show
        return
    except TypeError as error:
        tokens = "" if groups else ", and with tokens if it has a parameter of that name"
        raise UserError(f"reward {name!r}: {error}: {called}{tokens}") from None
    taken = [*parameters][bound:]
    if any(argument in taken and taken.index(argument) != place for place, argument in enumerate(order)):
        raise UserError(f"reward {name!r}: {called}, in this order: write its parameters so")


def hook(name: str, kind: str) -> Callable[..., Any] | None:
    """Return a hook of a reward in the table, None without the hook."""
    entry = extensions.entry("reward", name.partition("/")[0])
    return _hook(entry.load(), kind) if entry else None


def _hook(target: Any, kind: str) -> Callable[..., Any] | None:
    named = inspect.getattr_static(target, kind, None)
    is_hook = callable(named) if inspect.isroutine(target) else isinstance(named, staticmethod)
    return getattr(target, kind) if is_hook else None


def _method_name(target: Any) -> str:
    return "group_score" if hasattr(target, "group_score") else "score"


def _method(target: Any) -> Any:
    """Return the method that is called of a class or an object; None for anything but a reward."""
    return getattr(target, _method_name(target), None)


def _form_of(parameters: Mapping[str, Any]) -> RewardForm | None:
    forms = extensions.find_own("reward_form")
    return next((form for form in forms if form.keywords(parameters) is not None), None)


def _takes_groups(parameters: Mapping[str, Any]) -> bool:
    return {"completions", "rows"} <= parameters.keys()


def _find(name: str) -> Any:
    return extensions.find("reward", name if ":" in name else name.partition("/")[0])


def make(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    if getattr(kind, "checks_options", False):
        with explain(UserError, f"reward {name!r}: {{why}}"):
            return kind(**options)
    # The user's own code may raise anything.
    with explain(Exception, f"reward {name!r} could not be made with the options {_names(options)}: {{why}}"):
        return kind(**options)


def _names(options: Iterable[str]) -> str:
    """Name the options without their values: a value may be a secret."""
    return ", ".join(options) or "none"


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    with suppress(ValueError):
        return inspect.signature(function).parameters
    return {}  # some functions that are not written in Python have no signature

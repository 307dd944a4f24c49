"""Secrets in a configuration: the values that are hidden wherever a configuration is shown, and their way back.

A value is hidden by its key (`api_key`, `tokens`) or by its shape (a user in a URL, `?token=`, `NAME_TOKEN=value`,
`--api-key value`, the prefixes of well-known services' tokens). `secrets.json` of a run has the hidden values.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_WORD = (
    r"(?:token|secret|pass(?:word|wd|phrase)?|pwd|pw|pat|sas|credential|auth|authorization|bearer|cookie|dsn"
    r"|sig(?:nature)?|session[_-]?id|access[_-]?key[_-]?id|connection[_-]?string|(?:api|access|private|secret|signing|encryption)?[_-]?key)"
)
# A name whose last word names a secret, also with a number or a place: api_key_prod, apiKey, X-Api-Key, HF_TOKEN,
# token2. Names in _PLURAL are secrets if their value is text: `tokens: [abc]`. The excluded keys name columns, folders
# or counts.
_NAME = re.compile(
    rf"(?!(?:prompt|answer|date|tools|teacher)_key$)(?:.*[_.-]|.*(?<=[a-z0-9])(?=[A-Z]))?(?i:{_WORD}|auths|cookies|credentials)"
    r"(?:_?[0-9]+|[_-](?:file|prod|production|staging|dev|test|live))?"
)
_PLURAL = re.compile(
    r"(?:.*[_.-]|.*(?<=[a-z0-9])(?=[A-Z]))?(?i:(?:api|access|private|secret|signing)[_-]?keys|secrets|passwords|pass(?:es|phrases))"
    r"|(?i:(?:(?:api|access|auth|bearer|refresh|hf|hub|user)[_-]?)?tokens)"
)
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")
# In texts: users in URLs; NAME=value, also in the query of a URL; --name value; headers; tokens of well-known services.
_SHAPES = (
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),
    re.compile(rf"(?<![A-Za-z0-9])(?:[\w.-]*[_.-])?(?i:{_WORD})(?:_?[0-9]+)?=([\"']?)(?P<value>[^&#;\s\"']+)\1"),
    re.compile(rf"(?<!\S)--?(?:[\w-]*[_-])?(?i:{_WORD})\s+(?P<value>(?!-)\S+)"),
    re.compile(r"(?i:\bbearer|\bbasic)\s+(?P<value>[\w.~+/=-]{8,})"),
    re.compile(
        r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|AKIA|ASIA|AIza|wandb_v1_|pypi-|npm_|dckr_pat_|ya29\.|eyJ)"
        r"[\w.~+/=-]{12,}"
    ),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL),
)


def without_secrets(values: Any, name: str = "") -> Any:
    """Return a part of a configuration with HIDDEN in place of secrets. name: its key, or the secret section around."""
    match values:
        case dict():
            names = _named(values)
            return {key: without_secrets(value, names.get(key) or _inside(name, key)) for key, value in values.items()}
        case list():
            named = ["", *map(_option, values)]
            name = "api_keys" if name == "keys" else name  # a text under the key is a folder, an object is a section
            return [without_secrets(value, option or name) for option, value in zip(named, values, strict=False)]
        case str() | int() if values and values is not True and _NAME.fullmatch(name):
            return HIDDEN
        case str() if values:
            return HIDDEN if _PLURAL.fullmatch(name) else _without_shapes(values)
    return values


def _named(values: Mapping[Any, Any]) -> dict[Any, str]:
    """Return the name of the value in `{name: api_key, value: ...}`."""
    names = [values[key] for key in ("name", "key") if isinstance(values.get(key), str)]
    return {"value": names[0]} if names and "value" in values else {}


def _option(value: Any) -> str:
    """Return the name of an option whose value, the next word, is a secret: `api-key` of `--api-key`; else ""."""
    option = _OPTION.fullmatch(value) if isinstance(value, str) else None
    return option[1] if option and _NAME.fullmatch(option[1]) else ""


def _without_shapes(text: str) -> str:
    for shape in _SHAPES:
        text = shape.sub(_hide, text)
    return text


def _hide(match: re.Match[str]) -> str:
    value = match.groupdict().get("value")
    return HIDDEN if value is None else match[0].replace(value, HIDDEN)


def _inside(name: str, key: Any) -> str:
    return name if _NAME.fullmatch(name) or _PLURAL.fullmatch(name) else str(key)


def secrets_in(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that `without_secrets` changes, in nested dictionaries like `values`."""
    return _changed(values, without_secrets(values))


def _changed(values: dict[str, Any], hidden: dict[str, Any]) -> dict[str, Any]:
    pairs = {key: (value, hidden[key]) for key, value in values.items() if hidden[key] != value}
    return {key: _changed(*pair) if isinstance(pair[0], dict) else pair[0] for key, pair in pairs.items()}


def hidden_in(values: Any, place: str = "") -> str | None:
    """Return the first key with a hidden value, or with a value that is hidden in part; None if nothing is hidden."""
    match values:
        case dict():
            places = (hidden_in(value, f"{place}.{key}".lstrip(".")) for key, value in values.items())
        case list():
            places = (hidden_in(value, place) for value in values)
        case _:
            return place if isinstance(values, str) and HIDDEN in values else None
    return next((key for key in places if key is not None), None)


def reveal(values: dict[str, Any], secrets: Mapping[str, Any]) -> None:
    """Put the values that `secrets_in` returned back into their hidden places."""
    for key, secret in secrets.items():
        if isinstance(secret, dict) and isinstance(values.get(key), dict):
            reveal(values[key], secret)
        elif hidden_in(values.get(key)) is not None:
            values[key] = secret

"""The packages of clients, `clients.openai` and `clients.anthropic`, imported when they are first used: importing them
takes seconds, and each of pytest-xdist's processes collects all tests."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name not in ("anthropic", "openai"):
        raise AttributeError(name)
    return import_module(name)

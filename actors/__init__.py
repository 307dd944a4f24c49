"""The roles and what they share. A small role is a file; a role with parts is a room of its name.

An actor is thin: it receives a message, asks a state machine for the decision, and sends the result.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def role_module(role: str) -> ModuleType:
    """Imports the module of a role: actors/ROLE.py, or actors/ROLE/ROLE.py if the role has a room."""
    name = f"actors.{role}"
    spec = find_spec(name)
    return import_module(f"{name}.{role}" if spec and spec.submodule_search_locations else name)

"""Sandboxes of tasks: containers in which a policy works on files, and the tests that judge the work.

The names in `__all__` are public, for users' agents and sandboxes. Read sandboxes.py first.
"""

from areal.extensions.sandboxes.sandbox_tasks import Task, task_of
from areal.extensions.sandboxes.sandbox_tools import SandboxTools
from areal.extensions.sandboxes.sandboxes import Limits, Ran, Sandbox

__all__ = ["Limits", "Ran", "Sandbox", "SandboxTools", "Task", "task_of"]

"""How one sample of a prompt is produced: sessions, conversations, built-in workflows, environments, agents.

The names in `__all__` are public, for use in custom workflows and environments.
"""

from areal.extensions.environments.environments import Environment
from areal.extensions.sandboxes.sandbox_tasks import Task, task_of
from areal.extensions.sandboxes.sandbox_tools import SandboxTools
from areal.extensions.sandboxes.sandboxes import Limits, Ran, Sandbox
from areal.samples.table import Generation
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import turns
from areal.workflows.chat_templates import Message
from areal.workflows.conversation import Conversation, Keep, begin, keep_until, user
from areal.workflows.session import Session

__all__ = [
    "Conversation",
    "Environment",
    "Generation",
    "Keep",
    "Limits",
    "Message",
    "Ran",
    "Sandbox",
    "SandboxTools",
    "Session",
    "Task",
    "Trajectory",
    "begin",
    "keep_until",
    "task_of",
    "turns",
    "user",
]

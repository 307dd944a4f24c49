"""How one sample of a prompt is produced: sessions, conversations, built-in workflows, environments, agents.

The names in `__all__` are public, for use in custom workflows and environments.
"""

from areal.sampled import Generation
from areal.trajectory import Trajectory
from areal.workflows.builtin import turns
from areal.workflows.chat_templates import Message
from areal.workflows.conversation import Conversation, Keep, begin, keep_until, user
from areal.workflows.environments import Environment
from areal.workflows.sandbox_tasks import Task, task_of
from areal.workflows.sandbox_tools import SandboxTools
from areal.workflows.sandboxes import Limits, Ran, Sandbox
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

"""How a sample of a prompt is produced: sessions, conversations, built-in workflows, tools.

In: a session and a row. Out: a trajectory. Read `session.py` first, then `builtin.py` and `conversation.py`.

The names in `__all__` are public, for use in custom workflows, environments and tools.
"""

from areal.samples.table import Generation
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import turns
from areal.workflows.chat_templates import Message
from areal.workflows.conversation import Conversation, begin, user
from areal.workflows.session import Session
from areal.workflows.tools import Tool, Tools
from areal.workflows.turn_ends import Keep, keep_until

__all__ = [
    "Conversation",
    "Generation",
    "Keep",
    "Message",
    "Session",
    "Tool",
    "Tools",
    "Trajectory",
    "begin",
    "keep_until",
    "turns",
    "user",
]

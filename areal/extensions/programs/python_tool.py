"""The workflow `python_tool`: the policy writes Python, which is run in the sandbox for programs."""

from collections.abc import Mapping
from typing import Any

from areal.base.text import cut_text, python_call
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.extensions.programs.outside import open_sandbox
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import Turns, turns
from areal.workflows.conversation import begin, user
from areal.workflows.named_workflows import with_hooks
from areal.workflows.session import Session
from areal.workflows.turn_ends import Keep, keep_until


def _texts(options: Mapping[str, Any]) -> list[str]:
    return [_output_block("")]


def _rehearse(options: Mapping[str, Any], sandbox: SandboxConfig) -> None:
    open_sandbox(sandbox).close()


@with_hooks(texts=_texts, rehearse=_rehearse)
async def python_tool(session: Session, row: Row, *, max_calls: Turns = 4, max_output: Turns = 2000) -> Trajectory:
    """Let the policy write Python, in a ```python block or between <tool> and </tool>. The code is run, and the policy
    continues with its output (at most `max_output` characters). After `max_calls` calls, one more turn follows. The
    first turn without code is scored, or else the last turn."""
    talk, messages = begin(session.tokenizer, row.prompt, row.tools)
    answer = ""
    async for answer in turns(session, talk, messages, max_calls + 1, _until_call(session.tokenizer)):
        code = python_call(answer)
        if code is None:
            break
        messages.append(user(_output_block(cut_text(await session.run_python(code), max_output))))
    return session.trajectory(await session.score(answer, session.calls[-1].tokens))


def _until_call(tokenizer: Any) -> Keep:
    """End a turn after its first call. The policy would otherwise go on with an invented output of the call."""
    return keep_until(tokenizer, ("```", "</tool>"), lambda text: python_call(text) is not None)


def _output_block(output: str) -> str:
    return f"```output\n{output}\n```\n"

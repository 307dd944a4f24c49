"""A workflow of one's own: several attempts; each attempt continues the right part of the attempt before."""

from areal.data import Row, prompt_text
from areal.workflows import Session, Trajectory, begin, turns, user


async def mend(session: Session, row: Row, *, max_turns: int = 3, discount: float = 0.5) -> Trajectory:
    """Return the episode. The reward is the score of the last attempt, times `discount` for each earlier attempt."""
    problem = prompt_text(row.prompt)
    talk, messages = begin(session.tokenizer, row.prompt)
    right, score = "", 0.0
    async for attempt in turns(session, talk, messages, max_turns):
        score = await session.score(right + attempt)
        if score == 1:
            break
        right = right_part(problem, right + attempt)
        messages.append(user(problem + right))
    return session.trajectory(score * discount ** (len(session.calls) - 1))


def right_part(problem: str, working: str) -> str:
    """Return the right columns at the start of the working: `label, digit, digit, carry, sum` of every column."""
    right, carry = "", 0
    for at in range(0, len(problem) - 1, 3):
        label, x, y = problem[at : at + 3]
        total = int(x) + int(y) + carry
        column = f"{label}{x}{y}{total:02d}"
        if not working.startswith(right + column):
            break
        right, carry = right + column, total // 10
    return right

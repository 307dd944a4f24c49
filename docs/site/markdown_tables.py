"""Tables that Markdown shows as raw text, because a blank line cuts them in two."""

from __future__ import annotations

import re
from itertools import groupby

DELIMITERS = re.compile(r"\|([ :]*-+[ :]*\|)+")


def cut_tables(page: str) -> list[int]:
    """The numbers of the lines, from 1, that begin rows without the head of a table.

    >>> cut_tables("| a |\\n|---|\\n| 1 |\\n\\n| 2 |")
    [5]
    """
    within_fence, lines = False, list[tuple[int, str]]()
    for number, line in enumerate(page.splitlines(), start=1):
        within_fence ^= line.lstrip().startswith("```")
        lines.append((number, "" if within_fence else line))
    blocks = [list(block) for is_row, block in groupby(lines, lambda line: line[1].startswith("|")) if is_row]
    return [block[0][0] for block in blocks if len(block) < 2 or not DELIMITERS.fullmatch(block[1][1].strip())]

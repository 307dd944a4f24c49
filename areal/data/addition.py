"""The quickstart's task: long addition with the working written out.

Columns run from the units upwards. A column has a label, so that the model finds the column by label and need not
count. The prompt lists `label, digit, digit` per column and ends with `=`. The working repeats these three characters
per column and adds `carry, sum`. For 347 + 85:

    prompt      a75b48c30=
    completion  a7512b4813c3004     7+5 = 12, 4+8+1 = 13, 3+0+1 = 04: the answer is 432

The number of columns n is heavy-tailed, as lengths of reasoning are: the probability is ~ n^-1.5 by default.

Held-out rows never coincide with training rows, whatever the seeds. A checksum of the prompt decides on which side a
problem is (a sixteenth is held out), and a row is drawn again until it is on the requested side.
"""

import re
import string
import zlib
from collections.abc import Iterator
from functools import partial
from random import Random

from areal.data.rows import without

LABELS = string.ascii_letters[:40]
ALPHABET = string.digits + LABELS + "="
MAX_DIGITS = len(LABELS)
COLUMN_CHARACTERS = 5
WORKING_IN_WORDS = (
    "Columns of a sum have letters, from the ones up. For each column, the model writes its letter, its two digits, "
    "the carry, and the digit of the sum; the answer is these digits from the last to the first, behind the last carry."
)

_WORKING = re.compile(r"(?:[a-zA-Z][0-9]{4})+")
_HELD_OUT_SHARE = 16
LENGTH_EXPONENT = 1.5

# The teacher is more often wrong than right on these sums. After slips at random places the most likely answer would
# still be right, so greedy decoding would have nothing to learn.
HARD_PAIRS = frozenset({(7, 8), (8, 7), (6, 9), (9, 6)})
HARD_SLIP = 0.55


def make_row(
    seed: int,
    index: int,
    *,
    min_digits: int = 2,
    max_digits: int = MAX_DIGITS,
    length_exponent: float = LENGTH_EXPONENT,
    held_out: bool = False,
) -> dict[str, str]:
    """Return a problem: `prompt` as the module describes it, and `answer`, the sum in decimal.

    The row depends only on the arguments. The longer summand has n digits with probability ~ n^-`length_exponent`, for
    n from `min_digits` to `max_digits`. `held_out` selects the side. Short problems repeat within a side, but never
    across sides. Raises ValueError unless 2 <= min_digits <= max_digits <= 40.
    """
    if not 2 <= min_digits <= max_digits <= MAX_DIGITS:
        raise ValueError(f"digits must satisfy 2 <= min <= max <= {MAX_DIGITS}, not {min_digits} and {max_digits}")
    random = Random(f"{seed}/{index}")
    lengths = range(min_digits, max_digits + 1)
    digits = random.choices(lengths, [n**-length_exponent for n in lengths])[0]
    while True:
        row = _problem(random, digits)
        if is_held_out(row["prompt"]) == held_out:
            return row


def is_held_out(prompt: str) -> bool:
    """Whether the problem is on the held-out side: a sixteenth of problems, by CRC-32 of the prompt."""
    return zlib.crc32(prompt.encode()) % _HELD_OUT_SHARE == 0


def demonstration(row: dict[str, str], random: Random, slip: float = 0.0) -> str:
    """Return the completion of a teacher who makes mistakes.

    In every column, the carry or the sum digit is wrong with probability `slip`. At a hard pair, the sum is too small
    by 1 with probability `HARD_SLIP` (if `slip` > 0). The next column uses the written carry. With `slip` = 0 the
    completion is right.
    """
    carry = 0
    written = []
    for label, x, y in _columns(row["prompt"]):
        total = x + y + carry
        hard = slip > 0 and (x, y) in HARD_PAIRS
        if random.random() < (HARD_SLIP if hard else slip):
            total = total - 1 if hard else _slipped(total, random)
        carry = total // 10
        written.append(f"{label}{x}{y}{total:02d}")
    return "".join(written)


def reward(prompt: str, completion: str, row: dict[str, str]) -> float:
    """Return 1.0 if the working is complete and has the answer `row["answer"]`, else 0.0.

    A working is complete if it has a column of five characters for every column of the prompt, with the labels in
    order, and nothing more. The answer is the last carry, followed by the sum digits from the last column to the first.
    Copied digits and earlier carries are not judged: this is an outcome reward.

    >>> reward("a75b48c30=", "a7512b4813c3004", {"answer": "432"})
    1.0
    """
    if not _WORKING.fullmatch(completion):
        return 0.0
    if completion[::COLUMN_CHARACTERS] != prompt[:-1:3]:
        return 0.0
    digits = completion[-2] + completion[COLUMN_CHARACTERS - 1 :: COLUMN_CHARACTERS][::-1]
    return float(int(digits) == int(row["answer"]))


def _problem(random: Random, digits: int) -> dict[str, str]:
    x = random.randrange(10 ** (digits - 1), 10**digits)
    y = random.randrange(10**digits)
    first = random.randrange(len(LABELS))
    labels = (LABELS + LABELS)[first : first + digits]
    columns = zip(labels, f"{x:0{digits}d}"[::-1], f"{y:0{digits}d}"[::-1], strict=True)
    return {"prompt": "".join(map("".join, columns)) + "=", "answer": str(x + y)}


def _columns(prompt: str) -> Iterator[tuple[str, int, int]]:
    for start in range(0, len(prompt) - 1, 3):
        label, x, y = tuple(prompt[start : start + 3])
        yield label, int(x), int(y)


def _slipped(total: int, random: Random) -> int:
    carry, units = divmod(total, 10)
    if random.random() < 0.25:
        return 10 * (1 - carry) + units
    return 10 * carry + (units + random.randrange(1, 10)) % 10


vars(reward)["flaws"] = partial(without, "answer")

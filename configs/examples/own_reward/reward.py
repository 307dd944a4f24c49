"""A reward of one's own."""


def digits_right(prompt: str, completion: str, row: dict) -> tuple[float, dict[str, float]]:
    """Return the share of digits that are right in place. A column takes 3 characters of the prompt, and 5 of the
    working, the sum last. A part, only recorded, says whether the working has as many columns as the prompt."""
    columns, sums = len(prompt) // 3, completion[4::5]
    right = sum(a == b for a, b in zip(sums, reversed(row["answer"]), strict=False))
    return right / max(columns, len(sums)), {"complete": float(len(completion) == 5 * columns)}

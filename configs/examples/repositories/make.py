"""Writes rows.jsonl: five small repositories with mistakes, and tests for the mistakes."""

import json
from pathlib import Path

LEAP = "def is_leap(year):\n    return year % 4 == 0 and year % 100 != 0\n"
LEAP_TESTS = "assert is_leap(2024) and not is_leap(1900) and not is_leap(2023)\n    assert is_leap(2000)"

SECOND = "def second(numbers):\n    return sorted(numbers)[-2]\n"
SECOND_TESTS = "assert second([1, 3, 3, 2]) == 2"

WORDS = """def count_words(text):
    counts = {}
    for word in text.split(" "):
        counts[word] = counts.get(word, 0) + 1
    return counts
"""
WORDS_TESTS = "assert count_words('a  b\\nA') == {'a': 2, 'b': 1}"

MERGE = """def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
"""
MERGE_TESTS = """assert merge([(1, 9), (2, 3)]) == [(1, 9)]
    assert merge([(4, 5), (1, 4)]) == [(1, 5)]"""

BANK = """class Account:
    def __init__(self, balance=0, history=[]):
        self.balance, self.history = balance, history

    def withdraw(self, amount):
        self.balance -= amount
        self.history.append(-amount)
"""
BANK_TESTS = """first, second = Account(5), Account(5)
    first.withdraw(3)
    assert (first.balance, first.history, second.history) == (2, [-3], [])"""

TASKS = {
    "leap": (LEAP, "is_leap", LEAP_TESTS, "A year that 400 divides is a leap year."),
    "second": (SECOND, "second", SECOND_TESTS, "It is the second largest of the different numbers."),
    "words": (WORDS, "count_words", WORDS_TESTS, "Any white space separates words, and A is the word a."),
    "merge": (MERGE, "merge", MERGE_TESTS, "Intervals that touch or contain each other are one."),
    "bank": (BANK, "Account", BANK_TESTS, "Each account has a history of its own."),
}


def row(name: str) -> dict:
    code, imported, tests, wish = TASKS[name]
    test = f"from {name} import {imported}\n\n\ndef test_{name}():\n    {tests}\n"
    command = f"cd /tmp/repository && python -m pytest -q -p no:cacheprovider test_{name}.py"
    task = f"Correct /tmp/repository/{name}.py: {wish} Write shell commands in ```bash blocks; end without one."
    paths = {"files": {f"/tmp/repository/{name}.py": code}, "tests": {f"/tmp/repository/test_{name}.py": test}}
    return {"name": name, "task": task, **paths, "folder": "/tmp/repository", "command": command}


if __name__ == "__main__":
    Path(__file__).with_name("rows.jsonl").write_text("".join(f"{json.dumps(row(name))}\n" for name in TASKS))

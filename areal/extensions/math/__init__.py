"""Compares the final answer of a completion with the answers of a row: `math_answers.py`."""

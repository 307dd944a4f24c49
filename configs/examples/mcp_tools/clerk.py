"""Questions about prices, and the turns of a careless clerk who answers them."""

from __future__ import annotations

import json
from itertools import permutations, product
from random import Random

from server import PRICES

COUNTS, GUESSES = range(2, 5), 0.6
SYSTEM = {"role": "system", "content": "Look prices up with the tool; do not guess them."}
Basket = tuple[int, str, int, str]
"""A number of one fruit and a number of another fruit."""


def baskets(random: Random) -> list[Basket]:
    """Return all baskets in random order."""
    every = [(n, a, m, b) for n, m in product(COUNTS, COUNTS) for a, b in permutations(PRICES, 2)]
    return random.sample(every, len(every))


def row(basket: Basket) -> dict[str, str]:
    """Return a row in the form of rows.jsonl."""
    n, a, m, b = basket
    first, second = (fruit.replace("cherry", "cherrie") + "s" for fruit in (a, b))
    prompt = f"What do {n} {first} and {m} {second} cost together? End with: The answer is N."
    return {"prompt": prompt, "answer": str(n * PRICES[a] + m * PRICES[b])}


def demonstrations(random: Random, basket: Basket) -> list[dict]:
    """Return the clerk's turns as rows of areal sft. With the probability GUESSES the clerk guesses the prices instead
    of calling the tool."""
    n, a, m, b = basket
    messages, rows = [SYSTEM, {"role": "user", "content": row(basket)["prompt"]}], []
    if random.random() < GUESSES:
        one, two = random.choices([*PRICES.values()], k=2)
    else:
        one, two = PRICES[a], PRICES[b]
        calls = [{"name": "price", "arguments": {"fruit": fruit}} for fruit in (a, b)]
        text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
        rows.append({"prompt": messages, "completion": text})
        shown = [{"role": "tool", "content": f"One {fruit} costs {PRICES[fruit]}."} for fruit in (a, b)]
        messages = [*messages, {"role": "assistant", "content": text}, *shown]
    x, y = n * one, m * two
    sums = f"{n} x {one} = {x}. {m} x {two} = {y}. {x} + {y} = {x + y}. The answer is {x + y}."
    rows.append({"prompt": messages, "completion": sums})
    return [turn | {"tools": [{"name": "price"}]} for turn in rows]

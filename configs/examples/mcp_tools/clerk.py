"""Questions about prices, and the turns of a careless clerk who answers them."""

from __future__ import annotations

import json
from itertools import permutations, product
from random import Random

from server import PRICES

COUNTS, GUESSES, SLIPS = range(2, 6), 0.6, 0.15
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
    """Return the clerk's turns as rows of areal sft. The share GUESSES of the clerk's prices are guesses, without a
    call of the tool, and the share SLIPS of the sums is wrong by 1."""
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
    total = n * one + m * two + (random.choice([-1, 1]) if random.random() < SLIPS else 0)
    sums = f"{n} x {one} = {n * one}. {m} x {two} = {m * two}. {n * one} + {m * two} = {total}."
    rows.append({"prompt": messages, "completion": f"{sums} The answer is {total}."})
    return [turn | {"tools": [{"name": "price"}]} for turn in rows]

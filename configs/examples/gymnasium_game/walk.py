"""Games of a player who walks over the frozen lake at random."""

from __future__ import annotations

from random import Random

import gymnasium

SILENT, MOST_MESSAGES = 0.1, 40


def game(random: Random, prompt: str) -> list[dict[str, str]]:
    """Return the messages of a game. A turn is a random step that stays on the board or, in one of ten, no number."""
    world = gymnasium.make("FrozenLake-v1", render_mode="ansi", is_slippery=False, map_name="4x4")
    world.reset(seed=0)
    messages, over = [{"role": "user", "content": f"{prompt}\n{world.render()}"}], False
    while not over and len(messages) < MOST_MESSAGES:
        row, column = divmod(int(world.unwrapped.s), 4)
        steps = [step for step, stays in enumerate((column > 0, row < 3, column < 3, row > 0)) if stays]
        if random.random() < SILENT:
            text, shown = "Hm.", f"That is no action. Actions are: {world.action_space}."
        else:
            step = random.choice(steps)
            _, _, over, _, _ = world.step(step)
            text, shown = str(step), world.render()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]
    return messages

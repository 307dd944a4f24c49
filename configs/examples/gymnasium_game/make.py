"""Makes a tiny Llama with random weights, and trains the model on games of a player who walks at random."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from tokenizers import pre_tokenizers
from walk import game

sys.path.append(str(Path(__file__).parents[2]))
from tiny_models import teach, write_llama

FOLDER, HELD_OUT = Path("build/lake"), 16
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{# No turn has thinking, whatever enable_thinking says. #}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
LINES = [pre_tokenizers.Split("\n", "merged_with_previous"), pre_tokenizers.ByteLevel(False, use_regex=False)]
"""A line of the board is a token."""
TEACHING = ["epochs=2", "trainer.dtype=float32", "trainer.lr=3e-3", "trainer.lr_schedule=cosine"]


def main(folder: Path, games: int = 4000) -> None:
    """Write a turn of each game, with all messages before the turn, and train the model on the turns."""
    random, folder = Random(0), folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prompt = json.loads((Path(__file__).parent / "rows.jsonl").read_text().splitlines()[0])["prompt"]
    played = [game(random, prompt) for _ in range(games)]
    turns = [(messages, random.randrange(1, len(messages), 2)) for messages in played]
    rows = [{"prompt": messages[:turn], "completion": messages[turn]["content"]} for messages, turn in turns]
    rows.sort(key=lambda row: len(row["prompt"]))  # the last rows are held out: a first turn has the prompt of many
    for name, part in {"taught": rows[:-HELD_OUT], "held_out": rows[-HELD_OUT:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    texts = [message["content"] for messages in played for message in messages]
    pieces = pre_tokenizers.Sequence(LINES)
    write_llama(folder / "random", texts, template=TEMPLATE, special=SPECIAL, pieces=pieces, sizes=SIZES)
    teach(folder, f"data.eval_source={folder / 'held_out.jsonl'}", f"data.eval_size={HELD_OUT}", *TEACHING)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main(FOLDER)

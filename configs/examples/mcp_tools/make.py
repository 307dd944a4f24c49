"""Makes a tiny Llama with random weights, and trains the model on the turns of the careless clerk of clerk.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from clerk import baskets, demonstrations, row
from tokenizers import Regex, pre_tokenizers

sys.path.append(str(Path(__file__).parents[2]))
from tiny_models import teach, write_llama

FOLDER, HELD_OUT = Path("build/shop"), 54
SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}</tool_call>'
MESSAGE = "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}<end>"
TEMPLATE = (
    "{# No turn has thinking, whatever enable_thinking says. #}"
    "{% if tools %}Tools: {{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}{% endif %}"
    "{% for m in messages %}" + MESSAGE + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
NUMBERS = [pre_tokenizers.Split(Regex(r"\d+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
"""No token has a number and a word."""
TEACHING = ["epochs=3", "data.eval_size=16", "trainer.dtype=float32", "trainer.lr=3e-3", "trainer.lr_schedule=cosine"]


def main(folder: Path, conversations: int = 6000) -> None:
    """Write rows, held-out rows and the clerk's turns, and train the model on the turns."""
    random, folder = Random(0), folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    held_out, trained = (every := baskets(random))[:HELD_OUT], every[HELD_OUT:]
    taught = [turn for _ in range(conversations) for turn in demonstrations(random, random.choice(trained))]
    files = {"rows": [*map(row, trained)], "held_out": [*map(row, held_out)], "taught": taught}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [text for turn in taught for text in (turn["completion"], *(part["content"] for part in turn["prompt"]))]
    write_llama(
        folder / "random",
        texts,
        template=TEMPLATE,
        special=SPECIAL,
        pieces=pre_tokenizers.Sequence(NUMBERS),
        sizes=SIZES,
        marks=("<tool_call>", "</tool_call>"),
    )
    teach(folder, *TEACHING)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main(FOLDER)

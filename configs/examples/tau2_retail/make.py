"""Makes the small sibling's rows, and a tiny Llama that `areal sft` trains on the turns of a careless clerk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from episodes import FOLDER
from tokenizers import pre_tokenizers

sys.path.append(str(Path(__file__).parents[2]))
from tiny_models import teach, write_llama

MARKS = ["<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
ARGUMENTS = "{{ a if a is string else a | tojson }}"
CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + "}</tool_call>"
CALLS = "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + CALL + "{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }} {% endfor %}"
TEMPLATE = (
    TOOLS
    + "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    + CALLS
    + "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 1024,
}
TEACHING = [
    "data.eval_size=16",
    "batch_size=8",
    "trainer.dtype=float32",
    "trainer.lr=2e-3",
    "trainer.lr_schedule=cosine",
]


def main() -> None:
    subprocess.run([".venv-tau2/bin/python", Path(__file__).with_name("turns.py")], check=True)
    lines = (FOLDER / "taught.jsonl").read_text().splitlines()
    write_llama(
        FOLDER / "random",
        [str(json.loads(line)) for line in lines[:200]],
        template=TEMPLATE,
        special=MARKS,
        pieces=pre_tokenizers.ByteLevel(add_prefix_space=False),
        sizes=SIZES,
        marks=("<tool_call>", "</tool_call>"),
        most_tokens=768,
    )
    teach(FOLDER, *TEACHING)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main()

"""Makes a tiny Qwen2.5-VL with random weights, and trains the model on a careless teacher's counts of dots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from draw import MOST, SIDE, write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

sys.path.append(str(Path(__file__).parents[2]))
from tiny_models import teach

FOLDER, SLIP = Path("build/dots"), 0.4
IMAGE, VIDEO, BEGIN, END = SPECIAL = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
WORDS = ["<pad>", "<eos>", *SPECIAL, "how", "many", *map(str, range(1, MOST + 1))]
PARTS = "{% for p in m.content %}{{ '" + BEGIN + IMAGE + END + "' if p.type == 'image' else p.text }}{% endfor %}"
CONTENT = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
TEMPLATE = "{% for m in messages %}" + CONTENT + "{{ '<eos>' if m.role == 'assistant' else ' ' }}{% endfor %}"

WIDTH = {"hidden_size": 64, "intermediate_size": 128}
TEXT = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(WORDS)}
ENDS = {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
# The vision tower is not trained. Random weights with this range already distinguish the pictures.
TOWER = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [0], "initializer_range": 0.1}
IDS = {"image_token_id": 2, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
SIZES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28**2, "max_pixels": SIDE**2}
TEACHING = ["epochs=2", "trainer.dtype=float32", "trainer.lr=3e-3", "trainer.lr_schedule=cosine"]


def write_model(folder: Path) -> None:
    """Write the model, the tokenizer, and the settings that cut pictures into patches."""
    torch.manual_seed(0)
    text, tower = {**WIDTH, **TEXT, **ENDS, "rope_parameters": ROPE}, {**WIDTH, **TOWER}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **IDS)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("image_token", "video_token", "vision_bos_token", "vision_eos_token"), SPECIAL, strict=True))
    tokens = {"eos_token": "<eos>", "pad_token": "<pad>", "extra_special_tokens": special}
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **tokens).save_pretrained(folder)
    for name, kind in ("preprocessor", "Image"), ("video_preprocessor", "Video"):
        classes = {
            "processor_class": "Qwen2_5_VLProcessor",
            f"{kind.lower()}_processor_type": f"Qwen2VL{kind}Processor",
        }
        (folder / f"{name}_config.json").write_text(json.dumps(SIZES | classes))


def main(folder: Path, rows: int = 1024, *settings: str) -> None:
    """Write the rows and the model. settings: of `areal sft`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "taught.jsonl", rows, SLIP)
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "held_out.jsonl", rows // 4)
    write_model(folder / "random")
    teach(folder, *TEACHING, *settings)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main(FOLDER)

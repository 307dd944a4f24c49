"""Low-rank adapters: what is trained and published in place of a model's weights. All of it is in `lora.py`."""

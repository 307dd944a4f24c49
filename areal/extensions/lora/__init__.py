"""Low-rank adapters, trained and published in place of a model's weights. The code is in `lora.py`."""

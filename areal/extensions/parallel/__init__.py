"""Divides experts or tensors over ranks by DeepSpeed: read `divided_experts` first, then `divided_tensors`."""

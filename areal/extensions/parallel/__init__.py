"""Divides experts over ranks by DeepSpeed's AutoEP: read `divided_experts` first."""

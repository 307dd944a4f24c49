"""Divides experts, tensors or the tokens of rows over ranks by DeepSpeed: read `divided_experts` first, then
`divided_tensors` and `ulysses`."""

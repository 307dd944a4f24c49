"""Trackers: the numbers of a run in TensorBoard, W&B, trackio and MLflow, sent by a process of its own."""

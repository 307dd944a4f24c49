"""The metrics of actors for Prometheus."""

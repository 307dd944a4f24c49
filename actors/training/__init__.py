"""The trainer's ranks and its probes of the engines."""

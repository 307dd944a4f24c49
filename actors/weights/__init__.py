"""Published weights on their way into engines."""

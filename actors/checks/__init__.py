"""What is checked before a run: the configuration, rows, ports, links, agents."""

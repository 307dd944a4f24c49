"""Agents: programs that talk to the policy over the APIs of OpenAI and Anthropic (agents.py), and tools over MCP."""

"""Agents: programs that talk to the policy over the APIs of OpenAI and Anthropic, and tools over MCP."""

"""The gateway: an OpenAI-compatible server whose users' sessions are trained.

Read first: `gateway.py`.
"""

"""The gateway: an OpenAI-compatible server whose users' sessions are trained.

In: calls and rewards of users. Out: answers, and sessions as samples for the trainer. Read `gateway.py` first: it has
the table of loops. `open_sessions.py` has what becomes of a session, `endpoint.py` the HTTP side.
"""

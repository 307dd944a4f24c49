"""The gateway: an OpenAI-compatible server with sessions that are trained.

In: calls and rewards of users. Out: answers, and sessions as samples for the trainer. Read `gateway.py` first, with
the table of loops. `endpoint.py` is the HTTP side. `open_sessions.py` opens sessions, `session_table.py` keeps and
adopts sessions, and `session_ends.py` makes samples of them.
"""

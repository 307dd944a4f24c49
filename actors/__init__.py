"""The roles and what they share. A small role is a file; a role with parts is a room of its name.

An actor is thin: it receives a message, asks a state machine for the decision, and sends the result.
"""

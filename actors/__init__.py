"""The roles, and modules for several roles. A small role is a file; a role with parts is a folder of the role's name.

Actors are thin: an actor receives a message, asks a state machine for the decision, and sends the result.
"""

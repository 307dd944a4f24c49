"""The roles, one file each, and the runtime they share. Actors are thin: receive, ask a state machine, send."""

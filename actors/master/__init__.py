"""The master: keeps the ledger, the versions and the directory of the run, and answers every other role.

In: requests of all roles. Out: answers, given after the journal has the changes, and events for all roles. Read
`master.py` first: it has the table of loops. `run_state.py` is the state that the journal restores, `changes.py` its
events. The files that end in `_requests.py` answer the other roles; `group_requests.py` has the way of a sample.
`run_watch.py` looks after the run every second, `announcements.py` publishes events, and `farewell.py` ends the run.
"""

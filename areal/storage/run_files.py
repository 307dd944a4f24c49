"""The names of the files in a run folder (areal.storage.run_folder). Folders of replays and for the hub have some."""

CONFIG, CHANGES, FORK, SECRETS = "config.yaml", "changes.jsonl", "fork.json", "secrets.json"
JOURNAL, SPOOL = "journal.db", "spool.db"
METRICS, EVALUATIONS, SUMMARY, REPORT = "metrics.jsonl", "evaluations.jsonl", "summary.json", "report.html"
EVENTS = "events.jsonl"
# Files whose records go to another one at some size, in place of those there, and that one.
OLDER = {METRICS: "metrics.1.jsonl", EVENTS: "events.1.jsonl"}
ROLLOUTS = "rollouts"
# Of the pictures of prompts: Config.pictures_folder.
PICTURES = "pictures"

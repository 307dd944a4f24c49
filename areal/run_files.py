"""The names of the files in a run folder (areal.storage.run_folder). Folders of replays and for the hub have some."""

CONFIG, CHANGES, FORK, SECRETS = "config.yaml", "changes.jsonl", "fork.json", "secrets.json"
JOURNAL, SPOOL = "journal.db", "spool.db"
METRICS, EVALUATIONS, SUMMARY, REPORT = "metrics.jsonl", "evaluations.jsonl", "summary.json", "report.html"
OLDER_METRICS = "metrics.1.jsonl"
EVENTS, OLDER_EVENTS = "events.jsonl", "events.1.jsonl"
ROLLOUTS = "rollouts"

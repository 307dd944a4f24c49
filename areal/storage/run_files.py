"""The names of the files in a run folder (areal.storage.run_folder), and in folders of replays and for the hub."""

CONFIG, CHANGES, FORK, SECRETS = "config.yaml", "changes.jsonl", "fork.json", "secrets.json"
JOURNAL, SPOOL = "journal.db", "spool.db"
METRICS, EVALUATIONS, SUMMARY, REPORT = "metrics.jsonl", "evaluations.jsonl", "summary.json", "report.html"
EVENTS = "events.jsonl"
# Files that rotate: at a size limit, a file replaces the older file.
OLDER = {METRICS: "metrics.1.jsonl", EVENTS: "events.1.jsonl"}
ROLLOUTS = "rollouts"
# The folder of the prompts' pictures: Config.pictures_folder.
PICTURES = "pictures"

"""The scaling model: runs the real actors on virtual time, with engines whose durations are computed by formulas.

    report = run(Setup(devices=512))          # `python tests/scaling.py --devices 8,32,128,512`

The master, rollout managers, generators, rewards and trainer are the real ones, and so is every message between them.
The time of each operation of an engine is computed from the parameters in `Hardware` and `Llm`, each with its source.
docs/generation.md has the results.

    setups -> costs, lengths -> engines -> cluster -> report
"""

"""How the system scales: the real actors on virtual time, with engines that are formulas.

    report = run(Setup(devices=512))          # `python -m areal simulate --devices 8,32,128,512`

Master, managers, generators, rewards and trainer are the real ones, and so is every message between them. What an
engine does in a second is computed, from parameters that stand in `Hardware` and `Llm`, each with its source.
docs/scaling.md has the formulas in words, and what came out.

    setups -> costs, lengths -> engines -> cluster -> report
"""

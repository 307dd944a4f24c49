"""The generation engine on vLLM, and the choice of a generator for a sequence.

In: prompts as tokens, new weights. Out: tokens with log-probs and versions. Read `generation_engine.py` first;
`gathering_scheduler.py` and `vllm_worker.py` run inside vLLM's process; `routing.py` and `moves.py` decide without I/O.
"""

"""The generation engine on vLLM, and the choice of a generator for a sequence.

In: prompts as tokens, new weights. Out: tokens with log-probs and versions. Read `generation_engine.py` first;
`vllm_worker.py` is the part inside vLLM's process, `routing.py` a state machine without I/O.
"""

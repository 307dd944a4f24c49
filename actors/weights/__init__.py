"""Published weights on their way into engines.

In: a version that the trainer has published. Out: its files on the generator's machine, or its tensors in the engine.
Read `weight_service.py` first; `direct_weights.py` transfers tensors without files.
"""

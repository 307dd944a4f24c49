"""Published weights on their way into engines.

In: a version that the trainer has published. Out: its files on the generator's machine.
Read `weight_service.py` first; the extension `actors/direct/` transfers tensors without files.
"""

"""Published weights on their way into engines.

In: a version that the trainer has published. Out: the version's files on the generator's machine. Read
`weight_service.py` first; the extension `actors/direct/` transfers tensors without files.
"""

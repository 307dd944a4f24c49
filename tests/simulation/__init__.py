"""The test bench of the actors: the real ones, on virtual time, with faults of every kind and an oracle that watches.

A seed determines the whole course of a simulation. `tests/simulate.py` is the command line.

    loop, network, engines -> incarnation -> world <- faults, failpoints, model, quiet <- mutants
                                               └──> oracle, book, memory, replay
"""

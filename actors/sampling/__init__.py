"""How a rollout manager, an evaluator and a gateway get tokens and scores, through three objects.

In: calls of workflows (`SampleSession`). Out: tokens with log-probs and versions, and scores.

    SampleSession ──job──▶ Dispatch ──job──▶ Flow ──batches of jobs──▶ a generator, reward actor or scorer
    what a workflow sees   chooses the actor, another if it dies; does not know the kind of a job

Read `dispatch.py` first, then `jobs.py`. `loads.py` and `avoidance.py` say which actor gets a job. `Sampling`
(`sampling.py`) is the part that the three roles have.
"""

"""The generator: a vLLM engine that samples tokens and follows the published versions.

In: sequences of rollout managers, evaluators and gateways; published weights. Out: tokens with log-probs and
versions. Read `generator.py` first, with the table of loops and the life of a sequence. `loaded_policy.py` loads new
weights, `shared_devices.py` shares devices with the trainer, and `engine.py` is the interface of the engine.
"""

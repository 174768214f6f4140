"""LoRA adapters (arXiv:2106.09685) as plain arrays: settings, checks, digests, merging, PEFT files.

Knows nothing of models, JAX or servers: a base is its parameters' shapes by path, as
`training.model.parameter_shapes` gives them. Adapters are trained in `training`, served by
`inference`.
"""

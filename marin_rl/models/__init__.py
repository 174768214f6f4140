"""Models: the description of a transformer, its arrays, and what its layers compute.

`spec` and `families` describe, without JAX; `module` has the arrays, `block` the arithmetic.
"""

"""Work on what others wrote (chat templates, grammars), in processes that can be killed.

`sandbox` runs programs that a model wrote, behind walls; `sandbox_check` proves the walls.
`processes` starts, limits and kills them; `templates` and `grammars` are the work. None of these
modules imports JAX or transformers, so that a worker starts fast.
"""

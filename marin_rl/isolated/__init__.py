"""Work on what others wrote (chat templates, grammars), in processes that can be killed.

`processes` starts, limits and kills them; `child` is the loop that runs in them; `templates` and
`grammars` are the work. The modules that run in a child import neither JAX nor transformers.
"""

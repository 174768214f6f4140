"""Work on what others wrote (chat templates, grammars), in processes that can be killed.

`pool` chooses and replaces workers; `processes` is a worker as its parent has it, `worker` its
body, and `supervisor` kills it with all that it started. `templates` and `grammars` are work.
`sandbox` runs programs that a model wrote, behind walls that it proves first. None of these modules
imports JAX or transformers, so that a worker starts fast.
"""

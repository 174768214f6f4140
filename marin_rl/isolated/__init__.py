"""Work on what others wrote (chat templates, grammars), in processes that can be killed.

`sandbox` runs programs that a model wrote, behind walls that it proves first.
`pool` asks processes and replaces them, `supervisor` kills them, `worker` is their body;
`templates` and `grammars` are work. None of these modules imports JAX or transformers, so that a
worker starts fast.
"""

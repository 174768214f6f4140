"""GGUF files of llama.cpp: `conversion` makes a model folder of one, and one of a model.

`settings` opens them; it and `tokenizer` have both directions of their parts.
"""

from importlib.util import find_spec

from marin_rl.errors import ConfigError

if find_spec("gguf") is None:
    raise ConfigError(
        "GGUF files need the library gguf: pip install 'marin-rl[gguf]', with the constraints.txt "
        "of this version"
    )

"""Other libraries: their environments, formats, trainers and trackers, a file each.

Nothing imports one of these modules by name: environments are found by the registry, the others by
`integration`. Deleting a file, with the `_host` file of its name, takes the library out.
"""

import importlib
from importlib.util import find_spec
from typing import Any

from marin_rl.errors import ConfigError


def integration(name: str) -> Any:
    """Return the module of an integration. Raises ConfigError where it was deleted."""
    if find_spec(f"{__name__}.{name}") is None:
        raise ConfigError(f"this installation of marin-rl has no marin_rl/integrations/{name}.py")
    return importlib.import_module(f"{__name__}.{name}")

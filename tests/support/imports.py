"""The imports of code that stands in docs and notebooks."""

import ast
import importlib
from collections.abc import Collection

# Modules of environments of other libraries, and of what only they use.
FOREIGN = (
    "marin_rl.integrations.",
    "marin_rl.rollouts.relay",
    "websockets",
    "zmq",
    "verifiers",
    "gymnasium",
)


def missing_imports(code: str, elsewhere: Collection[str] = ()) -> list[str]:
    """Names that the code imports from modules which lack them; raises for a missing module.

    Packages named in `elsewhere` are not looked at.
    """
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [(str(node.module), [alias.name for alias in node.names])]
        else:
            continue
        for module, names in modules:
            if module.partition(".")[0] not in elsewhere:
                loaded = importlib.import_module(module)
                missing += [f"{module}.{name}" for name in names if not hasattr(loaded, name)]
    return missing

"""The adapter that a configuration describes: `policy.lora` for a base of known shapes.

`modules` are `all-linear`, names (`q_proj`, `mlp.up_proj`) or patterns (`mlp.*`, `*.?_proj`).
`ranks` and `alphas` give single modules their own, by the same names and patterns; the first that
matches applies.
"""

from fnmatch import fnmatchcase

from marin_rl.config import LoraConfig
from marin_rl.errors import InputError
from marin_rl.lora.adapter import (
    ALL_LINEAR,
    LoraModule,
    Shapes,
    check_rank,
    linear_shapes,
    module_name,
)
from marin_rl.lora.peft import read_peft


def configured_modules(lora: LoraConfig | None, shapes: Shapes) -> dict[str, LoraModule]:
    """Rank and alpha of every adapted weight of a base, by path, in its order; none without one.

    Raises InputError for names and patterns that match nothing, for ranks that the base cannot
    have, and for a folder that `init_from` names and that is unfit.
    """
    if lora is None:
        return {}
    # Ranks and scales are the folder's own: its arrays have no other shapes.
    if lora.init_from is not None:
        return dict(read_peft(lora.init_from, shapes).modules)
    layers = linear_shapes(shapes)
    names = {path: module_name(path) for path in layers}
    for pattern in (*lora.modules, *lora.ranks, *lora.alphas):
        if pattern != ALL_LINEAR and not any(_matches(pattern, n) for n in names.values()):
            raise InputError(
                f"no linear layer matches {pattern!r}: expected {ALL_LINEAR}, a name or a "
                f"pattern of {', '.join(names.values())}; embeddings and the head stay frozen"
            )
    chosen = {
        path: _module(lora, name)
        for path, name in names.items()
        if any(pattern == ALL_LINEAR or _matches(pattern, name) for pattern in lora.modules)
    }
    for path, module in chosen.items():
        check_rank(names[path], module, layers[path])
    return chosen


def _module(lora: LoraConfig, name: str) -> LoraModule:
    assert lora.rank is not None, "the configuration names a rank or a folder"
    rank = next((r for pattern, r in lora.ranks.items() if _matches(pattern, name)), lora.rank)
    alphas = (a for pattern, a in lora.alphas.items() if _matches(pattern, name))
    return LoraModule(rank=rank, alpha=next(alphas, lora.alpha), rslora=lora.rslora)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)

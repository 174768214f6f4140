"""The adapter that a configuration describes: `policy.lora` for a base of known shapes."""

from marin_rl.config import LoraConfig
from marin_rl.lora.peft import read_peft
from marin_rl.lora.spec import LoraModule, LoraSpec, Shapes


def configured_modules(lora: LoraConfig | None, shapes: Shapes) -> dict[str, LoraModule]:
    """Adapted weights of a base, by path; none without an adapter.

    Raises InputError for ranks and modules that the base cannot have, and for a folder that
    `init_from` names and that is unfit.
    """
    if lora is None:
        return {}
    # Ranks and scales are the folder's own: its arrays have no other shapes.
    if lora.init_from is not None:
        return dict(read_peft(lora.init_from, shapes).modules)
    assert lora.rank is not None, "the configuration names a rank or a folder"
    spec = LoraSpec(
        rank=lora.rank,
        alpha=lora.alpha,
        modules=lora.modules,
        rslora=lora.rslora,
        ranks=lora.ranks,
        alphas=lora.alphas,
    )
    return spec.resolve(shapes)

"""Scalar models with an adapter: their template, first values, and the trunk that stays frozen.

A reward model with an adapter trains A and B of its trunk, and its head. Names are those of a
`ScalarModel`: `trunk/PATH:A` and `head/…`; the base's are `trunk/PATH`. Where there is no adapter,
all parameters are trained and nothing is frozen.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
from levanter.models.lm_model import LmHeadModel

from marin_rl.compilation import device_array
from marin_rl.config import PolicyConfig
from marin_rl.lora.quantization import is_quantized, quantize_base
from marin_rl.training.adapters import HEAD, Modules, trained_shapes, with_adapter
from marin_rl.training.critic import TRUNK, ScalarHead, ScalarModel
from marin_rl.training.model import named_parameters, parameter_shapes
from marin_rl.training.quantized_layers import with_quantized
from marin_rl.training.step_types import Parameters


def scalar_template(policy: PolicyConfig, trunk: LmHeadModel, modules: Modules) -> ScalarModel:
    """The architecture of a scalar model on this trunk, with shapes in place of arrays."""
    if policy.lora is not None:
        adapted = with_adapter(trunk, modules, policy.lora.dtype)
        trunk = with_quantized(adapted, policy.quantize_base)
    return eqx.filter_eval_shape(ScalarModel.of, trunk)


def first_scalar(adapter: Mapping[str, Any], trunk: LmHeadModel) -> Parameters:
    """Trained parameters before any training: an adapter's, and a head that returns 0."""
    head = named_parameters(ScalarHead.init(trunk.Embed.size))
    arrays = {f"{TRUNK}{name}": device_array(array) for name, array in adapter.items()}
    return arrays | {f"{HEAD}{name}": array for name, array in head.items()}


def frozen_trunk(
    policy: PolicyConfig, template: ScalarModel, base: Mapping[str, Any]
) -> Parameters:
    """The base of a scalar model's adapter, quantised or in the dtype that is computed in.

    An output head, which a scalar model does not read, is left out.
    """
    if policy.quantize_base is not None:
        base = quantize_base(base, policy.quantize_base)
    # What is neither trained nor read, the output head, would take the memory of a layer or more.
    names = parameter_shapes(template).keys() - trained_shapes(template).keys()
    return {
        f"{TRUNK}{name}": array
        if is_quantized(name)
        else device_array(array).astype(policy.compute_dtype)
        for name, array in base.items()
        if f"{TRUNK}{name}" in names
    }

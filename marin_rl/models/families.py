"""Families of models: their description from a config.json, and the names of their tensors.

A family is one case of `_particulars`, and where its files differ from Llama's, of `tensors_of`.
Defaults of settings are those of transformers' own configuration classes. Imports neither JAX nor
weights, so that a run of a folder that cannot be computed exactly ends before it starts anything.
"""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from marin_rl.config import ModelConfig
from marin_rl.errors import InputError
from marin_rl.models.spec import ACTIVATIONS, STACKED, LayerKind, Rope, Spec
from marin_rl.plain_files import check_family, read_hf_config

ARCHITECTURES = {
    "apertus": "ApertusForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_LENGTH = "original_max_position_embeddings"
_ROPE_OPTIONAL = {
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip
# Keys of `rope_scaling` that change what is computed, by its kind.
ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _LENGTH},
    "yarn": {"factor", _LENGTH, *_ROPE_OPTIONAL},
    "dynamic": {"factor"},
    "longrope": {"short_factor", "long_factor", "factor", _LENGTH, "attention_factor"},
}
# Sizes, for which transformers' defaults would stand in for what a folder leaves out.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SIZES_GPT2 = ("vocab_size", "n_embd", "n_layer", "n_head")
# Defaults of transformers' LlamaConfig, as far as they decide what is computed.
LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048, "intermediate_size": 11008, "num_key_value_heads": None,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.02,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
# Settings whose other values compute what no family here does.
_PLAIN = {
    "clip_qkv": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_bidirectional_attention": False,
    "add_cross_attention": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def described_folder(folder: str | Path) -> Spec:
    """The model of a Hugging Face folder by its config.json alone; reads no weight.

    Raises InputError naming what would be computed otherwise than it says.
    """
    path = Path(folder).resolve()
    return described(read_hf_config(path), path)


def described_model(model: ModelConfig, context_length: int) -> Spec:
    """An architecture that a configuration describes, as its config.json would."""
    tree: dict[str, Any] = {
        "model_type": model.family,
        "vocab_size": model.vocab_size or 1,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size or model.hidden_size // model.heads,
        "max_position_embeddings": context_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "gelu_pytorch_tanh" if model.family == "gemma" else "silu",
        "sliding_window": None,
    }
    layers = ["full_attention"] * model.layers
    hf = SimpleNamespace(**tree, layer_types=layers, hidden_activation=None)
    return replace(_of_llama_kind(hf, ()), family=model.family, hf=json.dumps(tree, sort_keys=True))


def described(tree: Mapping[str, Any], path: Path) -> Spec:
    """The model of a config.json. Raises InputError, naming `path`, as `described_folder` does."""
    family = check_family(dict(tree), ARCHITECTURES, path)
    sizes = _SIZES_GPT2 if family == "gpt2" else _SIZES
    if wrong := [key for key in sizes if type(tree.get(key)) is not int]:
        raise InputError(f"{path}: expected a decoder's config.json, found no number {wrong[0]!r}")
    if "quantization_config" in tree:
        raise _unsupported(path, family, "quantized weights", "plain ones")
    theta, scaling = _rope_of(tree, path)
    # Layers with a window have no scaling of their own in any family.
    local = (tree.get("rope_parameters") or {}).get("sliding_attention") or {}
    if set(local) - {"rope_theta", "rope_type", "partial_rotary_factor"} or (
        local.get("rope_type", "default") != "default"
    ):
        raise InputError(
            f"{path}: rope_parameters.sliding_attention {dict(local)} is not supported; expected "
            "rope_type default and a rope_theta"
        )
    text = json.dumps(tree, sort_keys=True)  # transformers writes into what it is given
    own = {} if theta is None else {"rope_theta": theta}
    own |= _particular_ropes(tree.get("rope_parameters") or {})
    partial = own.get("partial_rotary_factor", tree.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0) and family != "phi3":
        raise _unsupported(path, family, f"partial_rotary_factor {partial}", "none")
    try:
        hf = _settings(family, json.loads(text) | own)
        spec = _gpt2(hf) if family == "gpt2" else _of_llama_kind(hf, scaling)
        _ = [rope.frequencies for rope in spec.ropes]  # raises for numbers that do not fit
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: expected a {family} model's config.json: {error!r}") from error
    _check(spec, hf, path)
    # Beyond it `long_factor` would turn all positions: transformers decides by the longest sequence
    # of a batch, vLLM by its max_model_len, and here a token depends on its own sequence alone.
    options = dict(scaling)
    longest = options.get(_LENGTH) if options.get("rope_type") == "longrope" else None
    return replace(spec, family=family, hf=text, context_length=longest or spec.context_length)


def _settings(family: str, tree: dict[str, Any]) -> Any:
    """Settings of a config.json, with transformers' defaults of those that it leaves out."""
    if family == "llama":
        return SimpleNamespace(**LLAMA_DEFAULTS | tree)
    # Its configuration classes take a second to import, which most folders do not need.
    transformers = importlib.import_module("transformers")
    return transformers.CONFIG_MAPPING[family](**tree)


def _check(spec: Spec, hf: Any, path: Path) -> None:
    """Raise InputError for settings that would be computed otherwise than they say."""
    family = hf.model_type
    for key, plain in _PLAIN.items():
        if getattr(hf, key, plain) not in (plain, None):
            raise _unsupported(path, family, f"{key} {getattr(hf, key)}", f"{key} {plain}")
    if len(spec.kinds) != hf.num_hidden_layers:
        raise _unsupported(path, family, f"{len(spec.kinds)} layer_types", "one for each layer")
    if spec.activation not in ACTIVATIONS:
        expected = f"one of {', '.join(ACTIVATIONS)}"
        raise _unsupported(path, family, f"hidden_act {spec.activation}", expected)
    if spec.heads % spec.kv_heads:
        wrong = f"num_key_value_heads {spec.kv_heads}"
        raise _unsupported(path, family, wrong, f"a divisor of num_attention_heads {spec.heads}")


def _unsupported(path: Path, family: str, found: str, expected: str) -> InputError:
    return InputError(
        f"{path}: a {family} model with {found} is not supported, expected {expected}: it would "
        "load and silently compute something else; choose another model"
    )


def _gpt2(hf: Any) -> Spec:
    return Spec(
        vocabulary=hf.vocab_size,
        context_length=hf.n_positions,
        width=hf.n_embd,
        mlp_width=hf.n_inner or 4 * hf.n_embd,
        kinds=(LayerKind(),) * hf.n_layer,
        heads=hf.n_head,
        kv_heads=hf.n_head,
        head_size=hf.n_embd // hf.n_head,
        norm_epsilon=hf.layer_norm_epsilon,
        initializer_range=hf.initializer_range,
        tied=hf.tie_word_embeddings,
        activation=hf.activation_function,
        gated=False,
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=True,
    )


def _of_llama_kind(hf: Any, scaling: tuple[tuple[str, Any], ...]) -> Spec:
    """Pre-norm Llama, as far as it goes, and then what its family changes."""
    width, heads = hf.hidden_size, hf.num_attention_heads
    size = getattr(hf, "head_dim", None) or width // heads
    partial = getattr(hf, "partial_rotary_factor", None) if hf.model_type == "phi3" else None
    rope = Rope(theta=float(hf.rope_theta), size=int(size * (partial or 1.0)), scaling=scaling)
    bias = bool(getattr(hf, "attention_bias", False))
    spec = Spec(
        vocabulary=hf.vocab_size,
        context_length=hf.max_position_embeddings,
        width=width,
        mlp_width=hf.intermediate_size,
        kinds=(LayerKind(rope=rope),) * hf.num_hidden_layers,
        heads=heads,
        kv_heads=hf.num_key_value_heads or heads,
        head_size=size,
        norm_epsilon=hf.rms_norm_eps,
        initializer_range=hf.initializer_range,
        tied=hf.tie_word_embeddings,
        activation=getattr(hf, "hidden_act", None) or hf.hidden_activation,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
    )
    return replace(spec, **_particulars(hf, rope))


def _particulars(hf: Any, rope: Rope) -> dict[str, Any]:  # noqa: C901 - one case a family
    """Fields of a `Spec` that are a family's own."""
    window = getattr(hf, "sliding_window", None)
    windowed = (LayerKind(window=window, rope=rope),) * hf.num_hidden_layers
    after = {"qk_norm": "all", "pre": False, "post": True}
    match hf.model_type:
        case "qwen2":
            return {"qkv_bias": True, "output_bias": False, "kinds": _by_type(hf, rope)}
        case "qwen3":
            return {"qk_norm": "head", "kinds": _by_type(hf, rope)}
        case "mistral" | "phi3":
            return {"kinds": windowed}
        case "olmo2":
            return after
        case "olmo3":
            # Its scaling is for the layers that see all.
            return after | {"kinds": _by_type(hf, rope, replace(rope, scaling=()))}
        case "smollm3":
            pairs = zip(_by_type(hf, rope), hf.no_rope_layers, strict=True)
            return {"kinds": tuple(k if rotates else replace(k, rope=None) for k, rotates in pairs)}
        case "apertus":
            return {"qk_norm": "head", "gated": False}
        case "granite":
            return {
                "scale": hf.attention_multiplier,
                "embedding_scale": hf.embedding_multiplier,
                "residual_scale": hf.residual_multiplier,
                "logits_scale": 1.0 / hf.logits_scaling,
            }
        case "mixtral":
            return {"kinds": windowed, **_experts(hf, hf.num_local_experts)}
        case "qwen3_moe":
            experts = _experts(hf, hf.num_experts) | {"mlp_width": hf.moe_intermediate_size}
            return {"qk_norm": "head", "renormalise": hf.norm_topk_prob, **experts}
        case "olmoe":
            experts = _experts(hf, hf.num_experts)
            return {"qk_norm": "all", "renormalise": hf.norm_topk_prob, **experts}
        case "gpt_oss":
            own = {"mlp_bias": True, "sinks": True, "clip": getattr(hf, "swiglu_limit", 7.0)}
            experts = _experts(hf, hf.num_local_experts) | {"choose_first": True}
            return {"kinds": _by_type(hf, rope), **own, **experts}
        case "gemma" | "gemma2" | "gemma3_text":
            return _of_gemma(hf, rope)
        case _:
            return {}


def _by_type(hf: Any, rope: Rope, local: Rope | None = None) -> tuple[LayerKind, ...]:
    """Layers with a window, rotated by `local` where that is given, and those that see all."""
    near = LayerKind(window=getattr(hf, "sliding_window", None), rope=local or rope)
    far = LayerKind(rope=rope)
    return tuple(near if kind == "sliding_attention" else far for kind in hf.layer_types)


def _experts(hf: Any, count: int) -> dict[str, Any]:
    return {"experts": count, "experts_chosen": hf.num_experts_per_tok}


def _of_gemma(hf: Any, rope: Rope) -> dict[str, Any]:
    common = {
        "norm": "gemma",
        "embedding_scale": math.sqrt(hf.hidden_size),
        "activation": hf.hidden_activation or hf.hidden_act,
    }
    if hf.model_type == "gemma":
        return common
    third = hf.model_type == "gemma3_text"
    local = Rope(theta=float(hf.rope_local_base_freq), size=rope.size) if third else None
    return common | {
        "post": True,
        "qk_norm": "head" if third else None,
        "scale": hf.query_pre_attn_scalar**-0.5,
        "cap": hf.attn_logit_softcapping,
        "final_cap": hf.final_logit_softcapping,
        "kinds": _by_type(hf, rope, local),
    }


def _particular_ropes(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that transformers 5 writes into `rope_parameters`, in the words of 4."""
    full, local = (nested.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    own: dict[str, Any] = {}
    partial = (full or nested).get("partial_rotary_factor")
    if partial is not None:
        own["partial_rotary_factor"] = partial
    if "rope_theta" in local:
        own["rope_local_base_freq"] = local["rope_theta"]
    return own


def _rope_of(
    tree: Mapping[str, Any], path: Path
) -> tuple[float | None, tuple[tuple[str, Any], ...]]:
    """Rotary base and scaling, from `rope_theta`/`rope_scaling` or from `rope_parameters`.

    transformers 5 writes the latter, by layer type where these differ.
    """
    parameters = tree.get("rope_parameters") or {}
    parameters = dict(parameters.get("full_attention") or parameters)
    parameters.pop("partial_rotary_factor", None)
    bases = {float(b) for b in (tree.get("rope_theta"), parameters.pop("rope_theta", None)) if b}
    if len(bases) > 1:
        raise InputError(
            f"{path}: rope_theta and rope_parameters.rope_theta differ ({sorted(bases)}); expected "
            "one rotary base; remove the wrong one from config.json"
        )
    scaling = dict(tree.get("rope_scaling") or parameters)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    length, longest = (tree.get(f"{of}max_position_embeddings") for of in ("original_", ""))
    if kind == "longrope" and type(length) is int and type(longest) is int and length > 0:
        scaling |= {_LENGTH: length, "factor": longest / length}
    for key in ("type", "rope_theta", "partial_rotary_factor"):
        scaling.pop(key, None)
    base = next(iter(bases), None)
    if kind == "default" and not scaling:
        return base, ()
    if kind not in ROPE_KEYS or set(scaling) - ROPE_KEYS[kind]:
        raise InputError(
            f"{path}: rotary scaling {kind!r} with {sorted(scaling)} is not supported; expected "
            f"one of { {name: sorted(keys) for name, keys in ROPE_KEYS.items()} }"
        )
    if missing := ROPE_KEYS[kind] - _ROPE_OPTIONAL - set(scaling):
        raise InputError(f"{path}: rotary scaling {kind!r} lacks {sorted(missing)}; add them")
    known = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in scaling.items()
        if value is not None
    }
    return base, (("rope_type", kind), *sorted(known.items()))


# ---------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a folder: parameters of ours, and how they lie in it.

    `rows`: joined along the rows; `columns`: likewise, and turned, as GPT-2 stores them. Of
    experts: `inputs` [X, D, 2 F], gate and up by turns; `outputs` [X, F, D]; `biases` [X, 2 F].
    """

    paths: tuple[str, ...]
    layout: Literal["rows", "columns", "inputs", "outputs", "biases"] = "rows"


_ENDS = {
    "embeddings/token_embeddings/weight": "model.embed_tokens.weight",
    "transformer/norm/weight": "model.norm.weight",
    "lm_head/weight": "lm_head.weight",
}
_ENDS_GPT2 = {
    "embeddings/token_embeddings/weight": "transformer.wte.weight",
    "embeddings/position_embeddings/weight": "transformer.wpe.weight",
    "transformer/norm/weight": "transformer.ln_f.weight",
    "transformer/norm/bias": "transformer.ln_f.bias",
    "lm_head/weight": "lm_head.weight",
}
# Modules of a layer by family: other names of ours, and those that are joined.
_RENAMED = {
    "apertus": {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    },
    "gpt2": {
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn/o_proj": "attn/c_proj",
        "mlp/up_proj": "mlp/c_fc",
        "mlp/down_proj": "mlp/c_proj",
    },
}
_QKV = ("self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj")
_JOINED: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {"attn/c_attn": _QKV},
    "phi3": {
        "self_attn/qkv_proj": _QKV,
        "mlp/gate_up_proj": ("mlp/gate_proj", "mlp/up_proj"),
    },
}


def tensors_of(spec: Spec, paths: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of a folder by name, `{layer}` in it, that hold the parameters of these paths."""
    if spec.experts:
        own = [path for path in paths if "/mlp/" not in path]
        return tensors_of(replace(spec, experts=0), own) | _of_experts(spec)
    gpt2 = spec.family == "gpt2"
    ends, layers = (_ENDS_GPT2, "transformer.h") if gpt2 else (_ENDS, "model.layers")
    renamed, joined = _RENAMED.get(spec.family, {}), _JOINED.get(spec.family, {})
    inside = {part: whole for whole, parts in joined.items() for part in parts}
    tensors: dict[str, Tensor] = {}
    for path in paths:
        if path in ends:
            tensors[ends[path]] = Tensor(paths=(path,))
            continue
        module, _, last = path.removeprefix(STACKED).rpartition("/")
        whole = inside.get(module, renamed.get(module, module))
        parts = joined.get(whole, (module,))
        turned = gpt2 and last == "weight" and module.endswith("_proj")
        tensors[f"{layers}.{{layer}}.{whole}/{last}".replace("/", ".")] = Tensor(
            paths=tuple(f"{STACKED}{part}/{last}" for part in parts),
            layout="columns" if turned else "rows",
        )
    return tensors


def check_peft_names(spec: Spec) -> None:
    """Raise InputError for a family whose modules PEFT would not find under our names."""
    if spec.family in ("phi3", "gpt2"):
        raise InputError(
            f"an adapter of a {spec.family} model cannot be a PEFT folder: Hugging Face's modules "
            "join projections that are adapted apart here; expected another family, or "
            "`marin-rl export RUN --hf FOLDER`, which merges the adapter"
        )


def _of_experts(spec: Spec) -> dict[str, Tensor]:
    mlp = f"{STACKED}mlp/"
    gate, up, down = (f"{mlp}experts/{name}_proj/" for name in ("gate", "up", "down"))
    at = "model.layers.{layer}."
    if spec.family == "gpt_oss":
        names = ("weight", "bias")
        router = {f"{at}mlp.router.{n}": Tensor(paths=(f"{mlp}router/{n}",)) for n in names}
        inside = f"{at}mlp.experts."
        return router | {
            f"{inside}gate_up_proj": Tensor(
                paths=(f"{gate}weight", f"{up}weight"), layout="inputs"
            ),
            f"{inside}gate_up_proj_bias": Tensor(
                paths=(f"{gate}bias", f"{up}bias"), layout="biases"
            ),
            f"{inside}down_proj": Tensor(paths=(f"{down}weight",), layout="outputs"),
            f"{inside}down_proj_bias": Tensor(paths=(f"{down}bias",)),
        }
    inside, names = f"{at}mlp.", ("gate_proj", "up_proj", "down_proj")
    if spec.family == "mixtral":
        inside, names = f"{at}block_sparse_moe.", ("w1", "w3", "w2")
    each = {
        f"{inside}experts.{{expert}}.{name}.weight": Tensor(paths=(f"{ours}weight",))
        for name, ours in zip(names, (gate, up, down), strict=True)
    }
    return {f"{inside}gate.weight": Tensor(paths=(f"{mlp}router/weight",)), **each}


def config_json(spec: Spec) -> dict[str, Any]:
    """The config.json of a model, for transformers 4 and 5, and servers built on either.

    Where all layers have one rotary embedding, its base and scaling are given in both words.
    """
    tree: dict[str, Any] = json.loads(spec.hf)
    tree |= {"architectures": [ARCHITECTURES[spec.family]], "vocab_size": spec.vocabulary}
    if spec.family == "gpt2":
        return tree
    tree |= {"head_dim": spec.head_size, "hidden_act": tree.get("hidden_act", spec.activation)}
    if spec.family.startswith("gemma"):
        tree["hidden_activation"] = spec.activation
    if spec.family == "gemma3_text":
        of_window = {kind.window is not None: kind.rope for kind in spec.kinds}
        if far := of_window.get(False):
            tree |= {"rope_theta": far.theta, "rope_scaling": dict(far.scaling) or None}
        if near := of_window.get(True):
            tree |= {"rope_local_base_freq": near.theta}
    elif len(spec.ropes) == 1:
        (rope,) = spec.ropes
        scaling = dict(rope.scaling)
        tree |= {
            "rope_theta": rope.theta,
            "rope_scaling": scaling or None,
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": rope.theta},
        }
        # Of longrope transformers 4 takes these keys and no other.
        if scaling.get("rope_type") == "longrope":
            factors = {f"{of}_factor": scaling[f"{of}_factor"] for of in ("short", "long")}
            tree["rope_scaling"] = {"type": "longrope", **factors}
    return tree

"""The model: its architecture, where its first parameters come from, the mesh it is spread over.

Leaves out how it is trained (training.py) and served (serving.py).
"""

from datetime import date
from typing import Annotated, Literal

from pydantic import Field, model_validator

from marin_rl.config.section import (
    Count,
    OneOrMany,
    Section,
    TemplateOptions,
    field,
    null_if,
    optional_field,
    plan_field,
)

ModelFamily = Literal["llama", "qwen2", "qwen3", "mistral", "gemma"]


class ModelConfig(Section):
    """Architecture of a policy that is built here; ignored where `policy.hf_path` is given."""

    family: ModelFamily = field("llama", "family of models")
    hidden_size: Count = field(128, "width of the residual stream", le=65536)
    layers: Count = field(3, "number of transformer blocks", le=512)
    heads: Count = field(4, "attention heads", le=512)
    kv_heads: Count = field(4, "key/value heads (divides heads)", le=512)
    intermediate_size: Count = field(352, "width of the MLP", le=1_000_000)
    head_size: int | None = field(
        None,
        "dimensions of an attention head, even; null: hidden_size / heads; other values with "
        "llama and qwen3 only",
        ge=2,
        le=1024,
    )
    rope_theta: float = field(10_000.0, "base of the rotary embedding", gt=1)
    norm_epsilon: float = field(1e-5, "epsilon inside RMSNorm", gt=0, lt=1)
    initializer_range: float = field(0.02, "std of initial weights", gt=0, le=1)
    tie_embeddings: bool = field(True, "output head shares the input embedding")
    vocab_size: int | None = field(
        None, "rows of the embedding; null: the tokenizer's", ge=2, le=10_000_000
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads: found {self.kv_heads} and {self.heads}")
        if self.head_size is None and self.hidden_size % self.heads:
            raise ValueError(
                f"heads must divide hidden_size: found {self.heads} and {self.hidden_size}"
            )
        usual = self.hidden_size / self.heads
        size = usual if self.head_size is None else self.head_size
        if size % 2:
            raise ValueError(f"the rotary embedding needs an even head_size: found {size:g}")
        if size != usual and self.family not in ("llama", "qwen3"):
            raise ValueError(
                f"{self.family} has heads of hidden_size/heads, {usual:g}: found head_size {size}; "
                "leave it null"
            )
        if self.tie_embeddings and self.family == "mistral":
            raise ValueError(
                "mistral has an output head of its own: expected tie_embeddings false, found true"
            )
        return self


Names = Annotated[tuple[str, ...], OneOrMany, Field(min_length=1, max_length=64)]
Alpha = Annotated[float, Field(gt=0, le=1e6)]


class LoraConfig(Section):
    """An adapter: A and B of low rank next to each linear layer, of a base that stays as it is.

    Layers compute W x + scale B A x, where the scale is alpha / rank.
    """

    rank: Annotated[int, Field(ge=1, le=65536)] | None = field(
        None, "rank of B A; null only with init_from, whose ranks apply"
    )
    alpha: Alpha = field(32.0, "the scale of B A is alpha / rank")
    modules: Names = field(
        ("all-linear",),
        "adapted layers: all-linear, or names and patterns such as q_proj, mlp.*; embeddings and "
        "the head stay frozen",
    )
    ranks: dict[str, Count] = field(
        {}, "ranks of single modules, by names and patterns as in modules"
    )
    alphas: dict[str, Alpha] = field({}, "alphas of single modules, likewise")
    rslora: bool = field(False, "the scale is alpha / sqrt(rank) instead")
    dtype: Literal["float32", "bfloat16"] = field(
        "float32", "dtype of A, B and their moments; bfloat16 rounds small updates away"
    )
    init_from: str | None = field(
        None, "PEFT folder whose A and B are the first ones; null: A random by seed, B zero"
    )
    learning_rate_factor: float = field(
        10.0,
        "A and B are trained at this times the configured learning rates, which are those of "
        "full training",
        gt=0,
        le=1000,
    )
    begins: Literal["training", "sft"] = field(
        "training",
        "first stage that trains the adapter: training, so that a warm start trains all "
        "parameters and makes the base; or sft, the warm start; without one (policy.init other "
        "than sft) both are training",
    )

    @model_validator(mode="after")
    def _ranks_are_known(self) -> "LoraConfig":
        if self.init_from is None and self.rank is None:
            raise ValueError("lora.rank: expected a rank of at least 1, found null")
        fields, own = (
            type(self).model_fields,
            ("alpha", "alphas", "modules", "rank", "ranks", "rslora"),
        )
        given = [name for name in own if getattr(self, name) != fields[name].default]
        if self.init_from is not None and given:
            raise ValueError(
                f"lora.init_from has ranks, scales and modules of its own: remove {given[0]}"
            )
        return self


class PolicyConfig(Section):
    """Model that is trained, and the source of its first parameters."""

    init: Literal["random", "sft", "hf", "checkpoint"] = field(
        "random",
        "source of the first weights: random, by `seed`; sft, the warm start that section `sft` "
        "configures; hf, the folder `hf_path`; checkpoint, another run's `checkpoint`",
    )
    hf_path: str | None = field(None, "local Hugging Face model folder")
    checkpoint: str | None = field(
        None,
        "checkpoint to start from, of this or another root: ROOT/RUN_ID/checkpoints/round-00012 "
        "or ROOT/RUN_ID/sft/step-00500",
    )
    tokenizer: str = field(
        "characters",
        "a local tokenizer folder; characters: that of `hf_path`, without which it is built in",
    )
    end_tokens: tuple[Annotated[str, Field(min_length=1)], ...] | None = optional_field(
        "texts of tokens that end a completion, in addition to the tokenizer's eos_token and "
        "those in its generation_config.json; null: the token that the chat template puts after "
        "an answer, which run.json then names",
        as_begun=True,
        max_length=8,
    )
    chat_template_options: TemplateOptions | None = optional_field(
        "values of variables that the chat template reads, such as enable_thinking; date "
        "(YYYY-MM-DD) is today to a template that asks for it, else the day on which the run "
        "began",
        as_begun=("date",),
    )
    model: ModelConfig = ModelConfig()
    context_length: Count = field(128, "tokens of prompt and completion together", le=10_000_000)
    compute_dtype: Literal["float32", "bfloat16"] = field(
        "float32", "dtype of activations and products; master weights stay float32"
    )
    lora: LoraConfig | None = optional_field(
        "train an adapter, with all other parameters frozen; null: all are trained"
    )

    quantize_base: Literal["int8", "nf4"] | None = optional_field(
        "store the frozen linear layers next to an adapter quantised, in 8 bits or in NF4's 4, "
        "for training and sampling alike (QLoRA); null: in compute_dtype"
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> "PolicyConfig":
        if self.quantize_base is not None and self.lora is None:
            raise ValueError(
                f"quantize_base is {self.quantize_base} without policy.lora: only parameters that "
                "are frozen next to an adapter can be quantised; set policy.lora.rank"
            )
        day = (self.chat_template_options or {}).get("date")
        if day is not None and not (isinstance(day, str) and _is_date(day)):
            raise ValueError(
                f"chat_template_options.date: expected a date as YYYY-MM-DD, found {day!r:.40}"
            )
        if self.init == "hf" and not self.hf_path:
            raise ValueError("init 'hf' needs hf_path, a local model folder")
        if self.init == "checkpoint" and not self.checkpoint:
            raise ValueError("init 'checkpoint' needs checkpoint, ROOT/RUN_ID/checkpoints/round-N")
        return self


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


class MeshConfig(Section):
    """Device mesh of the training step; 1 on an axis switches it off, -1 takes what is left."""

    data: int = plan_field(1, "data parallel", ge=-1)
    fsdp: int = plan_field(1, "parameters and optimizer sharded", ge=-1)
    tensor: int = plan_field(1, "tensor parallel", ge=1)
    context: Annotated[int | None, null_if(1)] = optional_field(
        "devices that share each row, for long rows: positions, and parameters as by fsdp",
        plan=True,
        ge=1,
    )

    @model_validator(mode="after")
    def _sizes(self) -> "MeshConfig":
        if 0 in (self.data, self.fsdp) or (self.data, self.fsdp).count(-1) > 1:
            raise ValueError("axis sizes are at least 1, and only one of them may be -1")
        return self

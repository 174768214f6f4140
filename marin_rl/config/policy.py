"""The model: its architecture, where its first parameters come from, the mesh it is spread over.

Leaves out how it is trained (training.py) and served (serving.py).
"""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from marin_rl.config.section import PLAN, Count, Section, TemplateOptions, optional_field

ModelFamily = Literal["llama", "qwen2", "qwen3", "mistral", "gemma"]


class ModelConfig(Section):
    """Architecture of a policy that is built here; ignored where `policy.hf_path` is given."""

    family: ModelFamily = Field(default="llama", description="Levanter model family")
    hidden_size: Count = Field(default=128, le=65536, description="width of the residual stream")
    layers: Count = Field(default=3, le=512, description="number of transformer blocks")
    heads: Count = Field(default=4, le=512, description="attention heads")
    kv_heads: Count = Field(default=4, le=512, description="key/value heads (divides heads)")
    intermediate_size: Count = Field(default=352, le=1_000_000, description="width of the MLP")
    head_size: int | None = Field(
        default=None,
        ge=2,
        le=1024,
        description="dimensions of an attention head, even; null: hidden_size / heads; other "
        "values with llama and qwen3 only",
    )
    rope_theta: float = Field(default=10_000.0, gt=1, description="base of the rotary embedding")
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1, description="epsilon inside RMSNorm")
    initializer_range: float = Field(default=0.02, gt=0, le=1, description="std of initial weights")
    tie_embeddings: bool = Field(default=True, description="output head shares the input embedding")
    vocab_size: int | None = Field(
        default=None,
        ge=2,
        le=10_000_000,
        description="rows of the embedding; null: the tokenizer's",
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads: found {self.kv_heads} and {self.heads}")
        if self.head_size is None and self.hidden_size % self.heads:
            raise ValueError(
                f"heads must divide hidden_size: found {self.heads} and {self.hidden_size}"
            )
        return self

    @model_validator(mode="after")
    def _family_has_it(self) -> "ModelConfig":
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


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=64)]
Alpha = Annotated[float, Field(gt=0, le=1e6)]


class LoraConfig(Section):
    """An adapter: A and B of low rank next to each linear layer, of a base that stays as it is.

    Layers compute W x + scale B A x, where the scale is alpha / rank.
    """

    rank: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None, description="rank of B A; null only with init_from, whose ranks apply"
    )
    alpha: Alpha = Field(default=32.0, description="the scale of B A is alpha / rank")
    modules: Names = Field(
        default=("all-linear",),
        description="adapted layers: all-linear, or names and patterns such as q_proj, mlp.*; "
        "embeddings and the head stay frozen",
    )
    ranks: dict[str, Count] = Field(
        default={}, description="ranks of single modules, by names and patterns as in modules"
    )
    alphas: dict[str, Alpha] = Field(default={}, description="alphas of single modules, likewise")
    rslora: bool = Field(default=False, description="the scale is alpha / sqrt(rank) instead")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of A, B and their moments; bfloat16 rounds small updates away",
    )
    init_from: str | None = Field(
        default=None,
        description="PEFT folder whose A and B are the first ones; null: A random by seed, B zero",
    )
    learning_rate_factor: float = Field(
        default=10.0,
        gt=0,
        le=1000,
        description="A and B are trained at this times the configured learning rates, which are "
        "those of full training",
    )
    begins: Literal["training", "sft"] = Field(
        default="training",
        description="first stage that trains the adapter: training, so that a warm start trains "
        "all parameters and makes the base; or sft, the warm start; without one (policy.init "
        "other than sft) both are training",
    )

    @model_validator(mode="after")
    def _ranks_are_known(self) -> "LoraConfig":
        own = {"rank", "alpha", "modules", "ranks", "alphas", "rslora"} & self.model_fields_set
        if self.init_from is None and self.rank is None:
            raise ValueError("lora.rank: expected a rank of at least 1, found null")
        if self.init_from is not None and (given := sorted(self._changed(own))):
            raise ValueError(
                f"lora.init_from has ranks, scales and modules of its own: remove {given[0]}"
            )
        return self

    def _changed(self, names: set[str]) -> list[str]:
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]


class PolicyConfig(Section):
    """Model that is trained, and the source of its first parameters."""

    init: Literal["random", "sft", "hf", "checkpoint"] = Field(
        default="random",
        description="source of the first weights: random, by `seed`; sft, the warm start that "
        "section `sft` configures; hf, the folder `hf_path`; checkpoint, another "
        "run's `checkpoint`",
    )
    hf_path: str | None = Field(default=None, description="local Hugging Face model folder")
    checkpoint: str | None = Field(
        default=None,
        description="checkpoint to start from, of this or another root: "
        "ROOT/RUN_ID/checkpoints/round-00012 or ROOT/RUN_ID/sft/step-00500",
    )
    tokenizer: str = Field(
        default="characters", description="'characters' (built in) or a local tokenizer folder"
    )
    end_tokens: tuple[Annotated[str, Field(min_length=1)], ...] | None = optional_field(
        as_begun=True,
        max_length=8,
        description="texts of tokens that end a completion, in addition to the tokenizer's "
        "eos_token and those in its generation_config.json; null: the token that the chat template "
        "puts after an answer, which run.json then names",
    )
    chat_template_options: TemplateOptions | None = optional_field(
        as_begun=("date",),
        description="values of variables that the chat template reads, such as enable_thinking; "
        "date (YYYY-MM-DD) is today to a template that asks for it, else the day on which the run "
        "began",
    )
    model: ModelConfig = ModelConfig()
    context_length: Count = Field(
        default=128, le=10_000_000, description="tokens of prompt and completion together"
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of activations and products; master weights stay float32",
    )
    lora: LoraConfig | None = optional_field(
        description="train an adapter, with all other parameters frozen; null: all are trained"
    )

    quantize_base: Literal["int8", "nf4"] | None = optional_field(
        description="store the frozen linear layers next to an adapter quantised, in 8 bits or in "
        "NF4's 4, for training and sampling alike (QLoRA); null: in compute_dtype"
    )

    @model_validator(mode="after")
    def _quantises_what_is_frozen(self) -> "PolicyConfig":
        if self.quantize_base is not None and self.lora is None:
            raise ValueError(
                f"quantize_base is {self.quantize_base} without policy.lora: only parameters that "
                "are frozen next to an adapter can be quantised; set policy.lora.rank"
            )
        return self

    @model_validator(mode="after")
    def _date_is_one(self) -> "PolicyConfig":
        day = (self.chat_template_options or {}).get("date")
        if day is not None and not (isinstance(day, str) and _is_date(day)):
            raise ValueError(
                f"chat_template_options.date: expected a date as YYYY-MM-DD, found {day!r:.40}"
            )
        return self

    @model_validator(mode="after")
    def _source_is_named(self) -> "PolicyConfig":
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

    data: int = Field(default=1, ge=-1, description="data parallel", json_schema_extra=PLAN)
    fsdp: int = Field(
        default=1, ge=-1, description="parameters and optimizer sharded", json_schema_extra=PLAN
    )
    tensor: int = Field(default=1, ge=1, description="tensor parallel", json_schema_extra=PLAN)

    @model_validator(mode="after")
    def _sizes(self) -> "MeshConfig":
        if 0 in (self.data, self.fsdp) or (self.data, self.fsdp).count(-1) > 1:
            raise ValueError("axis sizes are at least 1, and only one of them may be -1")
        return self

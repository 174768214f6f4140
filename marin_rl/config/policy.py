"""The model: its architecture, where its first parameters come from, the mesh it is spread over.

Leaves out how it is trained (training.py) and served (serving.py).
"""

from typing import Literal

from pydantic import Field, model_validator

from marin_rl.config.section import PLAN, Count, Section

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
    model: ModelConfig = ModelConfig()
    context_length: Count = Field(
        default=128, le=10_000_000, description="tokens of prompt and completion together"
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of activations; master weights stay float32"
    )

    @model_validator(mode="after")
    def _source_is_named(self) -> "PolicyConfig":
        if self.init == "hf" and not self.hf_path:
            raise ValueError("init 'hf' needs hf_path, a local model folder")
        if self.init == "checkpoint" and not self.checkpoint:
            raise ValueError("init 'checkpoint' needs checkpoint, ROOT/RUN_ID/checkpoints/round-N")
        return self


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

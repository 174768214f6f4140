"""The configuration tree: frozen, typed, ranged, resolved once and written into the run.

A section a class, by topic: policy.py, sampling.py, serving.py, asynchrony.py,
objective.py, training.py, orchestration.py, and sections.py over all of them. section.py says what
a section is and which of its keys are free; files.py has the keys that name code and other files;
loading.py reads YAML and the files of code, and no other file is read. Others import from here
alone.
"""

# ruff: noqa: F401 - what is imported here is there for others
from marin_rl.config.asynchrony import (
    GROUP_FILTERS,
    AsynchronyConfig,
    ReplayConfig,
    of_older_version,
)
from marin_rl.config.files import (
    code_in,
    environments_in,
    pin_code,
    place_files,
    places_in,
    places_named,
    section_at,
)
from marin_rl.config.loading import (
    Config,
    Overrides,
    Recipe,
    as_overrides,
    load_config,
    override,
    parse_config,
    pin_files,
    shipped_recipes,
)
from marin_rl.config.objective import ObjectiveConfig
from marin_rl.config.orchestration import (
    CheckpointsConfig,
    DistributedConfig,
    EvaluationConfig,
    FlowConfig,
    RetentionConfig,
    TrackersConfig,
)
from marin_rl.config.peers import closest
from marin_rl.config.policy import LoraConfig, MeshConfig, ModelConfig, ModelFamily, PolicyConfig
from marin_rl.config.sampling import (
    EntrySampling,
    EnvironmentConfig,
    LearnedRewardConfig,
    MixtureEntry,
    RolloutsConfig,
    SamplingConfig,
    whole_weights,
)
from marin_rl.config.section import (
    CodeName,
    Count,
    OneOrMany,
    Seconds,
    Section,
    content_fields,
    fingerprint_fields,
    is_runtime_only,
    omitted_if_none,
    section_of,
    with_choices,
)
from marin_rl.config.sections import (
    RUN_ID_PATTERN,
    WITHDRAWN,
    WITHDRAWN_CONTENT,
    differences,
    free_keys,
    known_keys,
    outward_keys,
    value_at,
    withdrawn_in,
    without,
)
from marin_rl.config.serving import (
    REGISTERED,
    EngineConfig,
    InferenceConfig,
    ServerConfig,
    split_labels,
)
from marin_rl.config.training import (
    BatchingConfig,
    CriticConfig,
    DistillationConfig,
    DivergenceConfig,
    FiltersConfig,
    PairTrainingConfig,
    PreferenceConfig,
    PreferenceLossConfig,
    RewardModelConfig,
    SFTConfig,
    TrainingConfig,
)

"""Teachers whose weights are here: a folder, a checkpoint, the run's own first checkpoint.

A teacher's arrays are on the first device, in `policy.compute_dtype`; its size and family are its
own. Sequences are scored in rows of one padded length by the program that also compares engines
with the trainer. Where the divergence to a teacher is a loss, the step runs it next to the policy.
Leaves out what is scored (`rollouts.teaching`).
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import padded
from marin_rl.compilation import device_array, set_matmul_precision
from marin_rl.models.families import described_folder
from marin_rl.models.module import LanguageModel
from marin_rl.models.spec import Spec
from marin_rl.rollouts.teaching import teacher_checkpoint
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.bradley_terry import by_length
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.logprobs import sequence_scores
from marin_rl.training.model import digest_of, named_parameters, with_parameters
from marin_rl.training.policy_source import read_policy
from marin_rl.training.state import check_restored, template_of


class LocalTeacher:
    """A teacher in memory: a `Teacher`. Thread safe."""

    def __init__(self, model: LanguageModel, identity: str, dtype: str) -> None:
        set_matmul_precision(dtype)
        cast = {name: device_array(a).astype(dtype) for name, a in named_parameters(model).items()}
        self.model, self.identity = with_parameters(model, cast), identity
        self._lock = threading.Lock()

    def score(
        self, sequences: Sequence[Int32[np.ndarray, " _"]], first: Sequence[int]
    ) -> list[Float32[np.ndarray, " _"]]:
        """Log-probabilities of each sequence's tokens from `first` on."""
        scores: list[Any] = [None] * len(sequences)
        with self._lock:
            for chunk, most, length in by_length(list(map(len, sequences))):
                # A power of two that holds the chunk: empty rows cost as much as full ones.
                rows = min(most, 1 << (len(chunk) - 1).bit_length())
                ids, inside = padded([sequences[index] for index in chunk], rows, length)
                mask = inside.copy()
                for row, index in enumerate(chunk):
                    mask[row, : first[index]] = False
                segments, scored = inside.astype(np.int32), mask.astype(np.int32)
                logprobs = np.asarray(sequence_scores(self.model, ids, segments, scored, 1.0))
                for row, index in enumerate(chunk):
                    scores[index] = logprobs[row, first[index] : len(sequences[index])]
        return scores


def teacher_spec(run: Run, tokenizer: PreTrainedTokenizerBase) -> Spec:
    """Description of a run's teacher whose weights are here. Raises as `local_teacher` does."""
    settings = run.config.distillation
    assert settings is not None, "the configuration names a teacher"
    if settings.folder is not None:
        return described_folder(settings.folder)
    source = run if settings.is_self else teacher_checkpoint(run)[0]
    return template_of(source.config.policy, tokenizer).spec


def local_teacher(run: Run, tokenizer: PreTrainedTokenizerBase) -> LocalTeacher:
    """The teacher of a run whose weights are here.

    Raises InputError for a folder that is unfit or a checkpoint of another tokenizer, ConfigError
    for one that is not committed, CorruptObject.
    """
    config, settings = run.config, run.config.distillation
    assert settings is not None, "the configuration names a teacher"
    if settings.folder is not None:
        model = load_hf(settings.folder)
        return LocalTeacher(model, digest_of(named_parameters(model)), config.policy.compute_dtype)
    source, ref = teacher_checkpoint(run)
    check_restored(source, ref, TokenizerIdentity.of(tokenizer))
    template = template_of(source.config.policy, tokenizer)
    policy = read_policy(source, ref, template)
    model = with_parameters(template, policy.parameters())
    return LocalTeacher(model, policy.digest, config.policy.compute_dtype)

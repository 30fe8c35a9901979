"""The teachers of a run: their files are checked, and each row finds its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nemo_like.algorithms.distillation.config import DistillRunConfig, teacher_key
from nemo_like.config.errors import ConfigError
from nemo_like.config.model_directory import model_directory
from nemo_like.config.optimization import LoraConfig
from nemo_like.config.schema import MAIN_SET
from nemo_like.data.rows import Rows
from nemo_like.models.pretrained import load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.training.model_files import open_model_config, open_model_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def resolve_teachers(config: DistillRunConfig) -> DistillRunConfig:
    """Return the config with the directories of the teachers; see `config.paths`."""
    found = {}
    for name, path in config.named_teachers.items():
        found[name] = model_directory(teacher_key(name), path, weights=True)
    # A single teacher has the name ''.
    return replace(
        config, distill=replace(config.distill, teacher=found.pop("", None), teachers=found)
    )


def open_teachers(
    config: DistillRunConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, ModelSpec]:
    """Check the files, the layout and the tokenizer of every teacher; return their sizes by name.

    `tokenizer` is the policy's. Raises ConfigError for a teacher that cannot be used.
    """
    specs = {}
    for name, path in config.named_teachers.items():
        key = teacher_key(name)
        # The policy's checks, for a model that is not trained and samples nothing.
        policy = replace(config.policy, model_name=path, lora=LoraConfig(), freeze=())
        as_policy = replace(
            config, policy=policy, distill=replace(config.distill, on_policy_fraction=0.0)
        )
        try:
            model_config = open_model_config(as_policy)
        except ConfigError as error:
            raise ConfigError(str(error).replace("policy.model_name", key)) from error
        try:
            own = load_tokenizer(model_directory(key, path, weights=False))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{key}: no tokenizer can be loaded from {path!r} ({error}); a teacher needs the"
                " files of its tokenizer, which must be equal to the policy's"
            ) from error
        problem = vocabulary_problem(tokenizer.get_vocab(), own.get_vocab())
        if problem is not None:
            raise ConfigError(
                f"{key}: the tokenizer of {path!r} differs from the policy's: {problem}. A student"
                " learns probabilities of token ids, so both need the same tokenizer: choose models"
                " of one family"
            )
        specs[name] = ModelSpec.from_config(model_config, path)
        _check_top_k(config, specs[name], key)
    return specs


def vocabulary_problem(policy: Mapping[str, int], teacher: Mapping[str, int]) -> str | None:
    """Describe the first difference of two vocabularies, or return None."""
    if policy == teacher:
        return None
    for token, index in sorted(policy.items(), key=lambda item: item[1]):
        other = teacher.get(token)
        if other != index:
            found = "no such token" if other is None else f"the id {other}"
            return f"token {token!r} has the id {index}, and {found} in the teacher's"
    return f"it has {len(teacher) - len(policy)} further tokens"


def _check_top_k(config: DistillRunConfig, teacher: ModelSpec, key: str) -> None:
    top_k = config.distill.top_k
    if top_k is None:
        return
    # Padding of the larger of both embeddings is not in the teacher's distribution.
    policy_size = open_model_spec(config).vocab_size
    if top_k >= min(teacher.vocab_size, policy_size):
        raise ConfigError(
            f"distill.top_k is {top_k}, but {key} has a vocabulary of {teacher.vocab_size} and the"
            f" policy one of {policy_size}; set it to null for the complete vocabulary"
        )


class TeacherOfRow:
    """Finds the teacher of the rows of a file, as an index of `DistillRunConfig.teacher_names`."""

    def __init__(self, config: DistillRunConfig, rows: Rows, name: str | None = None) -> None:
        """`name` is '' for `data.validation_path` and None for the training rows."""
        names = list(config.named_teachers)
        self._teachers: np.ndarray | None = None
        """Teacher of each set, int64 [S]; None for a single one."""
        self._first_rows = np.zeros(1, dtype=np.int64)
        """First row of each set, int64 [S]."""
        if len(names) == 1:
            return
        sets: tuple[str, ...] = (MAIN_SET,)
        if name is not None:
            sets = (name or MAIN_SET,)
        elif rows.mixture is not None:
            sets = rows.mixture.names
            sizes = np.array(rows.mixture.sizes, dtype=np.int64)
            self._first_rows = np.cumsum(sizes) - sizes
        self._teachers = np.array([names.index(each) for each in sets], dtype=np.int64)

    def index(self, row: int) -> int:
        """Return the teacher of a row."""
        if self._teachers is None:
            return 0
        position = np.searchsorted(self._first_rows, row, side="right") - 1
        return int(self._teachers[position])

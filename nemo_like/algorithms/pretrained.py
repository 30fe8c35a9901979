"""Opens configurations and tokenizers of Hugging Face models. No weights are loaded here.

transformers is imported on the first use: it takes more CPU time than everything else that checking a config needs.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_NOT_NEEDED = ("torch", "PIL")
"""Packages that transformers imports with configurations and tokenizers where they are installed."""


def import_transformers_without_torch() -> None:
    """Import transformers' configuration and tokenizer classes without importing torch.

    transformers imports torch wherever it is installed, which takes seconds of CPU time; neither class needs it. It
    decides once per process whether torch is available, so this process cannot load models afterwards: call this only
    in a process that ends without loading any. `import torch` itself works as before. Does nothing if torch or
    transformers is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    hidden = [name for name in _NOT_NEEDED if name not in sys.modules]
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers reports that models are not available
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # importlib reports None as not installed
    try:
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
        from transformers.utils.import_utils import is_torch_available

        assert not is_torch_available()
    finally:
        for name in hidden:
            del sys.modules[name]
        logging.disable(disabled)


def load_model_config(name: str, *, local_files_only: bool) -> PretrainedConfig:
    """The configuration of the model at a path or of a hub name. Raises OSError or ValueError as transformers does."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, local_files_only=local_files_only, trust_remote_code=False)


def load_tokenizer(name: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    """The tokenizer at a path or of a hub name. Raises OSError or ValueError as transformers does."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, local_files_only=local_files_only, trust_remote_code=False)

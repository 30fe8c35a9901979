"""The kinds of output head that a model can have."""

from __future__ import annotations

from typing import Literal

OutputHead = Literal["vocabulary", "scores"]
"""`vocabulary`: the output embedding of a language model. `scores`: one number per row, from the
last hidden state of its last token, as of a reward model.
"""

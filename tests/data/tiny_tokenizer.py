"""A tiny real tokenizer and chat templates in the manner of well-known models, for the tests of
this room.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import EncodedRow

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content +"
    " '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As SmolLM2 and Qwen2.5: a line break behind the end of the turn."""

LLAMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message.role + '<|/start|>\\n\\n'"
    " }}"
    "{{ message.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|/start|>\\n\\n' }}{% endif %}"
)
"""As Llama 3: the text is stripped, the end of a turn is not the eos token."""

THINKING = (
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' }}{% if loop.index0 > last.user %}{{"
    " '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%"
    " endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3: an assistant turn is written otherwise once it is no longer the last."""

OPENS_THINKING = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '<|User|>' +"
    " message.content }}"
    "{% elif message.role == 'assistant' %}{{ '<|Assistant|>' +"
    " message.content.split('</think>')[-1] + eos_token }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
"""As DeepSeek-R1: the generation prompt opens a thought that a finished turn does not show."""

GENERATION_BLOCKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role =="
    " 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As SmolLM3: the template itself marks the text of the assistant."""

NO_END_OF_TURN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""As a hand-written one: nothing but line breaks between turns."""

REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%"
    " endif %}"
    "{% for message in messages %}{{ message.role + message.content + eos_token }}{% endfor %}"
)
"""As Gemma."""

ENDS_CONVERSATION = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '<|/start|>' + message.content +"
    " '<|eot|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|/start|>' }}{% else %}{{ eos_token }}{%"
    " endif %}"
)
"""As Phi-3: the eos token ends the conversation, another token ends a turn."""

TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "thinking": THINKING,
    "opens_thinking": OPENS_THINKING,
    "generation_blocks": GENERATION_BLOCKS,
    "no_end_of_turn": NO_END_OF_TURN,
}

_SPECIAL = [
    *("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"),
    *("<|start|>", "<|/start|>", "<|eot|>", "<|User|>", "<|Assistant|>"),
]
_TEXTS = [
    "user assistant system What is two plus two? The answer is four. 1 + 2 = 3\n\n",
    "think about it: 12 34 56",
]


def tiny_tokenizer(
    chat_template: str | None = None, **tokens: str | None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges and the special tokens of the templates above."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_TEXTS, trainer)
    names: dict[str, str | None] = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", **tokens}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=chat_template,
        extra_special_tokens=_SPECIAL[2:],
        **{name: token for name, token in names.items() if token is not None},
    )


def space_marking_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """In the manner of SentencePiece: a space is part of the word behind it, and the very first
    word gets one.
    """
    core = Tokenizer(models.BPE(unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    core.decoder = decoders.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<|unk|>", *_SPECIAL], show_progress=False
    )
    core.train_from_iterator([*_TEXTS, "".join(map(chr, range(32, 127)))], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=chat_template,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        unk_token="<|unk|>",
    )


def marked_text(encoder: ChatEncoder, row: EncodedRow) -> str:
    """The decoded row with the trained parts between ⟦ and ⟧."""
    parts = encoder.segments(row)
    return "".join(f"⟦{text}⟧" if is_trained else text for text, is_trained in parts)

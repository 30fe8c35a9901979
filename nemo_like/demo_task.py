"""The task of `make demo`: adding two numbers, with a character-level tokenizer and a tiny model to
learn it.

A problem is `607+58`. A completion may show its working, from the ones on as digit + digit + carry
= sum, and ends with `#### ` and the answer:

    7+8+0=15
    0+5+1=06
    6+0+0=06
    #### 665

A model this small can learn the steps but not the sum at one go. Two in five of the supervised
completions show their working, so a supervised model answers most problems at once, and wrongly;
that working pays is left to reinforcement learning to find out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_SFT_ROWS = 20_000
NUM_GRPO_ROWS = 4_000
NUM_VALIDATION_ROWS = 200
MAX_DIGITS = 4
WORKED_SHARE = 0.4
"""Share of the supervised completions that show their working. Below one half, so that the likelier
answer does not.
"""

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
_CHARACTERS = "0123456789+=# \n"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + eos_token }}"
    "{% else %}{{ '<user>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum. Example: `Problem(607, 58)` has the prompt "607+58" and the answer "665"."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    def completion(self, *, is_worked: bool) -> str:
        """The answer after `#### `, with the column addition before it if `is_worked`."""
        return "\n".join([*(self._steps() if is_worked else ()), f"#### {self.answer}"])

    def _steps(self) -> Iterable[str]:
        num_columns = max(len(str(self.left)), len(str(self.right)))
        carry = 0
        for column in range(num_columns):
            left, right = self.left // 10**column % 10, self.right // 10**column % 10
            total = left + right + carry
            yield f"{left}+{right}+{carry}={total:02d}"
            carry = total // 10


def build_demo(directory: Path, seed: int) -> None:
    """Write the untrained model and the data, the same for the same seed; files of an earlier demo
    are replaced.

    `model/` is a Hugging Face directory with tokenizer and chat template; `sft_train.jsonl` has
    prompt and completion, `grpo_train.jsonl` prompt and answer, `validation.jsonl` all three. No
    validation prompt is in the training data.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    validation: dict[str, Problem] = {}
    while len(validation) < NUM_VALIDATION_ROWS:
        problem = _draw(rng, validation)
        validation[problem.prompt] = problem
    supervised = [_draw(rng, validation) for _ in range(NUM_SFT_ROWS)]
    reinforced = [_draw(rng, validation) for _ in range(NUM_GRPO_ROWS)]
    _write(
        directory / "sft_train.jsonl",
        (
            {"prompt": p.prompt, "completion": p.completion(is_worked=rng.random() < WORKED_SHARE)}
            for p in supervised
        ),
    )
    _write(
        directory / "grpo_train.jsonl",
        ({"prompt": p.prompt, "answer": p.answer} for p in reinforced),
    )
    _write(
        directory / "validation.jsonl",
        (
            {
                "prompt": p.prompt,
                "completion": p.completion(is_worked=rng.random() < WORKED_SHARE),
                "answer": p.answer,
            }
            for p in validation.values()
        ),
    )
    build_tokenizer().save_pretrained(directory / "model")
    build_model(seed).save_pretrained(directory / "model")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and the special tokens of the chat template."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """A Llama of 0.4 million parameters with weights drawn from `seed`; the global generator is
    left as it was.
    """
    config = LlamaConfig(
        vocab_size=len(_SPECIAL_TOKENS) + len(_CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.044,
        tie_word_embeddings=True,
        pad_token_id=_SPECIAL_TOKENS.index("<pad>"),
        bos_token_id=_SPECIAL_TOKENS.index("<bos>"),
        eos_token_id=_SPECIAL_TOKENS.index("<eos>"),
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _draw(rng: random.Random, held_out: Collection[str]) -> Problem:
    """A problem whose numbers have 1 to 4 digits, each count as likely, and whose prompt is not
    held out.
    """
    while True:
        left, right = (_draw_number(rng) for _ in range(2))
        problem = Problem(left, right)
        if problem.prompt not in held_out:
            return problem


def _draw_number(rng: random.Random) -> int:
    num_digits = rng.randint(1, MAX_DIGITS)
    smallest = 10 ** (num_digits - 1) if num_digits > 1 else 0
    return rng.randrange(smallest, 10**num_digits)


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

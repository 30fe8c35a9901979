"""The task of `make demo`: addition of two numbers, a character-level tokenizer and a tiny model.

A problem is `607+58`. A completion may show the column addition, from the ones on as digit + digit
+ carry = sum, and ends with `#### ` and the answer:

    7+8+0=15
    0+5+1=06
    6+0+0=06
    #### 665

A model this small can learn the steps but not the direct sum. Two in five of the supervised
completions show the steps, so after SFT the model answers most problems directly, and wrongly.
GRPO then increases the share of completions with steps.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_SFT_ROWS = 20_000
NUM_GRPO_ROWS = 4_000
NUM_DPO_ROWS = 1_000
NUM_VALIDATION_ROWS = 200
MAX_DIGITS = 4
WORKED_SHARE = 0.4
"""Share of the supervised completions with steps; below 1/2, so the greedy answer has none."""

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
        """Return the completion, with the steps of the column addition if `is_worked`."""
        lines = list(self._steps()) if is_worked else []
        lines.append(f"#### {self.answer}")
        return "\n".join(lines)

    def _steps(self) -> Iterator[str]:
        """Yield one line per column, from the ones on."""
        num_columns = max(len(str(self.left)), len(str(self.right)))
        carry = 0
        for column in range(num_columns):
            left = self.left // 10**column % 10
            right = self.right // 10**column % 10
            total = left + right + carry
            yield f"{left}+{right}+{carry}={total:02d}"
            carry = total // 10


def build_demo(directory: Path, seed: int) -> None:
    """Write the untrained model and the data, the same for the same seed.

    Files of an earlier demo are replaced.
    `model/` is a Hugging Face directory with tokenizer and chat template; `sft_train.jsonl` has
    prompt and completion, `grpo_train.jsonl` prompt and answer, `validation.jsonl` all three.
    `dpo_train.jsonl` and `dpo_validation.jsonl` have prompt, chosen and rejected;
    `text_train.jsonl` has the sums of `grpo_train.jsonl` as raw text. No validation prompt is in
    the training data.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    validation: dict[str, Problem] = {}
    # Validation first, so that the training problems can be drawn without it.
    while len(validation) < NUM_VALIDATION_ROWS:
        problem = _draw(rng, validation)
        validation[problem.prompt] = problem
    supervised = [_draw(rng, validation) for _ in range(NUM_SFT_ROWS)]
    reinforced = [_draw(rng, validation) for _ in range(NUM_GRPO_ROWS)]
    # The order of the random draws defines the data of a seed.
    sft_rows = [_supervised_row(problem, rng) for problem in supervised]
    grpo_rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in reinforced]
    validation_rows = []
    for problem in validation.values():
        validation_rows.append(_supervised_row(problem, rng) | {"answer": problem.answer})
    write_rows(directory / "sft_train.jsonl", sft_rows)
    write_rows(directory / "grpo_train.jsonl", grpo_rows)
    write_rows(directory / "validation.jsonl", validation_rows)
    texts = [{"text": f"{problem.prompt}={problem.answer}"} for problem in reinforced]
    write_rows(directory / "text_train.jsonl", texts)
    # Drawn last, so that the other files do not depend on them.
    dpo_problems = [_draw(rng, validation) for _ in range(NUM_DPO_ROWS)]
    write_rows(directory / "dpo_train.jsonl", [_preference_row(each, rng) for each in dpo_problems])
    dpo_validation = [_preference_row(problem, rng) for problem in validation.values()]
    write_rows(directory / "dpo_validation.jsonl", dpo_validation)
    build_tokenizer().save_pretrained(directory / "model")
    build_model(seed).save_pretrained(directory / "model")


def build_main(description: str, build: Callable[[Path, int], None], directory: str) -> None:
    """Write the files of a demo to `--directory`; the main function of its module."""
    parser = argparse.ArgumentParser(description=description)
    default = Path("runs") / directory
    parser.add_argument("--directory", type=Path, default=default, help="where to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and the model")
    arguments = parser.parse_args()
    build(arguments.directory, arguments.seed)
    print(f"wrote {description} to {arguments.directory}")


def build_tokenizer(
    characters: str = _CHARACTERS, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character and the tokens of the chat template.

    `words` are texts of one token each.
    """
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(list(words))
    return fast


def build_model(
    seed: int, vocab_size: int = len(_SPECIAL_TOKENS) + len(_CHARACTERS)
) -> LlamaForCausalLM:
    """Build a Llama of 0.4 million parameters with weights drawn from `seed`.

    The global random generator is not changed.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
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
    # The caller's random numbers must not depend on the demo.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _supervised_row(problem: Problem, rng: random.Random) -> dict[str, str]:
    is_worked = rng.random() < WORKED_SHARE
    return {"prompt": problem.prompt, "completion": problem.completion(is_worked=is_worked)}


def _preference_row(problem: Problem, rng: random.Random) -> dict[str, str]:
    """Return a pair: the steps with the answer, and a wrong answer without steps."""
    wrong = Problem(problem.left, problem.right + rng.randint(1, 9))
    return {
        "prompt": problem.prompt,
        "chosen": problem.completion(is_worked=True),
        "rejected": wrong.completion(is_worked=False),
    }


def _draw(rng: random.Random, excluded: Collection[str]) -> Problem:
    """Draw a problem whose prompt is not excluded; 1 to 4 digits are equally likely."""
    while True:
        left = _draw_number(rng)
        right = _draw_number(rng)
        problem = Problem(left, right)
        if problem.prompt not in excluded:
            return problem


def _draw_number(rng: random.Random) -> int:
    # The number of digits first: uniform numbers would nearly all have four digits.
    num_digits = rng.randint(1, MAX_DIGITS)
    smallest = 10 ** (num_digits - 1) if num_digits > 1 else 0
    return rng.randrange(smallest, 10**num_digits)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")

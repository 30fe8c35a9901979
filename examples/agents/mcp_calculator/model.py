"""The model of `demo_environments_sft` for calls of tools, and conversations for its training.

`python model.py <model> <conversations> <out>`. Its calls are `<tool>12*7</tool>`, and the result
is the next message. The names of the tools are new at the beginning of its prompts.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from transformers import AutoTokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<assistant>' }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool>' + call.function.arguments.expression + '</tool>' }}{% endfor %}"
    "{{ message.content + eos_token }}{% else %}{{ '<user>' + message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<tool>",
            "close": "</tool>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "calculate", "arguments": {"expression": "{content}"}},
            },
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}

if __name__ == "__main__":
    model, conversations, target = map(Path, sys.argv[1:])
    shutil.copytree(model, target / "model", dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    tokenizer.save_pretrained(target / "model")
    with (target / "sft_train.jsonl").open("w", encoding="utf-8") as file:
        for line in conversations.open(encoding="utf-8"):
            row = json.loads(line)
            # The others are games.
            if "*" in row["messages"][0]["content"]:
                file.write(json.dumps({**row, "tools": [TOOL]}) + "\n")

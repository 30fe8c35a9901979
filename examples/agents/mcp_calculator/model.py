"""Give the model of `demo_environments_sft` calls of tools: `python model.py <model> <out>`.

Its calls are `<tool>12*7</tool>`, and the result is the next message. The names of the tools are
new in its prompts: train it with `nemo-like sft` on rows with the column `tools` before GRPO.
"""

from __future__ import annotations

import shutil
import sys

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

if __name__ == "__main__":
    source, target = sys.argv[1:]
    shutil.copytree(source, target, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    tokenizer.save_pretrained(target)

"""Chat templates in the manner of well-known models that know tools, and of those without a
generation prompt.
"""

from __future__ import annotations

QWEN = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "{{ '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{"
    " '<|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content +"
    " '<|im_end|>\\n' }}{% endif %}"
    "{% set last = namespace(query=0) %}{% for message in messages %}{% if message.role == 'user'"
    " %}"
    "{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content if message.content is string"
    " else '' %}"
    "{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{% elif message.role == 'assistant' %}"
    "{% set thought = message.reasoning_content if message.reasoning_content is string else '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')"
    " %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{"
    " '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > last.query and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else"
    " %}{{ content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{% if (loop.first and content) or not loop.first"
    " %}{{ '\\n' }}{% endif %}"
    "{% if call.function %}{% set call = call.function %}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{"
    " '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%"
    " endif %}"
    "{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif"
    " %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3: thoughts of the turns behind the last question, results of tools in a user's turn."""

LLAMA_TOOLS = (
    "{{ bos_token }}{% if tools %}{{ '<|start|>system<|/start|>\\n\\n' }}{% for tool in tools %}{{"
    " tool | tojson }}{% endfor %}"
    "{{ '<|eot|>' }}{% endif %}{% for message in messages %}"
    "{{ '<|start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|/start|>\\n\\n'"
    " }}"
    "{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}{{"
    " raise_exception('one call only') }}{% endif %}"
    '{{ \'{"name": "\' + message.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ message.tool_calls[0].function.arguments | tojson + '}' }}"
    "{% elif message.role == 'tool' %}{{ message.content | tojson }}{% else %}{{ message.content |"
    " trim }}{% endif %}"
    "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|start|>assistant<|/start|>\\n\\n' }}{% endif %}"
)
"""As Llama 3.1: a call replaces the text of a turn, results are written as JSON strings."""

R1_TOOLS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '<|User|>' +"
    " message.content }}"
    "{% elif message.role == 'tool' %}{{ '<|User|>tool:' + message.content }}"
    "{% elif message.role == 'assistant' %}{{ '<|Assistant|>' }}{% if message.tool_calls %}{{"
    " message.content }}"
    "{% for call in message.tool_calls %}{{ 'call:' + call.function.name + '\\n```json\\n' }}"
    "{{ call.function.arguments + '\\n```' }}{% endfor %}"
    "{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
"""As DeepSeek-R1: the arguments of a call are text."""

MISTRAL = (
    "{{ bos_token }}{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system'"
    " else '' %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% if loop.last and tools %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (system if loop.last or loop.index0 == messages | length - 2 else '') +"
    " message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}{% endif"
    " %}{% endfor %}"
)
"""As Mistral: no generation prompt; tools and the system's text stand before the last question."""

GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{"
    " raise_exception('no system') }}{% endif %}"
    "{{ '<|start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' +"
    " message.content | trim }}"
    "{{ '<|eot|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>model\\n' }}{% endif"
    " %}"
)
"""As Gemma."""

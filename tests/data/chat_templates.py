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

COMMAND = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message.role + '<|/start|>' }}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}"
    "{% else %}{{ message.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|/start|><|im_start|>' }}{% endif %}"
)
"""As Command R and Aya: a token that closes the text is followed by eos, which ends every turn."""

COMMAND_TOOLS = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<|start|>' + message.role + '<|/start|>' }}"
    "{% if message.tool_calls %}{{ message.content or '' }}{% for call in message.tool_calls %}"
    "{{ '\\nAction: ' + call.function.name + (call.function.arguments | tojson) + '\\n' }}"
    "{% endfor %}{% else %}{{ message.content + '<|eot|>' }}{% endif %}{% endfor %}"
    "{{ '<|start|>system<|/start|>Write an action.<|eot|>' }}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|/start|>' }}{% endif %}"
)
"""As Command R with tools: an instruction ends the conversation, and no token ends a call."""

ALWAYS_OPEN = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<|start|>' + message.role + '<|/start|>' }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '<|im_start|>' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}{% elif message.role == 'assistant' %}{{ message.content + '<|eot|>' }}"
    "{% else %}{{ message.content }}{% endif %}{{ eos_token + '\\n' }}{% endfor %}"
    "{{ '<|start|>assistant<|/start|>' }}"
)
"""As Command R7B: the generation prompt is always there, calls and texts are closed differently."""

GPT_OSS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}{% set later = namespace(text=0) %}"
    "{% for other in messages[loop.index:] %}{% if other.role == 'assistant' and not"
    " other.tool_calls %}{% set later.text = 1 %}{% endif %}{% endfor %}"
    "{% if message.content and not later.text %}"
    "{{ '<|start|>assistant analysis<|/start|>' + message.content + '<|eot|>' }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=' + call.name + '<|/start|>' + (call.arguments | tojson) +"
    " '<|im_end|>' }}"
    "{% elif message.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{{ '<|start|>assistant final<|/start|>' + message.content + eos_token }}"
    "{% else %}{{ '<|start|>' + message.role + ' final<|/start|>' + message.content + '<|eot|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""As gpt-oss: another token ends the last turn than an earlier one, and another a call; the text
beside a call is a thought, which is dropped once there is a later answer.
"""

HEADER_AFTER_RESULT = (
    "{% set last = namespace(tool=false) %}{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ '<result>' + message.content + '</result>' }}"
    "{% set last.tool = true %}{% elif message.role == 'assistant' and message.tool_calls %}"
    "{{ '<|Assistant|>' + (message.content or '') }}{% for call in message.tool_calls %}"
    "{{ 'call:' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}"
    "{{ eos_token }}{% set last.tool = false %}{% elif message.role == 'assistant' %}"
    "{{ ('' if last.tool else '<|Assistant|>') + message.content + eos_token }}"
    "{% set last.tool = false %}{% else %}{{ '<|User|>' + message.content }}"
    "{% set last.tool = false %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not last.tool %}{{ '<|Assistant|>' }}{% endif %}"
)
"""As DeepSeek-V3: an answer after a result has no header, but a call after a result has one."""

TEXT_AFTER_RESULT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
    "{% elif message.role == 'assistant' and message.tool_calls %}{{ '<|start|>model\\n' }}"
    "{% set call = message.tool_calls[0].function %}"
    "{{ 'call:' + call.name + (call.arguments | tojson) }}"
    "{% if not loop.last %}{{ 'result:' + messages[loop.index].content }}{% endif %}"
    "{{ (message.content or '') + '<|eot|>\\n' }}{% else %}"
    "{{ '<|start|>' + message.role + '\\n' + message.content + '<|eot|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>model\\n' }}{% endif %}"
)
"""As Gemma 4: the result of a call stands within the turn of the call, before the turn's text."""

MISTRAL_TOOLS = (
    "{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
    "{% set turns = namespace(count=0) %}{% for message in messages %}"
    "{% if message.role != 'tool' and not message.tool_calls %}"
    "{% if (message.role == 'user') != (turns.count % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turns.count = turns.count + 1 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% if tools and message == questions[-1] %}"
    "{{ '[TOOLS] ' + (tools | tojson) + '[/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + message.content + ' [/INST]' }}{% elif message.tool_calls %}"
    "{{ '[CALLS] ' + (message.tool_calls[0].function | tojson) + eos_token }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
    "{% else %}{{ '[RESULT] ' + message.content + '[/RESULT]' }}{% endif %}{% endfor %}"
)
"""As Mistral with tools: tools stand before the last question, roles alternate but for calls."""

RESULT_NEEDS_CALL = (
    "{% for m in messages %}{% if m.role == 'tool' and not"
    " (messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool') %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A result that does not follow a call is refused."""

RESULT_NAMES_CALL = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|/start|>' }}"
    "{% if m.role == 'tool' %}{% set before = namespace(call=none) %}"
    "{% for call in messages[loop.index0 - 1].tool_calls or [] %}"
    "{% if call.id == m.tool_call_id %}{% set before.call = call %}{% endif %}{% endfor %}"
    "{{ '[' + before.call.function.name + '] ' }}{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + (call.function.arguments | tojson)"
    " }}{% endfor %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|/start|>' }}{% endif %}"
)
"""A result is written with the name of the function that was called."""

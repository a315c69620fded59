"""The constructs of published families' templates render as transformers renders them.

Each template is written anew, as small as it can be, from what the family's own template uses: so
a renderer that lacks a construct fails here under the name of the family that needs it.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lmi.chats.template import ChatTemplate
from lmi.errors import InvalidRequest
from lmi.types import Chat
from tests.text.small_tokenizers import byte_level_backend

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {
    "city": "Zürich",
    "days": 2,
    "items": ["<rain>", 0.5],
    "exact": False,
    "unit": None,
    "limit": 1e20,
}
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " You are terse. "},
    {"role": "user", "content": "Weather in Zürich?\n"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Look it up.",
        "tool_calls": [CALL],
    },
    {"role": "tool", "name": "get_weather", "tool_call_id": "abc123def", "content": "7.5 & it's"},
    {"role": "assistant", "content": "<think>\nIt's warm\n</think>\n\n7.5 degrees & rain."},
    {"role": "user", "content": "And <b>tomorrow</b>?"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather,\n\nas it's <told> in Zürich",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "Bern"]},
                    "days": {"type": ["integer", "null"], "default": 1, "minimum": 0.5},
                    "items": {"type": "array", "items": {"type": "string"}},
                    "place": {
                        "type": "object",
                        "properties": {"name": {"type": "string", "description": "a\nb"}},
                        "required": ["name"],
                    },
                },
                "required": ["city"],
            },
        },
    }
]
VARIABLES = {"enable_thinking": False, "reasoning_effort": "low", "thinking_budget": 600}

FAMILIES = {
    "Llama 2": """
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages if message.role in ('user', 'assistant') %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}""",
    "Llama 3.1": """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}{%- set first = messages[1]['content'] | trim %}
    {%- else %}{{- raise_exception("no first user message") }}{%- endif %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- message['role'] + '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' ~ arg_val ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- tool_call.arguments | tojson }}{{- "}" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}""",
    "Llama 4": """
{%- for message in messages %}
{%- if message.content is string %}{{- message['content'] }}
{%- else %}{%- for content in message['content'] %}
{%- if content['type'] == 'image' %}{{- '<|image|>' }}
{%- elif content['type'] == 'text' %}{{- content['text'] | trim }}{%- endif %}
{%- endfor %}{%- endif %}
{%- if 'tool_calls' in message and message.tool_calls | length > 0 %}
{%- for tool_call in message.tool_calls %}
{{- '[' + tool_call.function.name + '(' -}}
{%- for param in tool_call.function.arguments %}
{{- param ~ '=' ~ tool_call.function.arguments[param] }}
{%- if not loop.last %}, {% endif %}{%- endfor %}{{- ')]' -}}
{%- endfor %}{%- endif %}{{- "<|eot|>" }}{%- endfor %}""",
    "Mistral 7B v0.3": """
{%- set loop_messages = messages[1:] %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set spoken = loop_messages | rejectattr("role", "equalto", "tool") %}
{%- for message in spoken | selectattr("tool_calls", "undefined") %}
{{- loop.index0 }}{{- message.role }}{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message["role"] == "user" and tools is not none and message == user_messages[-1] %}
{{- "[AVAILABLE_TOOLS] [" }}
{%- for tool in tools %}{%- set tool = tool.function %}
{%- for key, val in tool.items() if key != "return" %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
{%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
{%- if not loop.last %}{{- ", " }}{%- endif %}
{%- endfor %}{%- endfor %}{{- "]" }}
{%- elif message.tool_calls is defined %}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{- ', "id": "' + tool_call.id + '"}' }}{%- endfor %}
{%- elif message.role == "tool" %}
{%- if message.content is defined and message.content.content is defined %}
{%- set content = message.content.content %}
{%- else %}{%- set content = message.content %}{%- endif %}
{{- '{"content": ' + content | string + '}' }}
{%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}{%- endfor %}""",
    "Mistral Small 3": """
{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system_message = "Today is " + today + ".\\n\\nWrite \\"well\\"." %}
{{- bos_token }}{{- default_system_message }}
{%- for message in messages %}
{%- if message['role'] == 'user' and message['content'] is not string %}
{%- for block in message['content'] | sort(attribute="type", reverse=True) %}
{{- block['text'] }}{%- endfor %}
{%- elif message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message.content %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}""",
    "Mixtral": """
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] not in ['system', 'tool'] %}
{{ ' ' ~ message['content'] ~ (eos_token if not loop.last) }}{% endif %}{% endfor %}""",
    "Qwen1.5": """
{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content']}}
{% if (loop.last and add_generation_prompt) or not loop.last %}
{{ '<|im_end|>' + '\\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}<|im_start|>{% endif %}""",
    "Qwen2.5": """
{%- if tools %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n{\\"name\\": <function-name>}\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "assistant" and not message.tool_calls) or message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}
            {{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}""",
    "Qwen3": """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{{- ns.last_query_index }}
{%- for message in messages if message.role == "assistant" %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning_content = '' %}
    {%- if message.reasoning_content is string %}
        {%- set reasoning_content = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set before = content.split('</think>')[0].rstrip('\\n') %}
        {%- set reasoning_content = before.split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n' }}{%- endif %}""",
    "Qwen3-Coder": """
{%- macro render_extra_keys(json_dict, handled_keys) %}
    {%- if json_dict is mapping %}
        {%- for json_key in json_dict if json_key not in handled_keys %}
            {%- if json_dict[json_key] is mapping or (json_dict[json_key] is sequence
                and json_dict[json_key] is not string) %}
                {{- '\\n<' ~ json_key ~ '>' ~ (json_dict[json_key] | tojson | safe) }}
            {%- else %}{{- '\\n<' ~ json_key ~ '>' ~ (json_dict[json_key] | string) }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for tool in tools %}
    {%- set tool = tool.function %}
    {%- if tool.description is defined %}{{- tool.description | trim }}{%- endif %}
    {%- for param_name, param_fields in tool.parameters.properties | items %}
        {{- param_name ~ param_fields.type | string }}
        {{- render_extra_keys(param_fields, ['name', 'type']) }}
    {%- endfor %}
    {{- render_extra_keys(tool.parameters, ['type', 'properties']) }}
{%- endfor %}""",
    "Qwen2-VL": """
{%- set image_count = namespace(value=0) %}
{%- for message in messages %}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for content in message.content %}
{%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
{%- set image_count.value = image_count.value + 1 %}
{%- if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|image_pad|>
{%- elif 'text' in content %}{{- content.text }}{%- endif %}
{%- endfor %}{%- endif %}<|im_end|>
{% endfor -%}""",
    "DeepSeek V2": """
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}
{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
    "DeepSeek R1": """
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' + message['content'] }}
{%- set ns.is_tool = false -%}
{%- else %}{% set content = message['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{ '<｜Assistant｜>' + content + eos_token }}{%- endif %}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}
{{ '<｜tool▁outputs▁begin｜>' + message['content'] }}{%- set ns.is_output_first = false %}
{%- endif %}{%- endif %}{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}""",
    "DeepSeek V3.1": """
{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined
    and message['tool_calls'] is not none %}
{%- for tool in message['tool_calls'] %}
{%- set formatted_args = tool['function']['arguments'] if tool['function']['arguments'] is string
    else tool['function']['arguments'] | tojson %}
{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + formatted_args }}
{%- endfor %}{%- elif message['prefix'] is defined and message['prefix'] and thinking %}<think>
{%- else %}{%- set content = message['content'] or '' -%}
{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}
{{- content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor -%}""",
    "DeepSeek V3.2": """
{%- set dsml_token = "｜DSML｜" -%}
{%- set last_user_index = namespace(value=-1) -%}
{%- for msg in messages -%}{%- if msg.role in ["user", "developer"] -%}
{%- set last_user_index.value = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- macro encode(tool_call) -%}
{%- for key, value in tool_call.function.arguments.items() -%}
{%- if not loop.first -%}{{ "\\n" }}{%- endif -%}
<{{ dsml_token }} name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">
{{ value if value is string else (value | tojson(ensure_ascii=False)) }}
{%- endfor -%}{%- endmacro -%}
{%- for message in messages -%}
{%- set msg_index = loop.index0 -%}
{%- if message.role == "tool" -%}
{%- set prev = namespace(value=-1) -%}
{%- for i in range(msg_index - 1, -1, -1) -%}
{%- if messages[i].role != "tool" and prev.value == -1 -%}{%- set prev.value = i -%}{%- endif -%}
{%- endfor -%}
{%- set call_order = msg_index - prev.value -%}
{%- if call_order == (messages[prev.value].get('tool_calls', []) | length) -%}
{{ "\\n" }}</function_results>{{ last_user_index.value }}{%- endif -%}
{%- elif message.get('tool_calls') -%}
{%- for tool_call in message.tool_calls -%}{{- encode(tool_call) -}}{%- endfor -%}
{%- else -%}{{ message.get('content', '') }}{{ message.get('reasoning_content', '') }}
{%- endif -%}{%- endfor -%}""",
    "Gemma 2": """
{{ bos_token }}{% for message in messages if message.role != 'tool' %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "Gemma 3": """
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {{ message.role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}
    {%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}""",
    "Gemma 4": """
{%- macro format_parameters(properties, required) -%}
    {%- set standard_keys = ['type', 'nullable'] -%}
    {%- set ns = namespace(found_first=false) -%}
    {%- for key, value in properties | dictsort -%}
        {%- if key not in standard_keys -%}
            {%- if ns.found_first %},{% endif -%}{%- set ns.found_first = true -%}
            {{ key }}:{
            {%- set value_type = value['type'] if value['type'] is string else value['type'][0] -%}
            {%- if value['enum'] -%}enum:{{ format_argument(value['enum']) }}{%- endif -%}
            {%- if value_type | upper == 'OBJECT' and value['properties'] is mapping -%}
                {{- format_parameters(value['properties'], value['required'] | default([])) -}}
            {%- elif value_type | upper == 'ARRAY' and value['items'] is mapping -%}
                {{- value['items'] | dictsort | map('last') | map('upper') | list -}}
            {%- endif -%}
            type:<|"|>{{ value_type | upper }}<|"|>}
        {%- endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- macro format_argument(argument, escape_keys=True) -%}
    {%- if argument is string -%}{{- '<|"|>' + argument + '<|"|>' -}}
    {%- elif argument is boolean -%}{{- 'true' if argument else 'false' -}}
    {%- elif argument is mapping -%}{{- '{' -}}
        {%- for key, value in argument | dictsort -%}
            {{- '<|"|>' + key + '<|"|>' if escape_keys else key -}}
            :{{- format_argument(value, escape_keys=escape_keys) -}}
            {{- ',' if not loop.last -}}
        {%- endfor -%}{{- '}' -}}
    {%- elif argument is sequence -%}{{- '[' -}}
        {%- for item in argument -%}{{- format_argument(item, escape_keys=escape_keys) -}}
        {%- endfor -%}{{- ']' -}}
    {%- else -%}{{- argument -}}{%- endif -%}
{%- endmacro -%}
{%- macro strip_thinking(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('</think>') -%}
        {%- if '<think>' in part -%}
            {%- set ns.result = ns.result + part.split('<think>')[0] -%}
        {%- else -%}{%- set ns.result = ns.result + part -%}{%- endif -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{%- set params = tools[0]['function']['parameters'] -%}
{{- format_parameters(params['properties'], params['required']) | trim -}}
{{- format_argument(messages[2]['tool_calls'][0]['function']['arguments'], escape_keys=False) -}}
{{- strip_thinking(messages[4]['content']) -}}
{%- if not enable_thinking | default(false) -%}<|channel>{%- endif -%}""",
    "Phi-3": """
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "Phi-4-mini": """
{%- for message in messages %}
{%- if message['role'] == 'system' and tools is not none %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + (tools | tojson) }}
{%- else %}{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}{%- endif %}
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}
{%- for call in message['tool_calls'] %}{%- if call.function is defined %}
{%- set call = call.function %}{%- endif %}
{{- '[{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson(ensure_ascii=True) }}
{%- endfor %}{%- endif %}{%- endfor %}""",
    "Command R": """
{%- macro json_to_python_type(json_type) %}
    {%- set basic_type_map = {"string": "str", "number": "float", "boolean": "bool"} %}
    {%- if json_type is string and json_type in basic_type_map %}{{- basic_type_map[json_type] }}
    {%- elif json_type is iterable and json_type is not string %}{{- 'Union' ~ json_type }}
    {%- else %}{{- "List[" ~ json_type ~ "]" }}{%- endif %}
{%- endmacro %}
{%- macro old_tool_parser(tools) %}
    {%- for tool in tools %}
        {%- if loop.index0 != 0 %}{{- '\\n\\n' }}{%- endif %}
        {{- '```python\\ndef ' + tool.function.name + '(' }}
        {%- for name, fields in tool.function.parameters.properties | items %}
            {%- if loop.index0 != 0 %}{{- ', ' }}{%- endif %}
            {{- name + ': ' }}{{- json_to_python_type(fields.type) }}
            {%- if name not in tool.function.parameters.required %} = None{%- endif %}
        {%- endfor %}{{- ')' }}
    {%- endfor %}
{%- endmacro %}
{%- for message in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex0 }}
{{ message['content'].strip() }}{%- endfor %}
{{- old_tool_parser(tools) }}""",
    "Command R7B": """
{%- macro tool_call_id_to_int(messages, tool_call_id) %}
{%- set counter = namespace(value=0) %}{%- set seen = namespace(value=false) %}
{%- for msg in messages %}{%- if msg.tool_calls %}{%- for tool_call in msg.tool_calls %}
{%- if tool_call.id == tool_call_id and not seen.value -%}{{ counter.value }}
{%- set seen.value = true %}{%- endif %}{%- set counter.value = counter.value + 1 %}
{%- endfor %}{%- endif %}{%- endfor %}
{%- endmacro %}
{%- set tool_ids_seen = namespace(value=[]) %}
{%- for message in messages %}
{%- if message.role | lower == 'tool' and message.tool_call_id not in tool_ids_seen.value %}
"tool_call_id": "{{ tool_call_id_to_int(messages, message.tool_call_id) }}"
{%- for msg in messages[loop.index0 + 1:] %}
{%- if msg.role | lower == 'tool' %},
{%- set tool_ids_seen.value = tool_ids_seen.value + [msg.tool_call_id] %}
{%- else %}{{ msg.content | tojson }}{%- break %}{%- endif %}{%- endfor %}
{%- elif message.role | lower == 'system' and not (loop.first and developer_preamble) %}
{{ message.content }}{%- endif %}{%- endfor %}
{% if documents %}{% for doc in documents %}{{ doc | tojson }}{% endfor %}{% endif %}""",
    "Granite 3": """
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + ".\\n" %}
{%- if tools and documents %}{%- set system_message = system_message + " Tools." %}{%- endif %}
{%- set loop_messages = messages %}{%- endif %}
{{- system_message }}
{%- if documents %}{%- for document in documents %}
{{- 'Document ' + loop.index0 | string + '\\n' }}{%- endfor %}{%- endif %}
{%- for message in loop_messages %}
{{- '<|role|>' + message['role'] + '\\n' + message['content'] + '<|end_of_text|>\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}
{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{%- endif %}
{%- endfor %}{{ tools | tojson(indent=4) }}""",
    "Hermes 2 Pro": """
{%- macro json_to_python_type(json_spec) %}
{%- set basic_type_map = {"string": "str", "integer": "int", "boolean": "bool"} %}
{%- if basic_type_map[json_spec.type] is defined %}{{- basic_type_map[json_spec.type] }}
{%- elif json_spec.type == "array" %}
{{- "list[" + json_to_python_type(json_spec['items']) + "]" }}
{%- elif json_spec.type == "object" %}
{%- if json_spec.additionalProperties is defined %}dict[str, Any]{%- else %}dict{%- endif %}
{%- elif json_spec.type is iterable and json_spec.type is not string %}Union[
{%- for t in json_spec.type %}{{- json_to_python_type({"type": t}) }}
{%- if not loop.last %}{{- "," }}{%- endif %}{%- endfor %}]
{%- else %}Any{%- endif %}
{%- endmacro %}
{%- for tool in tools %}
{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
{%- for name, field in tool.parameters.properties | items %}
{{- name + ": " + json_to_python_type(field) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
{%- endfor %}{{- tool.parameters | tojson }}{%- endfor %}
{%- for message in messages %}{%- if message.role == "tool" %}
{%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
{{- message.content }}{%- if not loop.last %}{{- '\\n</tool_response>\\n' }}{%- endif %}
{%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}{%- endif %}
{%- endif %}{%- endfor %}""",
    "Functionary": """
{%- macro append_new_param_info(param_declaration, comment_info, examples_info, depth) -%}
{%- set offset = "" -%}{%- if depth >= 1 -%}{%- set offset = "    " * depth -%}{%- endif -%}
{%- if comment_info != "<|NONE|>" -%}{{ "\\n" + offset + comment_info }}
{%- if examples_info | length > 0 -%}{%- for example in examples_info -%}
{{ "\\n" + offset + "// " + example | string | replace("'", '"') }}{%- endfor -%}{%- endif -%}
{%- endif -%}{{ "\\n" + offset + param_declaration }}
{%- endmacro -%}
{%- for name, param in tools[0].function.parameters.properties.items() recursive -%}
{%- set info = "// " + param.description if param.description is defined else "<|NONE|>" -%}
{{ append_new_param_info(name ~ ': ' ~ param.type, info, param.enum or [], loop.depth) }}
{%- if param.properties is defined -%}{{ loop(param.properties.items()) }}{%- endif -%}
{%- endfor -%}
{%- for message in messages %}{%- if message['role'] == 'tool' -%}
{{ message['name'] + '\\n' + message['content'] + '<|eot_id|>' }}{%- endif -%}{%- endfor -%}""",
    "gpt-oss": """
{%- macro render_typescript_type(param_spec, required_params, is_nullable=false) -%}
{%- if param_spec.type == "array" -%}
{%- if param_spec['items'] -%}
{{- render_typescript_type(param_spec['items'], required_params) + "[]" }}
{%- else -%}{{- "any[]" }}{%- endif -%}
{%- elif param_spec.type is defined and param_spec.type is iterable
    and param_spec.type is not string and param_spec.type[0] is defined -%}
{{- param_spec.type | join(" | ") }}
{%- elif param_spec.enum -%}{{- '"' + param_spec.enum | join('" | "') + '"' -}}
{%- elif param_spec.type == "object" -%}{{- "{\\n" }}
{%- for prop_name, prop_spec in param_spec.properties.items() -%}
{{- prop_name -}}{%- if prop_name not in (param_spec.required or []) -%}{{- "?" }}{%- endif -%}
{{- ": " }}{{ render_typescript_type(prop_spec, param_spec.required or []) }}{%- endfor -%}
{{- "}" }}{%- else -%}{{- param_spec.type }}{%- endif -%}
{%- endmacro -%}
{%- macro build_system_message() -%}
{%- if model_identity is not defined %}{%- set model_identity = "You are ChatGPT." %}{%- endif %}
{{- model_identity + "\\n" }}{{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{{- "Reasoning: " + reasoning_effort + "\\n\\n" }}
{%- endmacro -%}
{{- build_system_message() }}
{%- for name, spec in tools[0].function.parameters.properties.items() %}
{{- name + ": " + render_typescript_type(spec, []) }}
{%- if spec.default is defined %}{{- ", // default: " + spec.default | tojson }}{%- endif %}
{%- endfor %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages -%}
{%- if "thinking" in message and message.thinking is not none %}{{- message.thinking }}
{%- elif "tool_calls" in message %}{%- set tool_call = message.tool_calls[0].function %}
{{- "to=functions." + tool_call.name + " " + (tool_call.content_type if tool_call.content_type
    is defined else "json") + "<|message|>" }}{{- tool_call.arguments | tojson }}
{%- set last_tool_call.name = tool_call.name %}
{%- elif message.role == "tool" %}
{%- if last_tool_call.name is none %}{{- raise_exception("no call") }}{%- endif %}
{{- last_tool_call.name + " to=assistant" + message.content | tojson }}{%- endif -%}
{%- endfor -%}""",
    "Kimi K2": """
{%- macro render_content(msg) -%}
    {%- set c = msg.get('content') -%}
    {%- if c is string -%}{{ c }}
    {%- elif c is not none -%}
        {% for content in c -%}
            {% if content['type'] == 'image' or 'image' in content -%}<|media_begin|>
            {% else -%}{{ content['text'] }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{% macro set_roles(message) -%}
  {%- set role_name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}<|im_user|>{{role_name}}<|im_middle|>
  {%- else -%}<|im_system|>{{role_name}}<|im_middle|>{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for idx in range(messages|length - 1, -1, -1) -%}
    {%- if messages[idx]['role'] == 'assistant' and not messages[idx].get('tool_calls') -%}
        {%- set ns.last = idx -%}{%- break -%}
    {%- endif -%}
{%- endfor -%}
{%- set hist_msgs = messages[:ns.last+1] -%}
{%- set suffix_msgs = messages[ns.last+1:] -%}
{{ tools | tojson(separators=(',', ':')) }}
{%- for message in hist_msgs -%}{{ set_roles(message) }}{{ render_content(message) }}
  {%- if message.get('tool_calls') -%}{% for tool_call in message['tool_calls'] %}
  {%- set formatted_id = tool_call['id'] -%}{{ formatted_id }}<|tool_call_argument_begin|>
  {%- endfor -%}{%- endif -%}
{%- endfor -%}{{ suffix_msgs | length }}""",
    "Kimi K3": """
{%- macro escape_attr(value) -%}
{{- value|string|replace('&', '&amp;')|replace('"', '&quot;') -}}
{%- endmacro -%}
{%- macro open_tag(tag, attrs=[]) -%}
{{- '<|open|>' + tag -}}
{%- for attr in attrs -%}{{- ' ' + attr[0] + '="' -}}{{- escape_attr(attr[1]) -}}{{- '"' -}}
{%- endfor -%}
{%- endmacro -%}
{%- macro json_sorted(value) -%}
{%- if value is mapping -%}{{- '{' -}}
{%- for key, item in value|dictsort -%}{%- if not loop.first -%}{{- ',' -}}{%- endif -%}
{{- key|tojson(ensure_ascii=false) -}}{{- ':' -}}{{- json_sorted(item) -}}
{%- endfor -%}{{- '}' -}}
{%- elif value is string or value is number or value is boolean or value is none -%}
{{- value|tojson(ensure_ascii=false) -}}
{%- else -%}{{- '[' -}}{%- for item in value -%}{{- json_sorted(item) -}}{%- endfor -%}{{- ']' -}}
{%- endif -%}
{%- endmacro -%}
{%- macro count(state) -%}{%- set state.index = state.index + 1 -%}{%- endmacro -%}
{%- set state = namespace(index=0, tool_calls=none) -%}
{{- json_sorted(tools) -}}
{%- for message in messages -%}
{%- set attrs = [('role', message.role)] -%}
{%- if message.get('name') -%}{%- set attrs = attrs + [('name', message.name)] -%}{%- endif -%}
{{- open_tag('message', attrs) -}}{{- count(state) -}}
{%- for tool_call in message.get('tool_calls') or [] -%}
{%- if tool_call is not mapping -%}{{- raise_exception('must be mappings') -}}{%- endif -%}
{%- for key, value in tool_call.function.get('arguments', {}).items() -%}
{{- open_tag('argument', [('key', key), ('index', loop.index)]) -}}
{{- value if value is string else value|tojson(ensure_ascii=false) -}}
{%- endfor -%}{%- endfor -%}{%- endfor -%}{{- state.index -}}""",
    "GLM-4.5": """
[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking
    and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
{%- if m.tool_calls %}{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}""",
    "ChatGLM 2": """
{%- set counter = namespace(index=0) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{- '[Round ' + counter.index|string + ']\\n问：' + message['content'] -}}
        {%- set counter.index = counter.index + 1 -%}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{- '\\n答：' + message['content'] -}}
        {%- if (loop.last and add_generation_prompt) or not loop.last -%}{{- '\\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}""",
    "MiniMax M2": """
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- macro render_tool_namespace(namespace_name, tool_list) -%}
{%- for tool in tool_list -%}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}
{%- endmacro -%}
{%- set conversation_messages = messages[1:] if messages and messages[0].role == 'system'
    else messages -%}
{%- set ns = namespace(last_user_index=-1) %}
{% for m in conversation_messages %}
    {%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}
{%- endfor %}
{{- ']~!b[' ~ ']~b]system' ~ '\\n' }}
{%- if tools -%}{{- '\\n' ~ render_tool_namespace("functions", tools) ~ '</tools>' }}{%- endif -%}
{%- set last_tool_call = namespace(name=none) -%}
{%- for message in conversation_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- set content = message.content -%}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].strip('\\n') %}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls -%}
            {%- for k, v in tool_call.function.arguments.items() %}
                {{- '<parameter name="' + k + '">' }}
                {{- v | tojson(ensure_ascii=False) if v is not string else v }}
            {%- endfor -%}
            {%- set last_tool_call.name = tool_call.function.name -%}
        {%- endfor -%}
    {%- elif message.role == 'tool' and last_tool_call.name is none -%}
        {{- raise_exception("no previous assistant message with a tool call!") }}
    {%- endif -%}
{%- endfor -%}{{ ns.last_user_index }}""",
    "Seed-OSS": """
{%- set budget_reflections = {
     0: 0,
     512: 128,
     1024: 256
} -%}
{%- set ns = namespace(interval = None) -%}
{%- for k, v in budget_reflections | dictsort -%}
    {%- if ns.interval is none and thinking_budget <= k -%}{%- set ns.interval = v -%}{%- endif -%}
{%- endfor -%}
{%- if ns.interval is none -%}{%- set ns.interval = budget_reflections[1024] -%}{%- endif -%}
{%- macro py_type(t) -%}
    {%- if t == "string" -%}str{%- elif t in ("number", "integer") -%}int
    {%- elif t == "array" -%}list{%- else -%}Any{%- endif -%}
{%- endmacro -%}
{{ ns.interval }}
{%- for item in tools if item.type == "function" %}
def {{ item.function.name }}(
{%- for name, spec in item.function.parameters.properties.items() %}
        {{- name }}: {{ py_type(spec.type) }}{% if not loop.last %},{% endif %}
      {{- " " ~ (spec.description or "") }}
{%- endfor %}):
{%- endfor %}
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls is iterable
  and message.tool_calls | length > 0 %}
{%- for arg_name, arg_value in message.tool_calls[0].function.arguments | items %}
{%- set arg_value = arg_value if arg_value is string else arg_value | string %}
{{ "<parameter=" + arg_name + ">" + arg_value + "</parameter>\\n" }}{%- endfor %}
{%- elif message.content is string and message.content | trim | length > 0 %}
{{ "\\n" + message.content | trim + eos_token }}{%- endif %}{%- endfor %}""",
    "Step 3": """
{% macro render_message_content(message) %}{% if message.content is none %}{{- '' }}
{% elif message.content is string %}{{- message.content }}{% elif message.content is mapping %}
{{- message.content['value'] if 'value' in message.content else message.content['text'] }}
{% endif %}{% endmacro %}
{{bos_token}}
{%- for message in messages[::-1] %}
{%- if render_message_content(message) is string
    and not(render_message_content(message).startswith('<tool_response>')) %}
{{- (messages|length - 1) - loop.index0 }}{%- endif %}{%- endfor %}
{%- for message in messages if message.tool_calls %}
{%- for args_name, args_value in message.tool_calls[0].function.arguments|items %}
{%- set args_value = args_value | tojson(ensure_ascii=False) | safe if args_value is mapping
    or (args_value is sequence and args_value is not string) else args_value | string %}
{{- args_name + args_value }}{%- endfor %}{%- endfor %}""",
    "Hunyuan": """
{% set weekday_map = {'Sunday': '星期日', 'Monday': '星期一', 'Tuesday': '星期二'} %}
{% set weekday_cn = weekday_map[strftime_now('%A')] or '-' %}
{% for message in messages %}
    {% if 'content' in message %}{% set content = message['content'] %}{% endif %}
    {% if message['role'] == 'assistant' and 'tool_calls' in message %}
        {% set ns = namespace(tool_calls="[") %}
        {% for tool_call in message['tool_calls'] %}
            {% set arguments = tool_call['function']['arguments'] %}
            {% if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
            {% set ns.tool_calls = ns.tool_calls + '"arguments": ' + arguments + '}' %}
        {% endfor %}
        {% set content = content + ns.tool_calls + ']' %}
    {% endif %}
    {{- '用户：' + content + weekday_cn -}}
{% endfor %}""",
    "InternLM 2": """
{{ bos_token }}
{%- if tools %}{{ '<|plugin|>' + tools|map(attribute='function')|list|tojson(indent=2) }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for tool_call in message.tool_calls or [] %}
{{- (tool_call.function.arguments)|tojson }}{{- ',' if not loop.last else '' }}{%- endfor %}
{{- '<|im_end|>' + '\\n' }}{%- endfor %}""",
    "Nemotron Nano 2": """
{%- set ns = namespace(enable_thinking=true) -%}
{%- for message in messages -%}
  {%- set content = message['content'] -%}
  {%- if message['role'] == 'user' or message['role'] == 'system' -%}
    {%- if '/think' in content -%}{%- set ns.enable_thinking = true -%}
    {%- elif '/no_think' in content -%}{%- set ns.enable_thinking = false -%}{%- endif -%}
    {{- content.replace('/think', '').replace('/no_think', '').strip() + '\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- if '</think>' in content -%}
      {%- set content = content.split('</think>')[1].strip() %}
    {%- endif -%}
    {{- content.strip() -}}
    {%- if message.tool_calls -%}<TOOLCALL>[
      {%- for call in message.tool_calls -%}
        {%- set fn = call.function if call.function is defined else call -%}
        {"name": "{{ fn.name }}", "arguments": {{ fn.arguments | tojson }}}
        {%- if not loop.last -%},{%- endif -%}
      {%- endfor -%}]</TOOLCALL>
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}{{ ns.enable_thinking }}""",
    "Falcon": """
{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{% if message['role'] == 'system' %}{{ message['content'] }}
{% elif message['role'] == 'user' %}
{{ 'User: ' + message['content'].replace('\\r\\n', '\\n').replace('\\n\\n', '\\n').strip() }}
{% elif message['role'] == 'assistant' %}
{{ 'Assistant: ' + message['content']|trim|replace('\\n\\n', '\\n') }}{% endif %}{% endfor %}""",
    "Apertus": """
{%- macro render_tools(tools) -%}
    {%- for tool in tools %}{%- set func = tool.function -%}
        {{- "// " + func.description + "\\n" }}{{- "type "+ func.name + " = " }}
        {%- for param_name, param_spec in func.parameters.properties.items() %}
            {{- param_name }}{%- if param_name not in (func.parameters.required or []) -%}?
            {%- endif -%}
            {%- if param_spec.default is defined -%}
                {{- ", // default: " + param_spec.default|tojson }}
            {%- endif -%}
            {%- if not loop.last %}{{- ",\\n" }}{%- else %}{{- "\\n" }}{%- endif -%}
        {%- endfor %}
    {%- endfor %}
{%- endmacro -%}
{{ bos_token }}
{%- set ns = namespace(in_assistant=false, assistant_format=none) -%}
{{ 'Current date: ' + strftime_now('%Y-%m-%d') }}
{%- if enable_thinking is defined and enable_thinking -%}{{ 'enabled\\n' }}
{%- else -%}{{ 'disabled\\n' }}{%- endif -%}
{{ 'Tool Capabilities:\\n' + render_tools(tools) }}
{%- for message in messages -%}
    {%- if message.content is string and (ns.assistant_format is none
        or ns.assistant_format == "string") -%}
        {%- set ns.assistant_format = "string" -%}{{ message.content }}
    {%- elif message.content is mapping and "blocks" in message.content -%}blocks
    {%- else -%}{{- raise_exception("Invalid user message: " + message.role) -}}{%- endif -%}
{%- endfor -%}""",
    "SmolLM 3": """
{%- if reasoning_mode is not defined %}{%- set reasoning_mode = "/think" %}{%- endif %}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
  {%- set custom_instructions = system_message.replace("/think", "").rstrip() -%}
{%- endif -%}
{%- if tools -%}{%- set ns = namespace(xml_tool_string="<tools>\\n") -%}
  {%- for tool in tools -%}
    {%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool | string) ~ "\\n" -%}
  {%- endfor -%}{{- ns.xml_tool_string + "</tools>" -}}
{%- endif -%}
{{- custom_instructions + "\\n" + strftime_now("%d %B %Y") -}}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "assistant" -%}
    {%- generation -%}
    {%- set content = content.lstrip("\\n") -%}
    {{- "<|im_start|>assistant\\n" + content + "<|im_end|>\\n" -}}
    {%- endgeneration -%}
  {%- endif -%}
{%- endfor -%}""",
    "LFM 2": """
{{- bos_token -}}
{%- set keep_past_thinking = keep_past_thinking | default(false) -%}
{%- set ns = namespace(system_prompt="", last_assistant_index=-1) -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system_prompt = messages[0]["content"] -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- set ns.system_prompt = ns.system_prompt + ("\\n" if ns.system_prompt else "") + "Tools: [" -%}
{%- for tool in tools -%}
    {%- if tool is not string -%}{%- set tool = tool | tojson -%}{%- endif -%}
    {%- set ns.system_prompt = ns.system_prompt + tool -%}
    {%- if not loop.last -%}{%- set ns.system_prompt = ns.system_prompt + ", " -%}{%- endif -%}
{%- endfor -%}
{{- ns.system_prompt + "]" -}}
{%- for message in messages -%}
    {%- if message["role"] == "assistant" -%}
        {%- set ns.last_assistant_index = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = message["content"] -%}
    {%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
    {%- if not keep_past_thinking and loop.index0 != ns.last_assistant_index
        and "</think>" in content -%}
        {%- set content = content.split("</think>")[-1] | trim -%}
    {%- endif -%}
    {{- content + "<|im_end|>\\n" -}}
{%- endfor -%}""",
    "GigaChat 3": """
{#-------- tools ---------#}
{%- macro to_typescript(schema, indent="", indent_factor=2) -%}
	{%- if schema is not mapping -%}{{- 'any' -}}
	{%- elif schema.get('type') is sequence and schema.type is not string -%}
		{%- set nsu = namespace(bits=[]) -%}
		{%- for tname in schema.type -%}
			{%- set frag = to_typescript({'type': tname, 'enum': schema.get('enum')}, indent) -%}
			{%- set nsu.bits = nsu.bits + ['(' ~ frag ~ ')'] -%}
		{%- endfor -%}
		{{- nsu.bits | join(' | ') -}}
	{%- elif schema.get('type') == 'object' -%}{{- "{\\n" -}}
		{%- for key, val in schema.get('properties', {}).items() -%}
			{%- if val.get('description') is string -%}
				{%- for line in val['description'].split('\\n') -%}
					{%- if line.strip() -%}{{- indent + '// ' + line + '\\n' -}}{%- endif -%}
				{%- endfor -%}
			{%- endif -%}
			{%- for add_key, add_val in val.items() if add_key in ['minimum', 'format'] -%}
				{{- indent + '// ' + add_key + ': ' ~ add_val ~ '\\n' -}}
			{%- endfor -%}
			{%- set type_str = to_typescript(val, indent + (' ' * indent_factor)) -%}
			{{- indent + key + ('' if key in schema.required else '?') -}}
            {{- ': ' + type_str + ',\\n' -}}
		{%- endfor -%}
		{{- indent[:-2] + '}' -}}
	{%- elif schema.get('enum') -%}
		{%- set ns = namespace(enum = []) -%}
		{%- for en in schema['enum'] if en is string -%}
			{%- set ns.enum = ns.enum + ['"' ~ en ~ '"'] -%}
		{%- endfor -%}
		{{- ns.enum | join(' | ') -}}
	{%- elif schema.get('type') == 'array' -%}
		{{- '(' ~ to_typescript(schema['items'], indent) ~ ')[]' -}}
	{%- else -%}{{- schema.get('type', 'any') -}}{%- endif -%}
{%- endmacro -%}
{{- to_typescript(tools[0].function.parameters, '  ') -}}
{%- set seg = '0' -%}{{ seg == (seg | int | string) }}{{ '~1a' | replace('~1', '/') }}""",
    "OpenChat": """
{{ bos_token }}{% for message in messages %}
{{ 'GPT4 Correct ' + message['role'].title() + ': ' + message['content'] + '<|end_of_turn|>' }}
{% endfor %}""",
    "Vicuna": """
{% set messages = messages | rejectattr('role', 'in', ['system', 'tool']) | list %}
{% for message in messages %}{% set sep = ' ' if loop.index0 is even else eos_token %}
{{ message['role'] | upper ~ ': ' ~ message['content'] | trim ~ sep }}{% endfor %}""",
    "Zephyr": """
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
}


def of_transformers(template: str) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)
    text = tokenizer.apply_chat_template(
        MESSAGES,
        chat_template=template,
        tools=TOOLS,
        tokenize=False,
        add_generation_prompt=True,
        **VARIABLES,
    )
    assert isinstance(text, str)
    return text


def of_lmi(template: str) -> str:
    chat = Chat(messages=MESSAGES, tools=TOOLS, variables=VARIABLES)
    return ChatTemplate({"default": template}, SPECIAL).render(chat)


@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES)
def test_a_family_s_constructs_render_as_in_transformers(template: str) -> None:
    text = of_transformers(template)
    assert text.strip()
    assert of_lmi(template) == text


def test_there_are_forty_families() -> None:
    assert len(FAMILIES) >= 40


# What minijinja writes otherwise, or cannot do. It does not replace Jinja under limits here
# (measured with the Python package 3.1.0). Its `fuel` counts instructions, not what one of them
# makes: lists that hold each other twice run without end, with the interpreter's lock held, and
# lists that lie 90,000 deep, or a namespace that holds itself, end the process. A template may also
# change the client's messages (`messages.append`). And what it writes differs: floats (`1e20`), `%`
# on texts, `rsplit`, `partition`, `removeprefix`, `varargs`, `cycler`, a property of the name
# `items`.
AS_PYTHON_DOES = [
    ("{{ 'a</think>b</think>c'.rsplit('</think>', 1)[-1] }}", "c"),
    ("{{ 'a</think>b'.partition('</think>')[2] }}", "b"),
    ("{{ 'abc'.removeprefix('a') }}{{ 'abc'.index('c') }}{{ 'x'.zfill(3) }}", "bc200x"),
    ("{{ '%s is %.1f' % ('it', 7.25) }}", "it is 7.2"),
    ("{{ 1e20 }} {{ 1e-7 }} {{ 2 ** 200 > 2 ** 199 }}", "1e+20 1e-07 True"),
    ("{{ 1.0 | tojson }} {{ range(3) }}", "1.0 range(0, 3)"),
    (
        "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, b=3) }}",
        "1(2,){'b': 3}",
    ),
    ("{{ tools[0].function.parameters.properties.items is mapping }}", "False"),
    ("{{ 'a\n' | indent(2) }}|", "a\n|"),
    ("{{ ['a\u200b'] }}", "['a\\u200b']"),
    ("{% set names = cycler('a', 'b') %}{{ names.next() }}{{ names.next() }}", "ab"),
    ("{{ {'a': {'b': 1}} | attr('a') }}{{ 'a b' | wordcount }}", "2"),
]


@pytest.mark.parametrize(("template", "text"), AS_PYTHON_DOES)
def test_values_are_written_and_methods_answer_as_python_s(template: str, text: str) -> None:
    assert of_transformers(template) == of_lmi(template) == text


@pytest.mark.parametrize(
    "template",
    [
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ 'a' < 1 }}",
        "{{ missing | tojson }}",
    ],
)
def test_what_transformers_refuses_is_refused(template: str) -> None:
    with pytest.raises(Exception, match="unsafe|not supported|not JSON serializable"):
        of_transformers(template)

    with pytest.raises(InvalidRequest, match="unsafe|not supported|not JSON serializable"):
        of_lmi(template)

    assert MESSAGES[0]["role"] == "system" and len(MESSAGES) == 6

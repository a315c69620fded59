"""An answer that is valid by a JSON schema, with OpenAI's client."""

import json

from openai import OpenAI

client = OpenAI()  # of OPENAI_BASE_URL and OPENAI_API_KEY
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
)
print(json.loads(answer.choices[0].message.content))

"""Streams of an engine that is slow with its prompts, read by the helpers of openai and anthropic
that join events.
"""

import json
import sys

from anthropic import Anthropic
from openai import OpenAI

base_url = sys.argv[1]
question = [{"role": "user", "content": "Hi"}]
openai = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
anthropic = Anthropic(base_url=base_url, api_key="none", max_retries=0)
said = {}
waited = {}

with openai.chat.completions.stream(model="demo", messages=question) as stream:
    chunks = [event.chunk for event in stream if event.type == "chunk"]
    said["chat"] = stream.get_final_completion().choices[0].message.content
    waited["chat"] = sum(not chunk.choices for chunk in chunks)

pieces = list(openai.completions.create(model="demo", prompt="Hi", stream=True))
said["completion"] = "".join(piece.choices[0].text for piece in pieces if piece.choices)
waited["completion"] = sum(not piece.choices for piece in pieces)

with openai.responses.stream(model="demo", input="Hi") as stream:
    kinds = [event.type for event in stream]
    said["response"] = stream.get_final_response().output_text
    waited["response"] = kinds.count("response.in_progress") - 1

with anthropic.messages.stream(model="demo", messages=question, max_tokens=9) as stream:
    kinds = [event.type for event in stream]
    message = stream.get_final_message()
    said["message"] = message.content[0].text
    waited["message"] = kinds.count("message_delta") - 1
    stop_reason = message.stop_reason

print(json.dumps({"said": said, "waited": waited, "stop_reason": stop_reason}))

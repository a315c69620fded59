"""openai at a gateway that checks bearer tokens, which the SageMaker SDK 3 makes:
openai_bearer.py URL. Prints what it found.
"""

import json
import sys
import time
from datetime import timedelta

# The SDK writes its log to the standard output that it finds
result, sys.stdout = (
    sys.stdout,
    sys.stderr,
)

# ruff: noqa: E402
from openai import OpenAI, PermissionDeniedError
from sagemaker.core.token_generator import generate_token

REGION = "us-east-1"
ASKED = {
    "model": "",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "temperature": 0,
}


def chat_with(token: str):
    base_url = f"{sys.argv[1]}/endpoints/demo/openai/v1"
    return OpenAI(base_url=base_url, api_key=token, max_retries=0).chat.completions


def refusal(token: str) -> str:
    """The class of the error with this token, "" if it is served."""
    try:
        chat_with(token).create(**ASKED)
    except PermissionDeniedError as error:
        return error.response.headers["x-amzn-errortype"]

    return ""


def expired() -> str:
    """The first refusal of a token that is good for a second."""
    token = generate_token(REGION, expiry=timedelta(seconds=1))
    give_up_s = time.monotonic() + 30
    while not (kind := refusal(token)) and time.monotonic() < give_up_s:
        time.sleep(0.1)

    return kind


token = generate_token(REGION)
chat = chat_with(token)
chunks = chat.create(**ASKED, stream=True)
found = {
    "plain": chat.create(**ASKED).choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
    "expired": expired(),
    "mangled": refusal(token[:-9]),
}
print(json.dumps(found), file=result)

"""litellm at a gateway: litellm_client.py URL... . Prints what it found at each.

`sagemaker/` speaks the LMI schema, `sagemaker_chat/` OpenAI's, with the endpoint's name as its
`model`. Both take the whole URL of an operation.
"""

import json
import sys

import litellm

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": "The quick brown"}]


def ask(url: str, place: str, operation: str, **more: object):
    where = {
        "model": f"{place}/my-endpoint",
        "sagemaker_base_url": f"{url}/endpoints/my-endpoint/{operation}",
    }
    return litellm.completion(
        messages=MESSAGES, temperature=0, num_retries=0, **where, **{"max_tokens": 8, **more}
    )


def plain(url: str, place: str) -> str:
    return ask(url, place, "invocations").choices[0].message.content


def streamed(url: str, place: str) -> str:
    chunks = ask(url, place, "invocations-response-stream", stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def refusal(url: str, place: str) -> str:
    try:
        ask(url, place, "invocations", max_tokens=-1)
    except Exception as error:
        return str(error)

    return ""


print(
    json.dumps(
        [
            {
                place: {
                    "plain": plain(url, place),
                    "streamed": streamed(url, place),
                    "refused": refusal(url, place),
                }
                for place in ("sagemaker", "sagemaker_chat")
            }
            for url in sys.argv[1:]
        ]
    )
)

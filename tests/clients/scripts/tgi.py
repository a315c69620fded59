"""The text-generation client at the TGI API: tgi.py BASE_URL."""

import json
import sys

from text_generation import Client
from text_generation.errors import ValidationError

PROMPT = "The quick brown"
client = Client(sys.argv[1])


def refusal() -> str:
    try:
        # The server refuses it: the request is greedy
        client.generate(PROMPT, max_new_tokens=4, best_of=2)
    except ValidationError as error:
        return str(error)

    return ""


whole = client.generate(PROMPT, max_new_tokens=8, decoder_input_details=True)
events = list(client.generate_stream(PROMPT, max_new_tokens=8))
print(
    json.dumps(
        {
            "plain": whole.generated_text,
            "num_tokens": whole.details.generated_tokens,
            "num_prompt_tokens": len(whole.details.prefill),
            "finish_reason": whole.details.finish_reason,
            "streamed": "".join(event.token.text for event in events),
            "last_text": events[-1].generated_text,
            "refusal": refusal(),
        }
    )
)

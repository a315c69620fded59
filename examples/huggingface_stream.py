"""Text token by token, with the client of Hugging Face: python
examples/huggingface_stream.py URL
"""

import sys

from huggingface_hub import InferenceClient

client = InferenceClient(sys.argv[1])
for text in client.text_generation(
    "What is the capital of France?", max_new_tokens=20, stream=True
):
    print(text, end="", flush=True)
print()

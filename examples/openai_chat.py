"""A chat with OpenAI's client, whole and streamed."""

from openai import OpenAI

client = OpenAI()  # of OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "user", "content": "What is the capital of France?"}]

answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
print(answer.choices[0].message.content)

for chunk in client.chat.completions.create(
    model="demo", messages=messages, temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

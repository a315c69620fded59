"""A LoRA adapter is a model of its own to OpenAI's clients: its name is in the list, and a request
names it.
"""

from openai import OpenAI

client = OpenAI()  # of OPENAI_BASE_URL and OPENAI_API_KEY
print(*(model.id for model in client.models.list()))

said = {
    name: client.completions.create(
        model=name, prompt="Once upon a time", max_tokens=8, temperature=0
    )
    .choices[0]
    .text
    for name in ("demo", "poet")
}
print(said["demo"] != said["poet"])

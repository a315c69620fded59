"""langchain-openai at the OpenAI API: langchain.py BASE_URL MODEL."""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

base_url, model = sys.argv[1:]
common = {
    "base_url": f"{base_url}/v1",
    "api_key": "none",
    "model": model,
    "temperature": 0,
    "max_retries": 0,
}
chat = ChatOpenAI(**common, max_tokens=8)
text = OpenAI(**common, max_tokens=8)
print(
    json.dumps(
        {
            "chat": chat.invoke("Hello").content,
            "chat_streamed": "".join(chunk.content for chunk in chat.stream("Hello")),
            "text": text.invoke("The quick brown"),
            "text_streamed": "".join(text.stream("The quick brown")),
        }
    )
)

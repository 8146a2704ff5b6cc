"""Talks to a running `paceline serve` with the official OpenAI client.

python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="unused unless the server was given --api-key")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Give me a haiku about clocks."}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()

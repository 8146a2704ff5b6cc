"""Continues a batch of prompts and answers a conversation, without a server.

python examples/offline.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with LLM(model) as llm:
        prompts = ["The capital of France is", "Once upon a time", "def add(a, b):"]
        for prompt, answer in zip(
            prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)), strict=True
        ):
            print(f"{prompt!r} -> {answer.outputs[0].text!r} ({answer.outputs[0].finish_reason})")
        messages = [{"role": "user", "content": "Name three colours."}]
        for output in llm.chat(messages, SamplingParams(n=2, seed=1, max_tokens=32))[0].outputs:
            print(f"candidate {output.index}: {output.text!r}")


if __name__ == "__main__":
    main()

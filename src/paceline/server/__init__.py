"""HTTP: the OpenAI API over an `AsyncLLM`."""

"""What a model is on disk: configuration, weights, tokenizer, chat template. Loads no torch until a tensor is read."""

"""Why a row cannot go on."""

NOT_FINITE = "the model's logits are not finite"
NOTHING_ALLOWED = "no token may be sampled: none of the allowed ids is in the tokenizer's vocabulary"

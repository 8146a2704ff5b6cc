"""What a decoder is made of: linear, attention with its KV cache, norm, rotary embedding."""

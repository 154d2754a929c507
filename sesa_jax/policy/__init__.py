"""The policies: one dense decoder, its weights, tokenizer and sharding."""

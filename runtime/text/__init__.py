"""Text on the front's side: tokenizer, chat template, streaming detokenizer. No torch, no transformers."""

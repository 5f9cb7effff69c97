"""A small real BPE vocabulary, so that `--tokenizer bundled` runs the path of a real model's tokenizer offline."""

"""Opens GGUF files: what they say becomes the files that a model's folder has."""

"""Print the tokenizer.json of a model folder that has only an older form of tokenizer.

A program of its own, started by tokenizer.py: transformers takes seconds to load and may bring torch, 400 MB that a
front-end worker must not hold. Offline: the folder is all it reads. The last line on standard error tells a fault.
"""

from __future__ import annotations

import os
import sys


def main(folder: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        sys.exit(f"needs the package transformers ({error})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = tokenizer.backend_tokenizer.to_str()
    except Exception as error:
        sys.exit(f"{' '.join(str(error).split())} (packages that may be needed: sentencepiece, protobuf, tiktoken)")
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1])

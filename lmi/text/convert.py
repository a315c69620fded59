"""Print the tokenizer.json of a model folder that has only an older form of tokenizer.

tokenizer.py runs this program in a child process, because transformers takes seconds to load and
may import torch, 400 MB that a front end must not hold. The last line on standard error reports a
fault.
"""

import os
import sys


def main(folder: str) -> None:
    """Print the tokenizer of a folder. Exits with a line on standard error for a fault."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        sys.exit(f"needs the package transformers ({error})")

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = tokenizer.backend_tokenizer.to_str()
    except Exception as error:
        sys.exit(
            f"{' '.join(str(error).split())} (packages that may be needed: sentencepiece, "
            f"protobuf, tiktoken)"
        )

    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1])

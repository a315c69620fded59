"""A bearer token of the SageMaker SDK 3: bearer_token.py REGION. Prints it."""

import json
import sys

# The SDK writes its log to the standard output that it finds
result, sys.stdout = (
    sys.stdout,
    sys.stderr,
)

# ruff: noqa: E402
from sagemaker.core.token_generator import generate_token

print(json.dumps(generate_token(sys.argv[1])), file=result)

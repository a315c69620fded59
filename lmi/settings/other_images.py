"""Variables that AWS's other images read and this server does not, yet. Who moves here may still set them.

Sources: AWS's pages of its vLLM, SGLang and llama.cpp images, and of its container standards.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = ("SM_VLLM_", "SM_SGLANG_", "SM_LLAMA_CPP_", "CUSTOM_FASTAPI_", "SUPERVISOR_")
NAMES = frozenset(
    "CUSTOM_PRE_PROCESS CUSTOM_POST_PROCESS CUSTOM_SCRIPT_FILENAME PROCESS_AUTO_RECOVERY SAGEMAKER_MODEL_PATH "
    "STANDARD_PIP_ARGS".split()
)
# supervisord gives these to every process that it starts.
OF_SUPERVISORD = frozenset(
    "SUPERVISOR_ENABLED SUPERVISOR_GROUP_NAME SUPERVISOR_PROCESS_NAME SUPERVISOR_SERVER_URL".split()
)


def is_of_other_image(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and name not in OF_SUPERVISORD)


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Return the line about such variables, or no line. Their values may be secrets."""
    names = sorted(filter(is_of_other_image, environ))
    if not names:
        return []
    counted = "1 variable" if len(names) == 1 else f"{len(names)} variables"
    return [f"{counted} of AWS's other images not read yet: {', '.join(names)}"]

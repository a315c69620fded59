"""The packages that TensorRT-LLM was built for, in the engine's process.

lmi's environment lies on top of one that has TensorRT-LLM, as in the image, and has newer versions of some packages
there: the huggingface_hub that lmi fetches models with ends the import of the transformers that TensorRT-LLM 1.2 pins.
So the engine's process looks for a package below first. Of lmi's own packages it needs few, and front ends need none of
those below. Source: requirements.txt of TensorRT-LLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from lmi.settings.handler import folder_of


def base_packages(environ: Mapping[str, str], own: str = sys.prefix) -> Mapping[str, str]:
    """The variable with which a process, and those that it starts, take packages from where TensorRT-LLM is.

    It is empty if TensorRT-LLM is in lmi's own environment, the folder `own`, or not installed.
    """
    library, given = folder_of("tensorrt_llm"), environ.get("PYTHONPATH", "")
    if library is None or library.is_relative_to(own):
        return {}
    below = str(library.parent)
    paths = [path for path in given.split(os.pathsep) if path and path != below]
    return {"PYTHONPATH": os.pathsep.join([below, *paths])}


if __name__ == "__main__":
    print(base_packages(os.environ).get("PYTHONPATH", ""))

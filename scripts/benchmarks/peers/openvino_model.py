"""Exports a Hugging Face folder for OpenVINO, as float32 and with int8 weights. Runs in the peer's own venv.

python -m scripts.benchmarks.peers.openvino_model FROM FOLDER
"""

import sys
from pathlib import Path


def export(source: str, folder: Path) -> None:
    from optimum.exporters.openvino import main_export  # type: ignore[import-not-found]
    from optimum.intel import OVConfig, OVWeightQuantizationConfig  # type: ignore[import-not-found]

    for name, config in (
        ("f32", OVConfig(dtype="fp32")),
        ("int8", OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=False))),
    ):
        main_export(source, output=folder / name, task="text-generation-with-past", ov_config=config)


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]))

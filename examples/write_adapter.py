"""Write a LoRA adapter for the demo model, as PEFT saves it: python examples/write_adapter.py
FOLDER

Its weights are random, so what the model says with it is noise: it is for trying how adapters are
served.
"""

import json
import random
import struct
import sys
from array import array
from pathlib import Path

# all but the rank: of the demo model
RANK = 4
NUM_LAYERS = 6
HIDDEN_SIZE = 192
VALUE_SIZE = 64


def matrix(rows: int, columns: int) -> tuple[list[int], bytes]:
    return [rows, columns], array(
        "f", (random.gauss(0, 0.5) for _ in range(rows * columns))
    ).tobytes()


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["v_proj"]}
(folder / "adapter_config.json").write_text(json.dumps(config))

random.seed(0)
header = {}
data = b""
for layer in range(NUM_LAYERS):
    linear = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
    for part, shape in (("lora_A", (RANK, HIDDEN_SIZE)), ("lora_B", (VALUE_SIZE, RANK))):
        size, numbers = matrix(*shape)
        offsets = [len(data), len(data) + len(numbers)]
        header[f"{linear}.{part}.weight"] = {"dtype": "F32", "shape": size, "data_offsets": offsets}
        data += numbers
text = json.dumps(header).encode()
(folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)

"""The adapter of a `generate`."""

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """Names a registered adapter. Its files are not read by this."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

"""A vLLM plugin for tests: its CPU platform with a name by which Ray counts devices."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"


def register() -> str:
    return "ray_platform.RayCpuPlatform"

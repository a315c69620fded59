"""The parts of a run of all tests: each runs in one process, one test after the other. A part is
what shares servers or engines, else a file.
"""

SHARING = {
    "vllm": (
        "tests/system/test_vllm_nodes.py",
        "tests/system/test_vllm_overload.py",
        "tests/system/test_vllm_scale.py",
        "tests/system/test_vllm_strikes.py",
    ),
    # They start servers and processes of their own
    "compiling": ("tests/handlers/vllm/test_compiling.py",),
    "start errors of vllm": ("tests/handlers/vllm/test_start_errors.py",),
    # vLLM in the process of the tests, which takes long to import it
    "library of vllm": ("tests/handlers/vllm/",),
    "doors of vllm": ("tests/system/test_vllm_openai.py", "tests/system/test_vllm_parameters.py"),
    "contract": ("tests/conformance/", "tests/test_parameters.py"),
    "tiny": tuple(
        f"tests/system/test_{name}.py" for name in ("apis", "equality", "faults", "serving")
    ),
}
# The parts of a run that take longest, the longest first: whoever begins one late keeps the others
# waiting at the end.
FIRST = (
    "vllm",
    "library of vllm",
    "contract",
    "compiling",
    "tests/test_docs.py",
    "tests/system/test_processes.py",
    "tests/system/sagemaker/test_adapters.py",
    "tests/clients/test_gateway_clients.py",
    "tests/system/test_vllm_images.py",
    "tests/clients/test_agents.py",
    "tests/system/test_overload.py",
    "tests/clients/test_pages.py",
    "tests/system/sagemaker/test_models.py",
    "tests/clients/test_clients.py",
    "tiny",
    "tests/system/test_real_model.py",
    "doors of vllm",
    "tests/system/test_trtllm_life.py",
    "tests/scripts/test_serve.py",
    "tests/clients/test_schemathesis.py",
    "tests/gateway/test_gateway.py",
    "tests/system/sagemaker/test_adapter_sources.py",
    "tests/system/test_start.py",
    "tests/handlers/lmi_dist/test_guides.py",
    "tests/scripts/test_overload.py",
    "tests/test_rerun.py",
    "tests/scripts/test_peers.py",
    "tests/system/test_guides.py",
    "tests/system/test_user_code.py",
)


def part_of(nodeid: str) -> str:
    """What a test runs together with: a name in SHARING, or its file."""
    return next(
        (name for name, places in SHARING.items() if nodeid.startswith(places)),
        nodeid.split("::", 1)[0],
    )

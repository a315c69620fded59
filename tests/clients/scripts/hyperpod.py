"""The classes of AWS's package sagemaker-hyperpod, with which its operator's manifests are checked:
hyperpod.py SPEC, as JSON. Prints what they have read.
"""

import importlib.util
import sys
from importlib.metadata import distribution

FILE = "sagemaker/hyperpod/inference/config/hp_endpoint_config.py"

# The package itself wants a cluster's libraries
place = distribution("sagemaker-hyperpod").locate_file(FILE)
module_spec = importlib.util.spec_from_file_location("hp_endpoint_config", place)
module = importlib.util.module_from_spec(module_spec)
sys.modules[module_spec.name] = module
module_spec.loader.exec_module(module)

spec = module._HPEndpoint.model_validate_json(sys.argv[1])
print(spec.model_dump_json(exclude_unset=True))

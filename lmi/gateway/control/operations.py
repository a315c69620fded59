"""The operations of the control plane, by AWS's names."""

from collections.abc import Callable

from lmi.gateway.control import components, configs, endpoints, models, routers, tags
from lmi.gateway.control.configs import CONFIGS
from lmi.gateway.control.models import MODELS
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.service_model import Members

Operation = Callable[[Plane, Members, str], Members]
# Each takes the members of its input and the region, and returns at least those of its output.
OPERATIONS: dict[str, Operation] = {
    "AddTags": tags.add,
    "CreateEndpoint": endpoints.create,
    "CreateEndpointConfig": configs.create,
    "CreateInferenceComponent": components.create,
    "CreateInferenceRouter": routers.create,
    "CreateModel": models.create,
    "DeleteEndpoint": endpoints.delete,
    "DeleteEndpointConfig": CONFIGS.delete,
    "DeleteInferenceComponent": components.delete,
    "DeleteInferenceRouter": routers.delete,
    "DeleteModel": MODELS.delete,
    "DeleteTags": tags.delete,
    "DescribeEndpoint": endpoints.describe,
    "DescribeEndpointConfig": CONFIGS.describe,
    "DescribeInferenceComponent": components.describe,
    "DescribeInferenceRouter": routers.describe,
    "DescribeModel": MODELS.describe,
    "ListEndpointConfigs": CONFIGS.list_all,
    "ListEndpoints": endpoints.list_all,
    "ListInferenceComponents": components.list_all,
    "ListInferenceRouters": routers.list_all,
    "ListModels": MODELS.list_all,
    "ListTags": tags.list_all,
    "UpdateEndpoint": endpoints.update,
    "UpdateEndpointWeightsAndCapacities": endpoints.update_weights,
    "UpdateInferenceComponent": components.update,
    "UpdateInferenceComponentRuntimeConfig": components.update_runtime,
    "UpdateInferenceRouter": routers.update,
}

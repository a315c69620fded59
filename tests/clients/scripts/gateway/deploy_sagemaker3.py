"""The SageMaker SDK 3 deploys a model at a gateway: deploy_sagemaker3.py KIND MODEL. Prints what it
saw.
"""

import json
import sys

# The SDK writes its log to the standard output that it finds
result, sys.stdout = (
    sys.stdout,
    sys.stderr,
)

# ruff: noqa: E402
from sagemaker.core.resources import Endpoint, EndpointConfig, Model
from sagemaker.serve.builder.schema_builder import SchemaBuilder
from sagemaker.serve.model_builder import ModelBuilder
from sagemaker.serve.utils.types import ModelServer

kind, model_id = sys.argv[1:]
name = f"sdk3-{kind.lower().replace('_', '-')}"
asked = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}}
builder = ModelBuilder(
    model=model_id,
    model_server=ModelServer[kind],
    schema_builder=SchemaBuilder(asked, [{"generated_text": "fox"}]),
    role_arn="arn:aws:iam::123456789012:role/sagemaker",
    instance_type="ml.g5.2xlarge",
)
model = builder.build()
endpoint = builder.deploy(endpoint_name=name)
answer = json.loads(
    endpoint.invoke(body=json.dumps(asked), content_type="application/json").body.read()
)
container = Model.get(model.model_name).primary_container

# A fault of 3.27.0: deploy(update_endpoint=True) fails in the SDK, before any call.
first_config = Endpoint.get(name).endpoint_config_name
variants = EndpointConfig.get(first_config).production_variants
variants[0].initial_instance_count = 2
second_config = f"{name}-second"
EndpointConfig.create(endpoint_config_name=second_config, production_variants=variants)
endpoint.endpoint_config_name = second_config
endpoint.update()
endpoint.wait_for_status("InService", poll=1)
described = Endpoint.get(name)

endpoint.delete()
endpoint.wait_for_delete()
for config_name in (first_config, second_config):
    EndpointConfig.get(config_name).delete()

model.delete()
found = {
    "image": container.image,
    "environment": container.environment,
    "answer": answer,
    "was_updated": described.endpoint_config_name == second_config,
    "instances": described.production_variants[0].current_instance_count,
}
print(json.dumps(found), file=result)

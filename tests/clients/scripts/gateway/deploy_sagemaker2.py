"""The SageMaker SDK 2 deploys a model at a gateway: deploy_sagemaker2.py KIND MODEL. Prints what it
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
import boto3
from sagemaker import image_uris
from sagemaker.async_inference import AsyncInferenceConfig, WaiterConfig
from sagemaker.base_deserializers import JSONDeserializer
from sagemaker.base_serializers import JSONSerializer
from sagemaker.compute_resource_requirements import ResourceRequirements
from sagemaker.djl_inference import DJLModel
from sagemaker.enums import EndpointType
from sagemaker.huggingface import HuggingFaceModel, get_huggingface_llm_image_uri
from sagemaker.model import Model
from sagemaker.predictor import Predictor
from sagemaker.serve import ModelBuilder, SchemaBuilder
from sagemaker.serve.utils.types import ModelServer
from sagemaker.session import Session

kind, model_id = sys.argv[1:]
name = f"sdk2-{kind.lower().replace('_', '-')}"
asked = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}}
role = "arn:aws:iam::123456789012:role/sagemaker"
session = Session()
control = boto3.client("sagemaker")
environment = {"HF_MODEL_ID": model_id}
options = {}
if kind in ("Model", "AsyncInferenceConfig", "ResourceRequirements"):
    image = image_uris.retrieve("djl-lmi", region="us-east-1", version="0.30.0")
    model = Model(
        image_uri=image,
        role=role,
        env=environment,
        sagemaker_session=session,
        predictor_cls=Predictor,
    )
elif kind == "HuggingFaceModel":
    image = get_huggingface_llm_image_uri("huggingface", session=session)
    model = HuggingFaceModel(image_uri=image, role=role, env=environment, sagemaker_session=session)
elif kind == "DJLModel":
    model = DJLModel(model_id=model_id, role=role, sagemaker_session=session)
else:
    model = ModelBuilder(
        model=model_id,
        model_server=ModelServer[kind],
        schema_builder=SchemaBuilder(asked, [{"generated_text": "fox"}]),
        role_arn=role,
        instance_type="ml.g5.2xlarge",
        sagemaker_session=session,
    ).build()

if kind == "AsyncInferenceConfig":
    place = f"s3://{session.default_bucket()}"
    options["async_inference_config"] = AsyncInferenceConfig(
        output_path=f"{place}/answers", failure_path=f"{place}/failures"
    )

if kind == "ResourceRequirements":
    requests = {"memory": 1024, "num_accelerators": 1, "copies": 1}
    options["endpoint_type"] = EndpointType.INFERENCE_COMPONENT_BASED
    options["resources"] = ResourceRequirements(requests=requests)

predictor = model.deploy(
    initial_instance_count=1, instance_type="ml.g5.2xlarge", endpoint_name=name, **options
)
predictor.serializer = JSONSerializer()
predictor.deserializer = JSONDeserializer()
if kind == "AsyncInferenceConfig":
    # It asks and reads by the one that it has, and waits for the failure to the end.
    predictor.predictor.serializer = predictor.serializer
    predictor.predictor.deserializer = predictor.deserializer
    answer = predictor.predict(asked, waiter_config=WaiterConfig(max_attempts=60, delay=1))
else:
    answer = predictor.predict(asked)

container = control.describe_model(ModelName=model.name)["PrimaryContainer"]
if kind == "ResourceRequirements":
    component = predictor.component_name
    described = control.describe_inference_component(InferenceComponentName=component)
    session.update_inference_component(
        component, described["Specification"], runtime_config={"CopyCount": 2}, wait=True
    )
    described = control.describe_inference_component(InferenceComponentName=component)
    num_instances = described["RuntimeConfig"]["CurrentCopyCount"]
    was_updated = True
    predictor.delete_predictor(wait=True)
else:
    first_config = control.describe_endpoint(EndpointName=name)["EndpointConfigName"]
    predictor.update_endpoint(
        initial_instance_count=2, instance_type="ml.g5.2xlarge", model_name=model.name
    )
    described = control.describe_endpoint(EndpointName=name)
    num_instances = described["ProductionVariants"][0]["CurrentInstanceCount"]
    was_updated = first_config != described["EndpointConfigName"]

predictor.delete_endpoint()
model.delete_model()
found = {
    "image": container["Image"],
    "environment": container["Environment"],
    "answer": answer,
    "was_updated": was_updated,
    "instances": num_instances,
}
print(json.dumps(found), file=result)

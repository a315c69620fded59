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
from sagemaker.base_deserializers import JSONDeserializer
from sagemaker.base_serializers import JSONSerializer
from sagemaker.djl_inference import DJLModel
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
environment = {"HF_MODEL_ID": model_id}
if kind == "Model":
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

predictor = model.deploy(
    initial_instance_count=1, instance_type="ml.g5.2xlarge", endpoint_name=name
)
predictor.serializer = JSONSerializer()
predictor.deserializer = JSONDeserializer()
answer = predictor.predict(asked)

control = boto3.client("sagemaker")
container = control.describe_model(ModelName=model.name)["PrimaryContainer"]
first_config = control.describe_endpoint(EndpointName=name)["EndpointConfigName"]
predictor.update_endpoint(
    initial_instance_count=2, instance_type="ml.g5.2xlarge", model_name=model.name
)
described = control.describe_endpoint(EndpointName=name)

predictor.delete_endpoint()
model.delete_model()
found = {
    "image": container["Image"],
    "environment": container["Environment"],
    "answer": answer,
    "was_updated": first_config != described["EndpointConfigName"],
    "instances": described["ProductionVariants"][0]["CurrentInstanceCount"],
}
print(json.dumps(found), file=result)

"""boto3's TargetModel: boto3_target_model.py URL TARGET... . Prints the answers, or the class and
cause of errors.
"""

import json
import sys

import boto3
from botocore.exceptions import ClientError

url, *targets = sys.argv[1:]
client = boto3.client("sagemaker-runtime", endpoint_url=url)


def invoke(target: str) -> dict:
    try:
        answer = client.invoke_endpoint(EndpointName="demo", TargetModel=target, Body=b"hello")
    except ClientError as error:
        return {"error": error.response["Error"]["Code"], "message": str(error)}

    return json.loads(answer["Body"].read())


print(json.dumps([invoke(target) for target in targets]))

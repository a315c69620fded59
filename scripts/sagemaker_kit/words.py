"""The words of `scripts/sagemaker` and their flags. Nothing here needs a package, so help is there
before any is.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from scripts.sagemaker_kit import hyperpod, plans
from scripts.sagemaker_kit.steps import Plan


def parse(arguments: Sequence[str] | None = None) -> tuple[Callable[[Namespace], Plan], Namespace]:
    """Return the plan of the word and its flags. A usage error ends the process with
    exit code 2.
    """
    parser = ArgumentParser(
        prog="scripts/sagemaker", description="Deploy the image to SageMaker and use it."
    )
    words = parser.add_subparsers(metavar="WORD", required=True)
    for name, (plan, help, add_flags) in WORDS.items():
        word = words.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False
        )
        word.set_defaults(plan=plan)
        word.add_argument(
            "name",
            metavar="NAME",
            help="the image's tag" if name == "push" else "the endpoint's name",
        )
        add_flags(word)
        word.add_argument("--region", help="AWS region (default: as boto3 finds it)")
        word.add_argument(
            "--dry-run", action="store_true", help="send nothing, print each call as a line of JSON"
        )
        word.add_argument(
            "--poll",
            type=float,
            default=15.0,
            metavar="S",
            help="seconds between two looks at a status",
        )

    options = parser.parse_args(arguments)
    return options.plan, options


def _push(word: ArgumentParser) -> None:
    word.add_argument("--image", default="lmi", help="the image on this machine (default: lmi)")
    word.add_argument(
        "--repository",
        required=True,
        metavar="URI",
        help="ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME",
    )


def _deploy(word: ArgumentParser) -> None:
    _release(word)
    _component(word, "a base inference component of this name, for adapters")
    _scaling(word)


def _component(word: ArgumentParser, help: str) -> None:
    word.add_argument("--component", help=help)
    word.add_argument(
        "--memory-mb", type=int, metavar="MB", help="memory of each copy of the component"
    )
    word.add_argument("--gpus", type=int, metavar="N", help="GPUs of each copy of the component")


def _update(word: ArgumentParser) -> None:
    _release(word)
    _component(word, "update this base inference component, with --count copies")
    word.add_argument(
        "--rolling",
        type=int,
        metavar="PERCENT",
        help="replace so many of the instances or copies at a time, 5 to 50 (default: start all "
        "new instances beside the former)",
    )
    word.add_argument(
        "--wait-s", type=int, metavar="S", help="look at the alarms for so long after each batch"
    )
    word.add_argument(
        "--alarm",
        action="append",
        default=[],
        metavar="NAME",
        help="a CloudWatch alarm that takes the update back; repeated",
    )
    word.add_argument(
        "--keep-count",
        action="store_true",
        help="keep the number of instances or copies, which scaling has set, in place of --count",
    )


def _release(word: ArgumentParser) -> None:
    _model(word, is_required=True)
    word.add_argument(
        "--multi-model",
        metavar="S3",
        help="prefix of all models' archives, for a multi-model endpoint",
    )
    word.add_argument(
        "--async", dest="async_output", metavar="S3", help="where answers go, for an async endpoint"
    )
    word.add_argument(
        "--startup-timeout", type=int, default=1800, metavar="S", help="until /ping is 200 (1800)"
    )
    word.add_argument(
        "--download-timeout",
        type=int,
        default=1800,
        metavar="S",
        help="for the model's files (1800)",
    )
    _instances(word)
    _records(word)


def _instances(word: ArgumentParser) -> None:
    word.add_argument(
        "--ami-version",
        metavar="AMI",
        help="InferenceAmiVersion (default: for NVIDIA's GPUs that of AWS's vLLM images, else "
        "SageMaker's)",
    )
    word.add_argument(
        "--fallback",
        action="append",
        default=[],
        metavar="T",
        help="another instance type, taken when those before it have no room; repeated",
    )
    word.add_argument(
        "--capacity-reservation", metavar="ARN", help="take instances of this reservation only"
    )
    word.add_argument(
        "--kms-key",
        metavar="KEY",
        help="encrypts the volume",
    )
    word.add_argument(
        "--routing",
        default="LEAST_OUTSTANDING_REQUESTS",
        metavar="STRATEGY",
        help="LEAST_OUTSTANDING_REQUESTS (the default), RANDOM, PREFIX_AWARE or KV_AWARE",
    )
    word.add_argument(
        "--prefix-length", type=int, metavar="N", help="PREFIX_AWARE: bytes of a body that count"
    )
    word.add_argument(
        "--prefix-threshold",
        type=int,
        metavar="N",
        help="PREFIX_AWARE: requests at once from which another instance is taken",
    )


def _scaling(word: ArgumentParser) -> None:
    word.add_argument("--min-count", type=int, metavar="N", help="least instances or copies (1)")
    word.add_argument(
        "--max-count", type=int, metavar="N", help="most instances or copies; switches scaling on"
    )
    word.add_argument(
        "--target-concurrency",
        type=float,
        default=8.0,
        metavar="N",
        help="requests at once of an instance or copy that scaling aims at (8)",
    )


def _records(word: ArgumentParser) -> None:
    word.add_argument("--capture", metavar="S3", help="capture requests and answers there")
    word.add_argument(
        "--capture-percent", type=int, default=100, metavar="P", help="share that is captured (100)"
    )
    word.add_argument(
        "--output-kms-key", metavar="KEY", help="encrypts captures and asynchronous answers"
    )
    word.add_argument(
        "--metrics-s",
        type=int,
        metavar="S",
        help="enhanced metrics and detailed observability, published each S seconds",
    )


def _hyperpod(word: ArgumentParser) -> None:
    word.add_argument("--image", required=True, metavar="URI", help="the image in ECR")
    word.add_argument("--instance-type", required=True, metavar="T", help="such as ml.g6.xlarge")
    word.add_argument(
        "--fallback",
        action="append",
        default=[],
        metavar="T",
        help="another instance type, taken when those before it have no room; repeated",
    )
    word.add_argument("--count", type=int, default=1, help="replicas (1)")
    word.add_argument(
        "--model",
        required=True,
        help="s3://BUCKET/PREFIX, fsx://FILE-SYSTEM/FOLDER or the id of a model on the hub",
    )
    word.add_argument(
        "--hf-token-secret", metavar="NAME/KEY", help="the Kubernetes secret with the hub's token"
    )
    _environment(word)
    word.add_argument(
        "--path", default="invocations", help="where requests of the endpoint go (invocations)"
    )
    word.add_argument(
        "--routing",
        choices=hyperpod.ROUTINGS,
        help="which replica gets a request (default: the one with the fewest requests)",
    )
    word.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of a replica (1 where there are some)"
    )
    word.add_argument("--cpus", type=int, metavar="N", help="cores of a replica")
    word.add_argument("--memory-mb", type=int, metavar="MB", help="memory of a replica")
    word.add_argument(
        "--startup-timeout", type=int, default=1800, metavar="S", help="until /ping is 200 (1800)"
    )
    word.add_argument("--namespace", help="of the cluster")
    word.add_argument("--certificates", metavar="S3", help="where the operator puts certificates")
    word.add_argument("--capture", metavar="S3", help="capture requests and answers there")
    word.add_argument(
        "--capture-percent", type=int, default=100, metavar="P", help="share that is captured (100)"
    )
    word.add_argument(
        "--tag", action="append", default=[], metavar="K=V", help="of the endpoint; repeated"
    )


def _teardown(word: ArgumentParser) -> None:
    word.add_argument(
        "--scaled", action="store_true", help="end the scaling that deploy --max-count began"
    )


def _adapter(word: ArgumentParser) -> None:
    word.add_argument(
        "--component", required=True, help="the adapter's name, by which requests ask for it"
    )
    word.add_argument("--base", required=True, help="the base component, as in deploy --component")
    word.add_argument(
        "--artifact", required=True, metavar="S3", help="the adapter's files as s3://….tar.gz"
    )


def _transform(word: ArgumentParser) -> None:
    _model(word, is_required=False)
    word.add_argument("--input", required=True, metavar="S3", help="file or prefix with JSON lines")
    word.add_argument("--output", required=True, metavar="S3", help="prefix for the answers")


def _model(word: ArgumentParser, is_required: bool) -> None:
    word.add_argument("--image", required=is_required, metavar="URI", help="the image in ECR")
    word.add_argument(
        "--role", required=is_required, metavar="ARN", help="the role that SageMaker takes on"
    )
    word.add_argument("--instance-type", required=True, metavar="T", help="such as ml.g6.xlarge")
    word.add_argument("--count", type=int, default=1, help="instances (1)")
    word.add_argument(
        "--model", help="s3://… or the id of a model on the hub (default: the built-in demo)"
    )
    _environment(word)
    word.add_argument(
        "--network-isolation", action="store_true", help="no network for the container"
    )
    word.add_argument(
        "--subnet", action="append", default=[], metavar="ID", help="a VPC's subnet; repeated"
    )
    word.add_argument(
        "--security-group",
        action="append",
        default=[],
        metavar="ID",
        help="a VPC's security group; repeated",
    )
    word.add_argument(
        "--tag", action="append", default=[], metavar="K=V", help="of all that is made; repeated"
    )


def _environment(word: ArgumentParser) -> None:
    word.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="a variable of the container; repeated",
    )


def _invoke(word: ArgumentParser) -> None:
    word.add_argument(
        "--body", required=True, metavar="FILE", help="the request; with --async also s3://…"
    )
    word.add_argument("--content-type", default="application/json", metavar="TYPE")
    word.add_argument("--stream", action="store_true", help="print the answer as it is generated")
    word.add_argument(
        "--async", dest="is_async", action="store_true", help="print where the answer will be"
    )
    word.add_argument("--target-model", metavar="FILE", help="a model of a multi-model endpoint")
    word.add_argument("--component", help="an inference component, such as an adapter")
    word.add_argument(
        "--endpoint-url", metavar="URL", help="in place of AWS, such as lmi gateway's"
    )


WORDS: dict[str, tuple[Callable[[Namespace], Plan], str, Callable[[ArgumentParser], None]]] = {
    "push": (plans.push, "bring an image into ECR", _push),
    "deploy": (plans.deploy, "create a model and an endpoint, and wait until it serves", _deploy),
    "update": (plans.update, "put another model or image into an endpoint that serves", _update),
    "adapter": (plans.adapter, "load a LoRA adapter as an inference component", _adapter),
    "transform": (
        plans.transform,
        "run a batch transform job over files of JSON lines",
        _transform,
    ),
    "invoke": (plans.invoke, "send one request and print the answer", _invoke),
    "hyperpod": (
        hyperpod.hyperpod,
        "print the manifest for HyperPod's inference operator, and send nothing",
        _hyperpod,
    ),
    "teardown": (
        plans.teardown,
        "delete the endpoint and all that it consists of",
        _teardown,
    ),
}


if __name__ == "__main__":
    parse()

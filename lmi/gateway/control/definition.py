"""What a container definition means on this machine, and which of them an operator allows.

Its image is `lmi serve`, its model's data a folder or an archive of a bucket that the operator
names, its environment that of the process. Without `trusts_models` the process runs in lmi's secure
mode, and gets the variables that give options of the model, so that no definition reaches a file or
code that is not the model's.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lmi.errors import shorten
from lmi.gateway.control.service_model import Members, invalid
from lmi.gateway.model_store import LoadFailed, ModelStore
from lmi.gateway.stores import S3_SCHEME, parse_s3
from lmi.settings import llama_cpp
from lmi.settings.given import Given, collect
from lmi.settings.images import givens as givens_of_images
from lmi.settings.properties import Properties
from lmi.settings.table import MODEL, find
from lmi.sources.source import NoObjects

# Where a definition expects its model.
MODEL_FOLDER = "/opt/ml/model"
MAX_ENVIRONMENT_BYTES = 32 << 10
# Options that decide where the process listens, which the gateway does.
OF_GATEWAY = frozenset(
    (
        "host",
        "inference_address",
        "management_port",
        "multi_model",
        "port",
        "safe_port_range",
        "ssl_certfile",
        "ssl_keyfile",
        "with_gateway",
    )
)
# What gives no option and is passed too.
PASSED = frozenset(
    ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", llama_cpp.FILE_OF_REPOSITORY)
)
SECURE_MODE = {
    "SAGEMAKER_SECURE_MODE": "true",
    "SAGEMAKER_SECURITY_CONTROLS": (
        "DISALLOW_CUSTOM_INFERENCE_SCRIPTS,DISALLOW_PICKLE_FILES,DISALLOW_REQUIREMENTS_TXT,"
        "DISALLOW_TRUST_REMOTE_CODE"
    ),
}
# Variables of the gateway that are not for the containers of its clients.
OF_OPERATOR = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY|^AWS_|^SM_|^LMI_")
# What stands in messages for a path of this machine.
HIDDEN = "…"
# An absolute path, not part of another word or of a URL, and none that AWS's containers have.
OTHER_PATH = re.compile(
    r"(?:file://|(?<![\w/.…]))/(?!/|opt/ml\b|dev/shm\b)[^\s'\"`,;()]+",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where the data of a model is: a key below a folder or `s3://BUCKET`."""

    root: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the process of a container is started: what it serves, and its environment."""

    # A folder, or the name of a built-in model.
    model: str
    environ: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Definitions:
    """The rules for the containers of this gateway, and what they mean. Files are kept below
    `folder`.

    `buckets` has, by name, the folder that stands for a bucket, or "" for the bucket of S3.
    """

    folder: Path
    buckets: Mapping[str, str]
    images: Sequence[str]
    trusts_models: bool

    def check(self, container: Members) -> None:
        """Raise AwsError for a container that cannot run here or that the operator does not
        allow.
        """
        image = container.get("Image")
        if image is None:
            raise invalid("Image must be given: this gateway has no model packages.")

        if self.images and not any(fnmatchcase(image, pattern) for pattern in self.images):
            raise invalid(f"Image {shorten(image)} is none that --image allows at this gateway.")

        if container.get("Mode") == "MultiModel":
            raise invalid("Mode MultiModel is not run here: lmi gateway --models serves such.")

        for member in ("ModelPackageName", "AdditionalModelDataSources"):
            if container.get(member):
                raise invalid(f"{member} is not supported by this gateway.")

        self.source(container)
        self._check_environment(container.get("Environment") or {})

    def source(self, container: Members) -> Source | None:
        """Return where the model's data is, or None if the container has none. Raises AwsError for
        a place that the operator does not allow.
        """
        url = container.get("ModelDataUrl")
        data_source = container.get("ModelDataSource") or {}
        if data_source:
            if url:
                raise invalid("ModelDataUrl and ModelDataSource must not both be given.")

            url = (data_source.get("S3DataSource") or {}).get("S3Uri")

        return self.place(url) if url else None

    def place(self, url: str) -> Source:
        """Return what `s3://BUCKET/KEY` means. Raises AwsError for what no operator allows."""
        if not url.startswith(S3_SCHEME):
            raise invalid(f"Model data must be at s3://BUCKET/KEY, given {shorten(url)}")

        bucket, key = parse_s3(url)
        if bucket not in self.buckets:
            raise invalid(f"Bucket {shorten(bucket)} is none that --bucket allows at this gateway.")

        key = key.rstrip("/")
        if "\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
            raise invalid(
                f"The key of model data must have no part that is empty, . or .., given "
                f"{shorten(url)}"
            )

        return Source(self.buckets[bucket] or f"{S3_SCHEME}{bucket}", key)

    def launch(self, container: Members) -> Launch:
        """Return how a container's process is started, after its files were brought.

        Raises AwsError, or LoadFailed of `model_store.py`. It blocks.
        """
        variables: dict[str, str] = container.get("Environment") or {}
        source = self.source(container)
        names_model = any(given.key == MODEL for given in _givens(variables))
        if source is not None:
            model = str(self._fetch(source, may_be_empty=names_model))
        elif names_model:
            model = str(self._empty())
        else:
            model = "demo"

        passed = {}
        for name, value in variables.items():
            if self.trusts_models or _is_passed(name, value):
                passed[name] = _in_folder(value, model)
            else:
                log.warning("variable %s of a model is not passed without --trust-models", name)

        inherited = {}
        for name, value in os.environ.items():
            if not OF_OPERATOR.search(name) and not _givens({name: value}):
                inherited[name] = value

        own = {
            "SERVING_DOWNLOAD_DIR": str(self.folder / "downloads"),
            "SERVING_ADAPTER_ROOTS": str(self._adapters),
        }
        if not self.trusts_models:
            own |= SECURE_MODE

        return Launch(model=model, environ={**inherited, **passed, **own})

    def without_paths(self, text: str) -> str:
        """Return a text for clients, in which no path tells where this machine keeps its files.

        What follows a folder of the gateway stays, since it names the client's own files.
        """
        # The folders go first, since their paths may hold blanks.
        for folder in (str(self.folder), *self.buckets.values()):
            if len(folder) > 1:
                text = text.replace(folder, HIDDEN)

        return OTHER_PATH.sub(HIDDEN, text)

    def fetch_adapter(self, source: Source) -> Path:
        """Return the folder that an adapter was brought to, which containers may read. Raises
        AwsError or LoadFailed. It blocks.
        """
        folder = ModelStore(source.root, self._adapters, label="Adapter").add(source.key).folder
        return folder

    @property
    def _adapters(self) -> Path:
        return self.folder / "downloads" / "adapters"

    def _fetch(self, source: Source, may_be_empty: bool) -> Path:
        """Return the folder that a model was brought to, perhaps an empty one where S3 has no
        objects. Raises AwsError or LoadFailed.
        """
        store = ModelStore(source.root, self.folder / "models", label="Model data")
        try:
            folder = store.add(source.key).folder
        except LoadFailed as failure:
            if not (may_be_empty and isinstance(failure.__cause__, NoObjects)):
                raise

            # The SageMaker SDK's ModelBuilder uploads a folder without files.
            log.warning("%s", failure)
            return self._empty()

        return folder

    def _empty(self) -> Path:
        """Return a folder without files, for a container that brings its model itself."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return empty

    def _check_environment(self, variables: Mapping[str, str]) -> None:
        num_bytes = 0
        for name, value in variables.items():
            num_bytes += len(name.encode()) + len(value.encode())
            if "\0" in value:
                raise invalid(f"Environment {name} must not hold a NUL character.")

            for given in _givens({name: value}):
                option = find(given.key)
                path = given.text
                is_path = option is not None and option.is_path and path.startswith("/")
                if is_path and not self.trusts_models and not _is_in_model_folder(path):
                    raise invalid(
                        f"Environment {name} must not name a folder of this machine but "
                        f"{MODEL_FOLDER}, given {shorten(value)}"
                    )

        if num_bytes > MAX_ENVIRONMENT_BYTES:
            raise invalid(
                f"Environment must have at most {MAX_ENVIRONMENT_BYTES} bytes, given {num_bytes}"
            )


def _givens(variables: Mapping[str, str]) -> list[Given]:
    """Return the options that variables give to a server."""
    return [*collect(Properties(), variables, {}), *givens_of_images(variables)]


def _is_passed(name: str, value: str) -> bool:
    """Whether a variable reaches a process that runs in secure mode."""
    if name in PASSED:
        return True

    givens = _givens({name: value})
    for given in givens:
        option = find(given.key)
        is_for_operator = option is not None and option.is_for_operator
        if is_for_operator or given.key in OF_GATEWAY:
            return False

    return bool(givens)


def _is_in_model_folder(path: str) -> bool:
    return path == MODEL_FOLDER or path.startswith(f"{MODEL_FOLDER}/")


def _in_folder(value: str, model: str) -> str:
    """Return a value in which the folder of a container's model is the one of this machine."""
    return model + value.removeprefix(MODEL_FOLDER) if _is_in_model_folder(value) else value

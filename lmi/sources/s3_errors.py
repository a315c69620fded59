"""What the errors of boto3 mean: whether they may pass, what is wrong, and who can mend it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import botocore.exceptions as faults  # type: ignore[import-untyped]
from s3transfer import exceptions as transfer_faults  # type: ignore[import-untyped]

from lmi.errors import ModelUnusable, cause_line
from lmi.sources.job import PASSING_STATUSES, Damaged, MayPass

# What an operation needs.
PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "GetObject": "s3:GetObject",
}
PASSING_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError"}
)
PASSING = (
    faults.ConnectionError,
    faults.HTTPClientError,
    faults.IncompleteReadError,
    transfer_faults.S3ValidationError,
    transfer_faults.RetriesExceededError,
)
REFUSED_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)
GONE = frozenset({"404", "NoSuchKey", "412", "PreconditionFailed"})
CREDENTIALS = (
    faults.NoCredentialsError,
    faults.PartialCredentialsError,
    faults.CredentialRetrievalError,
    faults.ProfileNotFound,
    faults.TokenRetrievalError,
    faults.SSOError,
    faults.NoAuthTokenError,
)


class NoS3(ValueError):
    """An answer is not one of S3: too large, without an end, or without what each such
    answer has.
    """


@contextmanager
def explained(url: str, *, read_key: str = "") -> Iterator[None]:
    """Turn boto3's errors into MayPass, Damaged or an error that says what is wrong for good.

    `read_key` is given while an object of a listing is read. If it is missing then, it has changed.
    """
    try:
        yield
    except faults.ClientError as error:
        raise error_of_answer(error, url, read_key) from error
    except CREDENTIALS as error:
        raise ModelUnusable(f"{url}: no credentials for S3: {cause_line(error)}") from error
    except transfer_faults.S3DownloadFailedError as error:
        raise _changed(read_key, "PreconditionFailed") from error
    except PASSING as error:
        cause = getattr(error, "last_exception", error)
        raise MayPass(f"{type(cause).__name__}: {cause_line(cause)}") from error
    except NoS3 as error:
        raise ModelUnusable(f"{url} does not answer as S3: {error}") from error
    except (faults.BotoCoreError, ValueError) as error:
        raise ModelUnusable(f"{url}: {type(error).__name__}: {cause_line(error)}") from error


def error_of_answer(error: Any, url: str, read_key: str = "") -> Exception:
    """Return the error that an answer of S3 is, which boto3 raised as `error`."""
    code = code_of(error)
    operation = error.operation_name
    if read_key and code in GONE:
        return _changed(read_key, code)

    message = error.response.get("Error", {}).get("Message", "")
    reason = f"S3 answers {code} to {operation}: {message}"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status in PASSING_STATUSES or code in PASSING_CODES:
        return MayPass(reason)

    if code in REFUSED_CREDENTIALS:
        return ModelUnusable(f"{url}: {reason}; the credentials are not valid")

    permission = PERMISSIONS.get(operation)
    if permission is None:
        return ModelUnusable(f"{url}: {reason}")

    return ModelUnusable(f"{url}: {reason}; it needs the permission {permission}")


def _changed(key: str, code: str) -> Damaged:
    return Damaged(
        key, wanted="the object of the listing", found=f"another or none, since it changed ({code})"
    )


def code_of(error: Any) -> str:
    """Return S3's word for an error, "" where the answer has none."""
    return str(error.response.get("Error", {}).get("Code", ""))

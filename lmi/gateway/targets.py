"""TargetModel: the models of multi-model endpoints, and what a client gets of their faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from lmi.gateway.container import ContainerFault
from lmi.gateway.endpoints import Endpoint
from lmi.gateway.errors import AwsError, invalid, model_error
from lmi.gateway.invocations import as_aws_error
from lmi.gateway.library import Library, ModelBroken, NoSuchModel
from lmi.gateway.settings import ANY
from lmi.gateway.shelf import Refused, Shelf


class Targets:
    """The models of all endpoints. `libraries` has theirs by name, ANY stands for every other name.

    A client waits at most `timeout_s` for a model to be loaded. The load goes on.
    """

    def __init__(self, libraries: Mapping[str, Library], timeout_s: float) -> None:
        self._libraries = libraries
        self._timeout_s = timeout_s
        self._shelves: dict[str, Shelf] = {}  # by the URL of their container

    async def start(self) -> None:
        """Load nothing: each model is loaded when a client first names it."""

    async def close(self) -> None:
        await asyncio.gather(*(shelf.close() for shelf in self._shelves.values()))

    @asynccontextmanager
    async def lease(self, endpoint: Endpoint, target_model: str, region: str) -> AsyncIterator[str]:
        """Load the model, and keep it until the block ends. Yields the path to invoke it. Raises AwsError."""
        shelf = self._shelves.setdefault(endpoint.container.url, Shelf(endpoint.container))
        library = self._library(endpoint)
        async with AsyncExitStack() as stack:
            with _aws_errors(endpoint, target_model, region):
                async with asyncio.timeout(self._timeout_s):
                    name = await stack.enter_async_context(shelf.lease(library, target_model))
            yield f"/models/{name}/invoke"

    def are_of(self, endpoint: Endpoint) -> bool:
        """Whether the endpoint is a multi-model endpoint."""
        return not self._libraries.keys().isdisjoint((endpoint.name, ANY))

    def _library(self, endpoint: Endpoint) -> Library:
        if not self.are_of(endpoint):
            raise invalid(f"Endpoint {endpoint.name} is not a multi-model endpoint: --models names no source for it.")
        return self._libraries.get(endpoint.name) or self._libraries[ANY]


@contextmanager
def _aws_errors(endpoint: Endpoint, target_model: str, region: str) -> Iterator[None]:
    """Raise what a client gets when a model could not be loaded."""
    try:
        yield
    except NoSuchModel as error:
        raise invalid(str(error)) from error
    except ModelBroken as error:
        raise model_error(0, str(error), endpoint.name, region) from error
    except Refused as error:
        raise model_error(error.status, error.body, endpoint.name, region) from error
    except ContainerFault as fault:
        raise as_aws_error(fault, endpoint, region) from fault
    except TimeoutError:
        not_ready = f"TargetModel {target_model} is still loading. Try again later."
        raise AwsError("ModelNotReadyException", 429, not_ready) from None

"""All APIs of the server, and which one a path, a route or a body means. A further API is one more
row.
"""

from msgspec.structs import replace

from lmi.apis.anthropic.api import ANTHROPIC
from lmi.apis.base.api import AnyApi
from lmi.apis.batch import DYNAMIC_BATCH
from lmi.apis.embeddings.api import EMBEDDING_INPUTS, EMBEDDINGS
from lmi.apis.lmi.api import LMI
from lmi.apis.openai.api import (
    OPENAI_CHAT,
    OPENAI_CHAT_LINES,
    OPENAI_COMPLETIONS,
    OPENAI_TEXT_LINES,
)
from lmi.apis.responses.api import RESPONSES
from lmi.apis.tgi.api import TGI, TGI_GENERATE, TGI_STREAM
from lmi.apis.triton.api import TRITON, TRITON_STREAM
from lmi.settings.config import ModelConfig

ROWS: tuple[AnyApi, ...] = (
    LMI,
    DYNAMIC_BATCH,
    TRITON,
    TRITON_STREAM,
    OPENAI_CHAT,
    OPENAI_CHAT_LINES,
    OPENAI_COMPLETIONS,
    OPENAI_TEXT_LINES,
    TGI,
    TGI_GENERATE,
    TGI_STREAM,
    RESPONSES,
    ANTHROPIC,
    EMBEDDINGS,
)


def _by_route() -> dict[str, AnyApi]:
    routes = {}
    for api in ROWS:
        for path in api.paths:
            if path != "/" and "{" not in path:
                routes[path] = replace(api, json_end=b"\n")

    return routes


APIS = {api.name: api for api in ROWS}
BY_ROUTE = _by_route()
BY_FIELD = {api.body_field: api for api in ROWS if api.body_field}
"""Further APIs of /invocations. Their JSON ends with a newline, because clients read that path by
lines.
"""


def api_of_inputs(model: ModelConfig, *, gives_embeddings: bool = False) -> AnyApi:
    """Return the API of bodies with `inputs`, which are texts to continue, or of an embedding model
    texts to embed.
    """
    if gives_embeddings:
        return EMBEDDING_INPUTS

    return DYNAMIC_BATCH if model.dynamic_batch else LMI


def api_at(path: str, model: ModelConfig) -> AnyApi:
    """Return the API with the longest prefix of a path, even if nothing is served there, the first
    of several.

    With dynamic batches DYNAMIC_BATCH replaces LMI.
    """
    longest = ""
    api: AnyApi = LMI
    for candidate in APIS.values():
        for prefix in (*candidate.prefixes, *candidate.paths):
            if path.startswith(prefix) and len(prefix) > len(longest):
                longest = prefix
                api = candidate

    return api_of_inputs(model) if api is LMI else api

"""How to reach a server: the URL of its routes, and the key that it wants."""


def base_of(url: str) -> str:
    """Return the URL of a server's OpenAI routes, whether or not `url` names their folder."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/"


def headers_of(api_key: str | None) -> dict[str, str]:
    """Return the header with the first of a server's keys."""
    if not api_key:
        return {}

    key = api_key.split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"}

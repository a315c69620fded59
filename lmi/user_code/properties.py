"""What user code is told of a request beside its body: the properties of an Input."""

from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange


def properties_of(exchange: Exchange) -> dict[str, str]:
    """Return headers with capitalised names, and each `name=value` of the custom attributes, as in
    the reference.
    """
    fields = {name.title(): value for name, value in exchange.headers.items()}
    for attribute in exchange.headers.get(CUSTOM_ATTRIBUTES, "").split(";"):
        name, equals, value = attribute.partition("=")
        if equals:
            fields[name.strip()] = value.strip()

    return fields

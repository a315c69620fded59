"""What a schema asks for and no answer can be held to."""


class SchemaFault(ValueError):
    """What cannot be followed. Where it stands is known to the reader of its schema."""

"""One container that serves a large language model behind the APIs that its clients already use."""

__version__ = "0.1.0"

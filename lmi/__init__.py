"""One container that serves a large language model behind the contracts its clients already speak."""

__version__ = "0.1.0"

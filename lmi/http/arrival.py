"""How much of a request has come, and the limits on that, which are those of edge proxies."""

from msgspec import Struct

from lmi.http.refusals import Refusal
from lmi.http.request_head import MAX_HEAD_BYTES, large_head

# The fields of a head, and those of a trailer.
MAX_FIELDS = 128
# A body has at most MAX_CHUNKS, or one for each LARGE_CHUNK_BYTES that have come.
MAX_CHUNKS = 65_536
LARGE_CHUNK_BYTES = 1024
# The most bytes of chunk extensions and blanks, which the parser passes to no callback.
MAX_UNREPORTED_BYTES = 16 << 10
# The most bytes around a chunk without an extension.
CHUNK_LINES_BYTES = 32
MIN_BODY_BYTES_PER_S = 1024


class Arrival(Struct):
    """What has come of one request. To count what is too much raises Refusal."""

    # All bytes that were passed to the parser.
    num_fed_bytes: int = 0
    num_head_bytes: int = 0
    num_trailers: int = 0
    num_chunks: int = 0
    num_body_bytes: int = 0
    # The time that the client had for its body so far.
    body_s: float = 0.0

    def count_head(self, num_bytes: int) -> None:
        self.num_head_bytes += num_bytes
        if self.num_head_bytes > MAX_HEAD_BYTES:
            raise large_head()

    def count_trailer(self) -> None:
        self.num_trailers += 1
        if self.num_trailers > MAX_FIELDS:
            raise Refusal(431, f"a request has at most {MAX_FIELDS} trailer fields")

    def count_chunk(self) -> None:
        self.num_chunks += 1
        max_chunks = max(MAX_CHUNKS, 1 + self.num_body_bytes // LARGE_CHUNK_BYTES)
        if self.num_chunks > max_chunks:
            raise Refusal(
                400,
                f"a body has at most {MAX_CHUNKS} chunks, "
                f"or one for each {LARGE_CHUNK_BYTES} bytes",
            )

    @property
    def has_many_unreported(self) -> bool:
        """Whether the parser has taken in too much that it passes to no callback."""
        num_reported_bytes = self.num_head_bytes + self.num_body_bytes
        num_reported_bytes += CHUNK_LINES_BYTES * self.num_chunks
        return self.num_fed_bytes - num_reported_bytes > MAX_UNREPORTED_BYTES

    @property
    def is_slow(self) -> bool:
        """Whether fewer bytes of the body have come than its client had time for."""
        return self.num_body_bytes < MIN_BODY_BYTES_PER_S * self.body_s

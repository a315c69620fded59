"""Tells routers what a KV cache keeps and forgets, in the messages of vLLM over ZeroMQ.

A router that knows which replica has the beginning of a prompt sends the prompt there. A subscriber
gets batches of events, each with the next number. One that misses a number asks for it again at the
second socket, where the last batches are kept. Nobody waits for a subscriber: one that is too slow
misses batches.

`events.py` has the messages, `endpoints.py` where the sockets of a replica are, `publisher.py` the
thread that sends, and `replay.py` what it keeps and sends again.
"""

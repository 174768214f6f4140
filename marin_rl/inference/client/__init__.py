"""Requests, responses and the clients that send them: the one door to OpenAI clients."""

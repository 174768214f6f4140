"""Routes: accepted bodies, the way of a request through the engine, responses, streams."""

"""The server: OpenAI-compatible routes over the engine, who may call them, and its life."""

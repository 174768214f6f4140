"""Model APIs of OpenAI and Anthropic: requests as calls, and answers in their shapes."""

"""Text and tokens: chat templates, detokenization, tool calls, grammars."""

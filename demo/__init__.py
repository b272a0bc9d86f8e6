"""The page: a chat beside live figures of what the KV cache is worth."""

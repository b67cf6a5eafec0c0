"""The endpoint and its page."""

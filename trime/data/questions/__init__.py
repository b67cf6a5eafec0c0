"""Questions over contexts: their sources, the prompt template, and the exact match of answers."""

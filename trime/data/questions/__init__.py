"""Questions over contexts: where they come from, how a model is asked, and when an answer is right."""

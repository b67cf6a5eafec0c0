"""An endpoint in the form of OpenAI's API for a model with a memory, and a page over it."""

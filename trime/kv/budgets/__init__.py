"""How the room of a model's memories is shared among its layers and heads."""

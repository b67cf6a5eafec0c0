"""Budgets: the shares of layers and heads in the room of a model's memories."""
